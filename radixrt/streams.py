"""Ways to read one request's items: an iterator for threads, an async iterator for event loops."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from radixrt.delivery import Deliver, OutputCollector
from radixrt.mailbox import Mailbox, Reader
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
    submit: Callable[[GenerateRequest, Deliver], Abortable],
    request: GenerateRequest,
    *,
    mailbox: Mailbox | None = None,
) -> AsyncGenerator[OutputChunk, None]:
    """Submit a request and give its chunks on the running loop; leaving early or cancelling aborts it.

    Args:
        mailbox: the engine's for the running loop; default: one of its own, which wakes the loop at every item.
    """
    reader: Reader[OutputChunk | BaseException] = Reader(mailbox or _own_mailbox())
    ticket = await _submitted(submit, request, reader.post)
    is_last = False
    try:
        while not is_last:
            item = await reader.next()
            is_last = isinstance(item, BaseException) or item.usage is not None
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        if not is_last:
            ticket.abort()


async def whole_output(
    submit: Callable[[GenerateRequest, Deliver], Abortable],
    request: GenerateRequest,
    *,
    mailbox: Mailbox | None = None,
) -> GenerationOutput:
    """Submit a request and give its output; cancelling aborts it. The running loop is woken once, at the end.

    Args:
        mailbox: the engine's for the running loop; default: one of its own, which wakes the loop at every item.
    """
    collector = OutputCollector(request.prompt_ids, num_samples=request.sampling.n)
    reader: Reader[GenerationOutput | BaseException] = Reader(mailbox or _own_mailbox())
    ticket = await _submitted(submit, request, collector.deliver_to(reader.post))
    try:
        item = await reader.next()
    except BaseException:  # cancelled, or dropped
        ticket.abort()
        raise
    if isinstance(item, BaseException):
        raise item
    return item


def _own_mailbox() -> Mailbox:
    """Give a mailbox of the running loop that wakes it at every item."""
    return Mailbox(asyncio.get_running_loop(), Mailbox.wake)


async def _submitted(
    submit: Callable[[GenerateRequest, Deliver], Abortable], request: GenerateRequest, deliver: Deliver
) -> Abortable:
    """Submit a request; from another thread if it has a constraint, which may take long to compile."""
    if request.sampling.grammar is None:
        return submit(request, deliver)
    return await in_thread(lambda: submit(request, deliver), undo=lambda ticket: ticket.abort())


async def in_thread(
    work: Callable[[], T], *, undo: Callable[[T], object], executor: Executor | None = None
) -> T:
    """Do work in a thread and give what it gives; when cancelled meanwhile, undo what comes of it.

    Args:
        executor: default: the running loop's.
    """
    doing = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        doing.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else undo(done.result())
        )
        raise
