"""One client's connection: whoever keeps the server waiting, before a request or while reading an answer, is cut off."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import secrets
import sys
import termios
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from radixrt.server.errors import refused

# Name of the ASGI extension by which a scope offers WritePart.
PARTS = "radixrt.parts"
# Write a part of an answer whose beginning was sent; give what to wait for if the client does not keep up.
WritePart = Callable[[bytes], Awaitable[None] | None]


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, with an end to its patience; it alone would wait for ever.

    A request whose answer is being made is the server's turn and never cut off here: its body and its answer have limits
    of their own. At all other times, and while an answer cannot be sent on, something must move within patience_s.
    """

    def __init__(self, *args: Any, patience_s: float, **named: Any) -> None:
        super().__init__(*args, **named)
        self._patience_s = patience_s
        self._seen: tuple[object, int] | None = (None, 0)
        self._timer: asyncio.TimerHandle | None = None
        self._inner = self.app
        self.app = self._offer_parts

    async def _offer_parts(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; where an answer of unknown length goes out in chunks, it may write them itself."""
        extensions = scope.setdefault("extensions", {})
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            extensions[PARTS] = self._part_writer()
        try:
            await self._inner(scope, receive, send)
        finally:
            extensions.pop(PARTS, None)  # it holds what holds the scope

    def _part_writer(self) -> WritePart:
        """Give what frames a part as h11 does, which keeps no count of chunks, and spares its many looks at each."""
        cycle, flow, transport = self.cycle, self.flow, self.transport

        def write(part: bytes) -> Awaitable[None] | None:
            if part and not cycle.disconnected:
                transport.write(b"%x\r\n%b\r\n" % (len(part), part))
            return flow.drain() if flow.write_paused and not cycle.disconnected else None

        return write

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """End watching."""
        if self._timer is not None:
            self._timer.cancel()
        self.app = self._inner  # a method of ours would keep us until the garbage collector comes
        super().connection_lost(exc)

    def _look(self) -> None:
        seen = self._held_up()
        if seen is not None and seen == self._seen:
            self.transport.abort()
            return
        self._seen = seen
        self._timer = self.loop.call_later(self._patience_s, self._look)

    def _held_up(self) -> tuple[object, int] | None:
        """Give what would have changed, had the client done anything since the last look; None: it is not its turn."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not self.flow.write_paused:
            return None
        return self.cycle, self.transport.get_write_buffer_size() + self._num_kernel_bytes()

    def _num_kernel_bytes(self) -> int:
        """Give the sent bytes that the client has not taken; without them a slow reader would look like none."""
        count = array.array("i", [0])
        with contextlib.suppress(OSError):  # the socket is being closed
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
        return count[0]

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as all errors are answered, and close the connection."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            failure = refused(status, "the request breaks a rule of HTTP/1.1", code="invalid_http").failure
            answer = failure.response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            headers.append((b"x-request-id", f"req_{secrets.token_hex(12)}".encode()))
            events = (
                h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event))
        self.transport.close()
