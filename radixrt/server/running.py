"""Running requests on the engine from the event loop: submit, read, and abort what nobody waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Protocol, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from radixrt.delivery import Deliver, OutputCollector
from radixrt.errors import DeadlineExceeded
from radixrt.loop import Ticket
from radixrt.mailbox import Mailbox, Reader
from radixrt.streams import in_thread
from radixrt.types import GenerateRequest, GenerationOutput, OutputChunk

T = TypeVar("T")
Submit = Callable[[GenerateRequest, Deliver], Ticket]
# Of which request, what, and when it came, by time.perf_counter.
Arrived = tuple[int, OutputChunk, float]
Item = tuple[int, OutputChunk | BaseException, float]


class Watch(Protocol):
    """Looks on as a batch's requests run and end."""

    def chunk(self, index: int, chunk: OutputChunk, at_s: float) -> object:
        """Take in one chunk of a request, which came at a time by time.perf_counter; its last one has the usage."""

    def failed(self, error: BaseException | None) -> None:
        """Take in one request's failure; None: it was given up."""


class Batch(AsyncIterator[list[Arrived]]):
    """Requests that are read as one stream of (index of the request, chunk, when it came), as many at a time as have come.

    The first error of any ends all. Whoever opened it must close it; closing, or dropping it, aborts what is not done.
    Invariant: every request that is not done has a ticket here.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        reader: Reader[Item],
        tickets: Sequence[Ticket],
        watch: Watch | None = None,
    ) -> None:
        self.requests = requests
        self._reader = reader
        self._open = dict(enumerate(tickets))
        self._watch = watch

    @classmethod
    async def start(
        cls,
        submit: Submit,
        requests: Sequence[GenerateRequest],
        *,
        mailbox: Mailbox,
        deadline_s: float,
        executor: Executor,
        watch: Callable[[], Watch] | None = None,
    ) -> Self:
        """Submit requests, all or none. Constraints may take long to compile, so those go through a thread.

        Args:
            mailbox: the engine's for the running loop.
            deadline_s: when they must be done, by time.perf_counter; waiting for a thread takes from their time.
            watch: called once the requests are taken; gives who looks on.
        Raises: what the engine's `submit` raises. DeadlineExceeded: no time was left before they were submitted.
        """
        reader: Reader[Item] = Reader(mailbox)

        def submit_all() -> list[Ticket]:
            return _submit_all(submit, requests, reader, deadline_s)

        if any(request.sampling.grammar is not None for request in requests):
            try:
                async with asyncio.timeout(left_s(deadline_s)):
                    tickets = await in_thread(submit_all, undo=_abort, executor=executor)
            except TimeoutError:
                raise DeadlineExceeded() from None
        else:
            tickets = submit_all()
        return cls(requests, reader, tickets, None if watch is None else watch())

    async def __anext__(self) -> list[Arrived]:
        items = self._reader.items
        while not items:
            if not self._open:
                raise StopAsyncIteration
            await self._reader.arrival()
        found: list[Arrived] = []
        while items:
            index, item, at_s = items[0]
            if isinstance(item, BaseException):
                if found:
                    break  # what came before it is read first
                if self._open.pop(index, None) is not None and self._watch is not None:
                    self._watch.failed(item)
                self.close()
                raise item
            items.popleft()
            if item.usage is not None:
                self._open.pop(index, None)
            if self._watch is not None:
                self._watch.chunk(index, item, at_s)
            found.append((index, item, at_s))
        return found

    def close(self) -> None:
        """Abort the requests that are not done."""
        _abort(list(self._open.values()))
        if self._watch is not None:
            for _ in self._open:
                self._watch.failed(None)
        self._open.clear()
        self._reader.items.clear()

    def __del__(self) -> None:
        self.close()

    async def outputs(self) -> list[GenerationOutput]:
        """Read to the end and give the outputs in order; the event loop is woken at the end of each request only."""
        self._reader.is_patient = True
        now_s = time.perf_counter()

        def clock() -> float:
            return now_s  # when a chunk came, however late it is read

        collectors = [
            OutputCollector(request.prompt_ids, num_samples=request.sampling.n, clock=clock)
            for request in self.requests
        ]
        try:
            async for chunks in self:
                for index, chunk, now_s in chunks:  # noqa: B007 - the clock's
                    collectors[index].add(chunk)
        finally:
            self.close()
        return [collector.output() for collector in collectors]


def left_s(deadline_s: float) -> float:
    """Give the seconds until a deadline, by time.perf_counter.

    Raises:
        DeadlineExceeded: there are none.
    """
    left = deadline_s - time.perf_counter()
    if left <= 0:
        raise DeadlineExceeded()
    return left


def _submit_all(
    submit: Submit, requests: Sequence[GenerateRequest], reader: Reader[Item], deadline_s: float
) -> list[Ticket]:
    """Submit requests with the time that each has left."""
    tickets: list[Ticket] = []
    try:
        for index, request in enumerate(requests):
            timed = replace(request, timeout_s=left_s(deadline_s))
            tickets.append(submit(timed, _deliver_to(reader, index)))
    except BaseException:
        _abort(tickets)
        raise
    return tickets


def _deliver_to(reader: Reader[Item], index: int) -> Deliver:
    """Give the function that the engine's thread calls with a request's items."""

    def deliver(item: OutputChunk | BaseException) -> None:
        keeps = isinstance(item, OutputChunk) and item.usage is None
        reader.post((index, item, time.perf_counter()), keeps=keeps)

    return deliver


def _abort(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.abort()


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Do the work unless the client goes away first, which cancels it.

    Raises:
        ClientDisconnect: nobody waits any more, whatever came of the work. Otherwise what the work raises.
    """
    doing = asyncio.current_task()
    assert doing is not None
    num_cancels, has_gone = doing.cancelling(), False

    async def listen() -> None:
        nonlocal has_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if isinstance(work, asyncio.Future) and work.done():
            return  # all was sent: a connection says the same of an answer that is complete
        has_gone = True
        doing.cancel()  # it waits inside the work: this runs while it does not

    listening = asyncio.ensure_future(listen())
    try:
        return await work
    finally:
        listening.cancel()
        if has_gone and doing.uncancel() <= num_cancels:  # else it was cancelled from outside as well
            raise ClientDisconnect from None
