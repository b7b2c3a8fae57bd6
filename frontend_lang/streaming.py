"""A program that is read while it runs: its events, its text, and at the end its result.

    the program (its own thread, or the loop of the program that reads) -> queue -> history -> any number of readers

Every reader starts at the first event. Leaving a `for` loop before the end cancels the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from frontend_lang.backends import RequestAborted
from frontend_lang.branch import Listener
from frontend_lang.events import Event, ProgramDone, TextDelta, VariableSet
from frontend_lang.waiting import can_wait, cancel_all, wait_for

if TYPE_CHECKING:
    from frontend_lang.result import ProgramResult

R = TypeVar("R")
Start = Callable[[Listener], Coroutine[Any, Any, Any]]  # runs a program to its result
Item = Event | BaseException


class Source(Protocol):
    """A running program."""

    def get(self) -> Item:
        """Wait for the next event, or for the exception that ended the program."""

    def cancel(self) -> None:
        """End the program, if it still runs; do not wait."""

    def close(self) -> None:
        """End the program and wait until nothing of it runs."""


class ThreadSource:
    """A program on an event loop of its own, in a short-lived thread."""

    def __init__(self, start: Start) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
        self._is_cancelled = False
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._work, start), name="program", daemon=True
        )
        self._thread.start()

    def _work(self, start: Start) -> None:
        async def main() -> None:
            task = asyncio.ensure_future(start(self._items.put))
            self._running.append((asyncio.get_running_loop(), task))
            if self._is_cancelled:
                task.cancel()
            await task

        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - raised where the stream is read
            self._items.put(error)

    def get(self) -> Item:
        return self._items.get()

    def cancel(self) -> None:
        self._is_cancelled = True
        for loop, task in self._running:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended already
                loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        self.cancel()
        self._thread.join()


class LoopSource:
    """A program on the running loop, for readers on the same loop."""

    def __init__(self, start: Start) -> None:
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._task = asyncio.ensure_future(start(self._items.put_nowait))
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._items.put_nowait(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._items.put_nowait(error)

    async def next(self) -> Item:
        """Wait for the next event, or for the exception that ended the program."""
        return await self._items.get()

    def get(self) -> Item:
        return wait_for(self._items.get())

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended already
            self._task.cancel()

    async def closed(self) -> None:
        """End the program and wait until nothing of it runs."""
        await cancel_all([self._task])

    def close(self) -> None:
        wait_for(self.closed())


class _History(Generic[R]):
    """Own what a stream has told so far. Once `error` or `result` is there nothing follows."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.result: ProgramResult[R] | None = None
        self.is_over = False

    def add(self, item: Item) -> None:
        if isinstance(item, asyncio.CancelledError):  # raised as it is, it would cancel the reader
            item = RequestAborted("the stream was closed before its program had ended")
        if isinstance(item, BaseException):
            self.error, self.is_over = item, True
            return
        self.events.append(item)
        if isinstance(item, ProgramDone):
            self.result, self.is_over = item.result, True

    def check(self) -> None:
        """Raise what ended the program, if it did not end well."""
        if self.error is not None:
            raise self.error

    def final(self) -> ProgramResult[R]:
        """Give the result of a program that is over; raises what ended it otherwise."""
        self.check()
        assert self.result is not None
        return self.result

    def texts(self, event: Event | None, name: str | None) -> tuple[str, bool]:
        """Give what an event adds to the root's text, or to one variable of it, and whether nothing follows.

        Raises:
            ProgramError: the program is over and the variable has no value.
        """
        if event is None and name is not None:
            self.final()[name]
        match event:
            case TextDelta(branch="root") if name is None or event.name == name:
                return event.text, False
            case VariableSet(branch="root") if event.name == name:
                return "", True
        return "", event is None


class ProgramStream(Generic[R]):
    """A program that runs while you read it: `for event in program.stream(...)`.

    Iterating gives every event from the first on and raises what the program raises. Leaving the loop early, closing
    the stream or dropping it cancels the program and all its calls. `stream["x"]`, `text()` and `result()` wait for
    its end.
    """

    def __init__(self, start: Start) -> None:
        self._history: _History[R] = _History()
        self._source: Source = LoopSource(start) if can_wait() else ThreadSource(start)

    def __iter__(self) -> Iterator[Event]:
        return _Events(self)

    def _event(self, index: int) -> Event | None:
        """Wait for an event; None when there is none of this index."""
        while index >= len(self._history.events):
            if self._history.is_over:
                self._history.check()
                return None
            try:
                item = self._source.get()
            except BaseException:  # Ctrl-C
                self.close()
                raise
            self._history.add(item)
        return self._history.events[index]

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Give text as it comes: all of the transcript, or only what variable `var_name` gets, each time it is set.

        With a name it ends when the variable has its value; the program goes on. Raises like `stream[name]` when the
        program ends without such a value.
        """
        try:
            for index in itertools.count():
                event = self._event(index)
                text, is_last = self._history.texts(event, var_name)
                if text:
                    yield text
                if is_last:
                    return
        except BaseException:
            self._source.cancel()
            raise

    async def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]:
        """Do `text_iter` on an event loop, which goes on meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            for index in itertools.count():
                is_there = index < len(self._history.events) or self._history.is_over
                event = (
                    self._event(index) if is_there else await loop.run_in_executor(None, self._event, index)
                )
                text, is_last = self._history.texts(event, var_name)
                if text:
                    yield text
                if is_last:
                    return
        except BaseException:
            self._source.cancel()
            raise

    def result(self) -> ProgramResult[R]:
        """Wait for the program's end and give its result; raises what `run` would."""
        while not self._history.is_over:
            self._event(len(self._history.events))
        return self._history.final()

    def __getitem__(self, name: str) -> Any:
        """Wait for the program's end and give a value."""
        return self.result()[name]

    def text(self) -> str:
        """Wait for the program's end and give the transcript as text."""
        return self.result().text()

    def messages(self) -> list[dict[str, str]]:
        """Wait for the program's end and give the chat messages."""
        return self.result().messages()

    def sync(self) -> None:
        """Wait for the program's end; raises what `run` would."""
        self.result()

    def close(self) -> None:
        """Cancel the program and wait until nothing of it runs; fine when it has ended."""
        self._source.close()
        if not self._history.is_over:
            self._history.add(asyncio.CancelledError())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_source" in self.__dict__:
            self._source.cancel()


class _Events(Iterator[Event]):
    """One loop over a stream; dropped before its end, it cancels the program."""

    def __init__(self, stream: ProgramStream[Any]) -> None:
        self._stream = stream
        self._index = 0
        self._is_done = False

    def __next__(self) -> Event:
        try:
            event = self._stream._event(self._index)
        except BaseException:
            self._is_done = True
            raise
        if event is None:
            self._is_done = True
            raise StopIteration
        self._index += 1
        return event

    def __del__(self) -> None:
        if not self._is_done:
            self._stream._source.cancel()


class AsyncProgramStream(Generic[R]):
    """A program that runs while you read it: `async for event in program.astream(...)`; else as ProgramStream."""

    def __init__(self, start: Start) -> None:
        self._history: _History[R] = _History()
        self._source = LoopSource(start)

    def __aiter__(self) -> AsyncIterator[Event]:
        return _AsyncEvents(self)

    async def _event(self, index: int) -> Event | None:
        while index >= len(self._history.events):
            if self._history.is_over:
                self._history.check()
                return None
            self._history.add(await self._source.next())
        return self._history.events[index]

    async def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]:
        """Give text as it comes, as ProgramStream.text_iter does."""
        try:
            for index in itertools.count():
                text, is_last = self._history.texts(await self._event(index), var_name)
                if text:
                    yield text
                if is_last:
                    return
        except BaseException:
            self._source.cancel()
            raise

    async def result(self) -> ProgramResult[R]:
        """Wait for the program's end and give its result; raises what `arun` would."""
        while not self._history.is_over:
            await self._event(len(self._history.events))
        return self._history.final()

    async def aclose(self) -> None:
        """Cancel the program and wait until nothing of it runs; fine when it has ended."""
        await self._source.closed()
        if not self._history.is_over:
            self._history.add(asyncio.CancelledError())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if "_source" in self.__dict__:
            self._source.cancel()


class _AsyncEvents(AsyncIterator[Event]):
    """One loop over a stream; dropped before its end, it cancels the program."""

    def __init__(self, stream: AsyncProgramStream[Any]) -> None:
        self._stream = stream
        self._index = 0
        self._is_done = False

    async def __anext__(self) -> Event:
        try:
            event = await self._stream._event(self._index)
        except BaseException:
            self._is_done = True
            raise
        if event is None:
            self._is_done = True
            raise StopAsyncIteration
        self._index += 1
        return event

    def __del__(self) -> None:
        if not self._is_done:
            self._stream._source.cancel()
