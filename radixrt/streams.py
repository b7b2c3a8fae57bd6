"""Ways to read one request's items: an iterator for threads, an async iterator for event loops."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol

from radixrt.delivery import Deliver
from radixrt.types import GenerateRequest, OutputChunk


class Abortable(Protocol):
    """A submitted request."""

    @property
    def abort(self) -> Callable[[], None]:
        """End it; does nothing when it is done."""
        ...


class ChunkStream(Iterator[OutputChunk]):
    """The chunks of one request; ends after the last one, raises what ended it otherwise.

    Closing or dropping it aborts the request.
    """

    def __init__(self, items: queue.SimpleQueue[OutputChunk | BaseException], ticket: Abortable) -> None:
        self._items = items
        self._ticket = ticket
        self._is_done = False

    def __next__(self) -> OutputChunk:
        if self._is_done:
            raise StopIteration
        try:
            item = self._items.get()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if isinstance(item, BaseException):
            self._is_done = True
            raise item
        self._is_done = item.usage is not None
        return item

    def close(self) -> None:
        """Abort the request, unless it is done."""
        self._is_done = True
        self._ticket.abort()

    def __del__(self) -> None:
        self.close()


async def stream_chunks(
    submit: Callable[[GenerateRequest, Deliver], Abortable], request: GenerateRequest
) -> AsyncGenerator[OutputChunk, None]:
    """Submit a request and give its chunks on the running loop; leaving early or cancelling aborts it.

    A constraint may take long to compile, so a constrained request is submitted from another thread.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[OutputChunk | BaseException] = asyncio.Queue()

    def deliver(item: OutputChunk | BaseException) -> None:
        try:
            loop.call_soon_threadsafe(items.put_nowait, item)
        except RuntimeError:  # the loop is closed: whoever waited is gone and has aborted the request
            return

    if request.sampling.grammar is None:
        ticket = submit(request, deliver)
    else:
        ticket = await _in_thread(lambda: submit(request, deliver))
    is_last = False
    try:
        while not is_last:
            item = await items.get()
            is_last = isinstance(item, BaseException) or item.usage is not None
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        if not is_last:
            ticket.abort()


async def _in_thread(submit: Callable[[], Abortable]) -> Abortable:
    """Submit from a thread; when cancelled meanwhile, abort what comes of it."""
    submitted = asyncio.get_running_loop().run_in_executor(None, submit)
    try:
        return await asyncio.shield(submitted)
    except asyncio.CancelledError:
        submitted.add_done_callback(_abort)
        raise


def _abort(submitted: asyncio.Future[Abortable]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().abort()
