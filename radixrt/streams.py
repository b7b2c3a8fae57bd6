"""Ways to read one request's items: an iterator for threads, an async iterator for event loops."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol, TypeVar

from radixrt.delivery import Deliver, OutputCollector
from radixrt.types import GenerateRequest, GenerationOutput, OutputChunk

T = TypeVar("T")


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
    """Submit a request and give its chunks on the running loop; leaving early or cancelling aborts it."""
    items: asyncio.Queue[OutputChunk | BaseException] = asyncio.Queue()
    ticket = await _submitted(submit, request, _on_loop(items.put_nowait))
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


async def whole_output(
    submit: Callable[[GenerateRequest, Deliver], Abortable], request: GenerateRequest
) -> GenerationOutput:
    """Submit a request and give its output; cancelling aborts it. The running loop is woken once, at the end."""
    collector = OutputCollector(request.prompt_ids, num_samples=request.sampling.n)
    done: asyncio.Future[GenerationOutput | BaseException] = asyncio.get_running_loop().create_future()

    def settle(item: GenerationOutput | BaseException) -> None:
        if not done.done():  # it was cancelled
            done.set_result(item)

    ticket = await _submitted(submit, request, collector.deliver_to(_on_loop(settle)))
    try:
        item = await done
    except BaseException:  # cancelled, or dropped
        ticket.abort()
        raise
    if isinstance(item, BaseException):
        raise item
    return item


def _on_loop(take: Callable[[T], None]) -> Callable[[T], None]:
    """Give a call that any thread may make, and that `take` gets on the running loop."""
    loop = asyncio.get_running_loop()

    def hand_over(item: T) -> None:
        try:
            loop.call_soon_threadsafe(take, item)
        except RuntimeError:  # the loop is closed: whoever waited is gone and has aborted the request
            return

    return hand_over


async def _submitted(
    submit: Callable[[GenerateRequest, Deliver], Abortable], request: GenerateRequest, deliver: Deliver
) -> Abortable:
    """Submit a request; from another thread if it has a constraint, which may take long to compile.

    When cancelled meanwhile, what comes of it is aborted.
    """
    if request.sampling.grammar is None:
        return submit(request, deliver)
    submitted = asyncio.get_running_loop().run_in_executor(None, submit, request, deliver)
    try:
        return await asyncio.shield(submitted)
    except asyncio.CancelledError:
        submitted.add_done_callback(_abort)
        raise


def _abort(submitted: asyncio.Future[Abortable]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().abort()
