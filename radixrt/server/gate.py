"""The gate in front of all routes: an id for each request, its key, its limits, its line in the log."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixrt.errors import first_line
from radixrt.server.errors import Failure, failure_of, refused
from radixrt.server.security import EVERYONE, PUBLIC_PATHS, KeyRing, Tenant

access_log = logging.getLogger("radixrt.access")
logger = logging.getLogger("radixrt.server")
MAX_LABEL_CHARACTERS = 128


@dataclass(slots=True)
class Visit:
    """One HTTP request on its way through the server.

    Attributes:
        request_id: made here; a client's own id is a label in the log, nothing else.
        started_s: when it arrived, by time.perf_counter.
        num_body_bytes: of its body, once read.
        deadline_s: when it must be done, by the same clock; set once its body is read.
        notes: what the routes want in the log's line.
        is_counted: it is among those in progress.
    """

    request_id: str
    tenant: Tenant = EVERYONE
    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    num_body_bytes: int = 0
    deadline_s: float = float("inf")
    is_counted: bool = False


Begin = Callable[[Scope, Visit], Callable[[], None]]


class Load:
    """Count the requests in progress. Owned by the event loop's thread.

    Invariant: 0 <= num_open <= max_open.
    """

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.num_open = 0
        self.is_draining = False

    def enter(self, visit: Visit) -> None:
        """Count a request in."""
        visit.is_counted = True
        self.num_open += 1

    def leave(self, visit: Visit) -> None:
        """Count a request out, once."""
        if visit.is_counted:
            visit.is_counted = False
            self.num_open -= 1


class Gate:
    """ASGI middleware: what it lets through has an id, a tenant and sizes within the limits.

    Default deny: a path that is not public needs a key, whether it has a route or not.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        load: Load,
        max_header_bytes: int,
        watchers: Sequence[Begin] = (),
    ) -> None:
        """Take over an app.

        Args:
            watchers: called with each request; what they give is called once, the last one first: before the
                answer's last part is sent, or when there is no more to come.
        """
        self._app = app
        self._watchers = watchers
        self._keys = keys
        self._load = load
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there is no WebSocket route, and none shall slip past the key
            await send({"type": "websocket.close", "code": 1008})
            return
        visit = Visit(f"req_{secrets.token_hex(12)}")
        scope.setdefault("state", {})["visit"] = visit
        ends = [begin(scope, visit) for begin in self._watchers]

        def finish() -> None:
            while ends:
                ends.pop()()

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                name = (b"x-request-id", visit.request_id.encode())
                message = {**message, "headers": [*message["headers"], name]}
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last:
                finish()
            await send(message)
            if is_last:  # the app has turns to go yet, and the client may ask again meanwhile
                self._load.leave(visit)

        try:
            await self._pass(scope, receive, answered, visit)
        except ClientDisconnect:
            visit.notes["outcome"] = "disconnected"
        except asyncio.CancelledError:
            visit.notes["outcome"] = "cancelled"
            raise
        except Exception as error:
            failure = failure_of(error)
            _note_reason(visit, error, failure)
            if visit.status:
                raise  # the response has begun: breaking the connection is all that is left to do
            await failure.response()(scope, receive, answered)
        finally:
            finish()
            _log(scope, visit)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, visit: Visit) -> None:
        headers = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > self._max_header_bytes:
            raise refused(
                431, f"headers must have at most {self._max_header_bytes} bytes", code="headers_too_large"
            )
        _note_label(headers, visit)
        if scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        tenant = self._keys.tenant(_header(headers, b"authorization"))
        if tenant is None:
            raise refused(
                401,
                "this server needs an API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                www_authenticate="Bearer",
            )
        visit.tenant = tenant
        load = self._load
        if scope["method"] == "POST":
            if load.is_draining:
                raise refused(503, "the server is stopping", code="engine_stopped", retry_after="5")
            if load.num_open >= load.max_open:
                raise refused(
                    429,
                    f"at most {load.max_open} requests may be in progress",
                    code="queue_full",
                    retry_after="1",
                )
        load.enter(visit)
        try:
            await self._app(scope, receive, send)
        finally:
            load.leave(visit)


def visit_of(scope: Scope) -> Visit:
    """Give the visit that the gate opened."""
    visit = scope["state"]["visit"]
    assert isinstance(visit, Visit)
    return visit


def _header(headers: list[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    """Give a header's value; None when it is missing or stands there twice."""
    found = [value for name, value in headers if name == wanted]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _note_label(headers: list[tuple[bytes, bytes]], visit: Visit) -> None:
    label = _header(headers, b"x-request-id") or _header(headers, b"x-client-request-id")
    if label:
        visit.notes["client_request_id"] = label[:MAX_LABEL_CHARACTERS]


def _log(scope: Scope, visit: Visit) -> None:
    access_log.info(
        "request",
        extra={
            "fields": {
                "request_id": visit.request_id,
                "tenant": visit.tenant.name,
                "method": scope["method"],
                "path": scope["path"][:256],
                "status": visit.status,
                "seconds": round(time.perf_counter() - visit.started_s, 6),
                **visit.notes,
            }
        },
    )


def note_failure(visit: Visit, error: BaseException) -> Failure:
    """Give what the client is told about an error in mid-stream; the log gets the reason."""
    failure = failure_of(error)
    visit.notes["outcome"] = failure.code or "failed"
    _note_reason(visit, error, failure)
    return failure


def _note_reason(visit: Visit, error: BaseException, failure: Failure) -> None:
    """Put what the client is not told into the log. A traceback is for bugs: anyone can let a deadline pass."""
    if failure.status >= 500:
        visit.notes["error"] = first_line(error)
    if failure.status == 500:
        logger.error("request %s failed", visit.request_id, exc_info=error)
