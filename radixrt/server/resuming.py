"""Streams that outlive their connection: events are kept, and a reader may begin at any position."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator

from radixrt.server.errors import refused

MAX_RECORDINGS_PER_TENANT = 256


class Recording:
    """The events of one stream from position `first` on. Owned by the event loop's thread.

    Attributes:
        first: position of the oldest event that is kept; those before it gave way to the limit of bytes.
        is_done: no event follows.
    Invariant: num_bytes == the sizes of the kept events together.
    """

    def __init__(self, owner: Shelf) -> None:
        self.first = 0
        self.num_bytes = 0
        self.num_readers = 0
        self.is_done = False
        self.task: asyncio.Task[None] | None = None
        self._owner = owner
        self._events: deque[bytes] = deque()
        self._news = asyncio.Condition()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stop(self) -> int:
        """Give the position after the newest event."""
        return self.first + len(self._events)

    async def add(self, event: bytes) -> None:
        """Append an event and wake the readers."""
        self._events.append(event)
        self.num_bytes += len(event)
        self._owner.make_room(self)
        async with self._news:
            self._news.notify_all()

    def drop_oldest(self) -> None:
        """Forget the oldest event."""
        self.num_bytes -= len(self._events.popleft())
        self.first += 1

    async def finish(self) -> None:
        """Say that no event follows."""
        self.is_done = True
        async with self._news:
            self._news.notify_all()

    async def read(self, position: int) -> AsyncGenerator[bytes, None]:
        """Give the events from a position on, to the end; the timer of a stream without a reader stands still."""
        self.num_readers += 1
        self._stop_timer()
        try:
            while True:
                if position < self.first:
                    return  # the reader fell behind what is kept: the stream breaks, without a [DONE]
                if position < self.stop:
                    yield self._events[position - self.first]
                    position += 1
                elif self.is_done:
                    return
                else:
                    async with self._news:
                        if position == self.stop and not self.is_done:
                            await self._news.wait()
        finally:
            self.num_readers -= 1
            self.start_timer()

    def start_timer(self) -> None:
        """Give up the stream some time after its last reader left."""
        self._stop_timer()
        if self.num_readers == 0:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._owner.keep_s, self._owner.remove, self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """Abort what still runs."""
        self._stop_timer()
        if self.task is not None:
            self.task.cancel()


class Shelf:
    """Own one tenant's recordings, oldest first.

    Invariant: their bytes together are at most max_bytes, but for the newest event of each.
    """

    def __init__(self, *, max_bytes: int, keep_s: float) -> None:
        self.keep_s = keep_s
        self._max_bytes = max_bytes
        self._recordings: OrderedDict[str, Recording] = OrderedDict()

    def open(self, name: str) -> Recording:
        """Begin a recording.

        Raises:
            Refusal: 429, all that are kept still run.
        """
        if len(self._recordings) >= MAX_RECORDINGS_PER_TENANT:
            done = next((key for key, item in self._recordings.items() if item.is_done), None)
            if done is None:
                raise refused(
                    429,
                    f"at most {MAX_RECORDINGS_PER_TENANT} resumable streams may run",
                    code="queue_full",
                    retry_after="1",
                )
            self._recordings.pop(done).end()
        recording = self._recordings[name] = Recording(self)
        return recording

    def get(self, name: str) -> Recording | None:
        """Give a recording by its stream's id."""
        return self._recordings.get(name)

    def remove(self, recording: Recording) -> None:
        """Forget a recording; what still runs is aborted."""
        for name, item in list(self._recordings.items()):
            if item is recording:
                del self._recordings[name]
                item.end()

    def make_room(self, growing: Recording) -> None:
        """Forget done recordings nobody reads, then the oldest events of the growing one, until the limit holds."""
        excess = sum(item.num_bytes for item in self._recordings.values()) - self._max_bytes
        if excess <= 0:
            return
        for item in list(self._recordings.values()):
            if item.is_done and item.num_readers == 0 and excess > 0:
                excess -= item.num_bytes
                self.remove(item)
        while excess > 0 and growing.stop - growing.first > 1:
            before = growing.num_bytes
            growing.drop_oldest()
            excess -= before - growing.num_bytes

    def close(self) -> None:
        """Abort all that runs."""
        for recording in self._recordings.values():
            recording.end()
        self._recordings.clear()
