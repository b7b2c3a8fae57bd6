"""Running requests on the engine from the event loop: submit, read, and abort what nobody waits for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from radixrt.delivery import Deliver, OutputCollector
from radixrt.errors import DeadlineExceeded
from radixrt.loop import Ticket
from radixrt.types import GenerateRequest, GenerationOutput, OutputChunk

T = TypeVar("T")
Submit = Callable[[GenerateRequest, Deliver], Ticket]
Item = tuple[int, OutputChunk | BaseException]


class Watch(Protocol):
    """Looks on as a batch's requests run and end."""

    def chunk(self, index: int, chunk: OutputChunk) -> object:
        """Take in one chunk of a request; its last one has the usage."""

    def failed(self, error: BaseException | None) -> None:
        """Take in one request's failure; None: it was given up."""


class _Inbox:
    """Items on their way from the engine's thread to the event loop; one wake-up serves all that came meanwhile.

    The engine holds it, and nothing of it holds the batch: a batch that nobody has any more can be collected.
    """

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.arrival = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_waking = False

    def deliver(self, index: int) -> Deliver:
        """Give the function that the engine's thread calls with a request's items."""

        def deliver(item: OutputChunk | BaseException) -> None:
            self.items.append((index, item))
            if self._is_waking:
                return
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed: whoever waited is gone
                return

        return deliver

    def _wake(self) -> None:
        self._is_waking = False  # before the reader looks: what comes after this wakes again
        self.arrival.set()


class Batch(AsyncIterator[tuple[int, OutputChunk]]):
    """Requests that are read as one stream of (index of the request, chunk).

    The first error of any ends all. Whoever opened it must close it; closing, or dropping it, aborts what is not done.
    Invariant: every request that is not done has a ticket here.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        inbox: _Inbox,
        tickets: Sequence[Ticket],
        watch: Watch | None = None,
    ) -> None:
        self.requests = requests
        self._inbox = inbox
        self._open = dict(enumerate(tickets))
        self._watch = watch

    @classmethod
    async def start(
        cls,
        submit: Submit,
        requests: Sequence[GenerateRequest],
        *,
        deadline_s: float,
        executor: Executor,
        watch: Callable[[], Watch] | None = None,
    ) -> Self:
        """Submit requests, all or none. Constraints may take long to compile, so those go through a thread.

        Args:
            deadline_s: when they must be done, by time.perf_counter; waiting for a thread takes from their time.
            watch: called once the requests are taken; gives who looks on.
        Raises: what the engine's `submit` raises. DeadlineExceeded: no time was left before they were submitted.
        """
        inbox = _Inbox()
        if any(request.sampling.grammar is not None for request in requests):
            try:
                async with asyncio.timeout(left_s(deadline_s)):
                    tickets = await _in_thread(
                        executor, lambda: _submit_all(submit, requests, inbox, deadline_s)
                    )
            except TimeoutError:
                raise DeadlineExceeded() from None
        else:
            tickets = _submit_all(submit, requests, inbox, deadline_s)
        return cls(requests, inbox, tickets, None if watch is None else watch())

    async def __anext__(self) -> tuple[int, OutputChunk]:
        inbox = self._inbox
        while not inbox.items:
            if not self._open:
                raise StopAsyncIteration
            inbox.arrival.clear()
            if not inbox.items:  # looked at again after the clear: a wake-up before it would be lost
                await inbox.arrival.wait()
        index, item = inbox.items.popleft()
        if isinstance(item, BaseException):
            if self._open.pop(index, None) is not None and self._watch is not None:
                self._watch.failed(item)
            self.close()
            raise item
        if item.usage is not None:
            self._open.pop(index, None)
        if self._watch is not None:
            self._watch.chunk(index, item)
        return index, item

    def close(self) -> None:
        """Abort the requests that are not done."""
        _abort(list(self._open.values()))
        if self._watch is not None:
            for _ in self._open:
                self._watch.failed(None)
        self._open.clear()
        self._inbox.items.clear()

    def __del__(self) -> None:
        self.close()

    async def outputs(self) -> list[GenerationOutput]:
        """Read to the end and give the outputs in order."""
        collectors = [
            OutputCollector(request.prompt_ids, num_samples=request.sampling.n) for request in self.requests
        ]
        try:
            async for index, chunk in self:
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
    submit: Submit, requests: Sequence[GenerateRequest], inbox: _Inbox, deadline_s: float
) -> list[Ticket]:
    """Submit requests with the time that each has left."""
    tickets: list[Ticket] = []
    try:
        for index, request in enumerate(requests):
            timed = replace(request, timeout_s=left_s(deadline_s))
            tickets.append(submit(timed, inbox.deliver(index)))
    except BaseException:
        _abort(tickets)
        raise
    return tickets


def _abort(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.abort()


async def _in_thread(executor: Executor, submit: Callable[[], list[Ticket]]) -> list[Ticket]:
    """Submit from a thread; when cancelled meanwhile, abort what comes of it."""
    submitted = asyncio.get_running_loop().run_in_executor(executor, submit)
    try:
        return await asyncio.shield(submitted)
    except asyncio.CancelledError:
        submitted.add_done_callback(_abort_result)
        raise


def _abort_result(submitted: asyncio.Future[list[Ticket]]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        _abort(submitted.result())


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
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
        has_gone = True
        doing.cancel()  # it waits inside the work: this runs while it does not

    listening = asyncio.ensure_future(listen())
    try:
        return await work
    finally:
        listening.cancel()
        if has_gone and doing.uncancel() <= num_cancels:  # else it was cancelled from outside as well
            raise ClientDisconnect from None
