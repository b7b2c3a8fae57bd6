"""Server-sent events: a response that ends its work when the reader goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from radixrt.server.answers import dump, total, usage_notes
from radixrt.server.connections import PARTS, WritePart
from radixrt.server.gate import Visit, note_failure
from radixrt.server.running import Batch, until_disconnect
from radixrt.types import OutputChunk, Usage

DONE = b"data: [DONE]\n\n"
_LINE_BREAKS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class EventStream(EventSourceResponse):
    """Send events as they come. The reader's going away cancels the generator, whatever it waits for.

    Args:
        batch: what the events are made of: closed at the end, even if the generator never began.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], batch: Batch | None = None) -> None:
        super().__init__(events, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._events = events
        self._batch = batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events to the end, or until nobody reads them."""
        write = scope.get("extensions", {}).get(PARTS)
        # In a task of its own, which a chunk wakes alone, without all the layers that the request came through.
        sending = asyncio.create_task(
            self.stream_response(send) if write is None else self._write(send, write)
        )
        try:
            await until_disconnect(receive, sending)
        finally:
            if self._batch is not None:
                self._batch.close()
            await self._events.aclose()

    async def _write(self, send: Send, write: WritePart) -> None:
        """Send the events past all that only looks at an answer's beginning and its end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for events in self._events:
            if (room := write(events)) is not None:
                await room
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(data: str, *, name: str | None = None, event_id: str | None = None) -> bytes:
    """Give one event; JSON text holds no line break, so the common case needs no splitting. Pure.

    Many clients take characters for line breaks that are none in this protocol, and cut events there: in JSON text,
    where they stand inside strings, they are escaped.
    """
    if not data.isascii():
        for character, escaped in _LINE_BREAKS.items():
            if character in data:
                data = data.replace(character, escaped)
    if name is None and event_id is None and "\n" not in data and "\r" not in data:
        return f"data: {data}\n\n".encode()
    return format_sse_event(data_str=data, event=name, id=event_id)


class ChunkWriter(Protocol):
    """Writes the answer to a batch as events of one route."""

    def begin(self) -> list[bytes]:
        """Give what stands before all chunks."""

    def write(self, request_index: int, chunk: OutputChunk) -> list[bytes]:
        """Give the events of one chunk of the engine."""

    def end(self, usage: Usage) -> list[bytes]:
        """Give what stands behind all chunks."""


async def stream_events(batch: Batch, visit: Visit, writer: ChunkWriter) -> AsyncGenerator[bytes, None]:
    """Give a batch's events to the end; a failure is an error event, and then there is no [DONE]."""
    usages: list[Usage] = []
    try:
        if events := writer.begin():
            yield b"".join(events)
        async for chunks in batch:
            if events := [written for index, chunk, _ in chunks for written in writer.write(index, chunk)]:
                yield b"".join(events)
            usages += [chunk.usage for _, chunk, _ in chunks if chunk.usage is not None]
        usage = total(usages)
        visit.notes.update(usage_notes(usage))
        yield b"".join([*writer.end(usage), DONE])
    except Exception as error:  # noqa: BLE001 - told to the reader, and to the log
        yield event(dump(note_failure(visit, error).body()))
    finally:
        batch.close()
