"""From the engine's thread to event loops: many items, one wake-up.

    engine's thread:  post, post, post ... wake          (once for all that a step gave)
    event loop:       hand over to MAX_PER_TURN readers, others' turn, hand over to the next, ...

A wake-up is a system call that lets go of the interpreter: one for every token would have the loop's thread compete with
the engine's while that has still to compute.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# Readers that are served before others on the loop have their turn; each writes to a connection of its own.
MAX_PER_TURN = 16


class Mailbox:
    """What lies ready for the readers on one event loop; posted in other threads, taken in the loop's.

    Invariant: while a reader is listed, the mailbox was handed to `later` or is on its way through the loop.

    Args:
        later: called where items are posted; it must call `wake` soon, when no more is to be posted at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, later: Callable[[Mailbox], object]) -> None:
        self.loop = loop
        self._later = later
        self._listed: deque[Reader[Any]] = deque()
        self._is_waking = False

    def list_reader(self, reader: Reader[Any]) -> None:
        """Put down who is to be served."""
        self._listed.append(reader)
        if not self._is_waking:
            self._is_waking = True
            self._later(self)

    def wake(self) -> None:
        """Have the loop serve all that are listed. Does nothing when the loop is closed: whoever waited is gone."""
        try:
            self.loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:
            self._listed.clear()

    def _hand_over(self) -> None:
        """Wake the next readers; the loop's other work stands between them and those that follow."""
        self._is_waking = False  # before looking: who is listed after the look wakes again
        for _ in range(min(len(self._listed), MAX_PER_TURN)):
            self._listed.popleft().take_up()
        if self._listed:
            self._is_waking = True
            self.loop.call_soon(self._hand_over)


class Reader(Generic[T]):
    """The items of one who reads on an event loop, in the order in which they were posted.

    The engine holds it, and nothing of it holds whoever reads: what nobody has any more can be collected.

    Attributes:
        items: what has come and is not read.
        is_patient: the reader wants to be woken only for what does not keep.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.items: deque[T] = deque()
        self.is_patient = False
        self._mailbox = mailbox
        self._is_listed = False
        self._waiter: asyncio.Future[None] | None = None

    def post(self, item: T, *, keeps: bool = False) -> None:
        """Put an item down; called in the thread that it comes from.

        Args:
            keeps: a patient reader need not be woken for it: another will follow.
        """
        self.items.append(item)
        if not self._is_listed and not (keeps and self.is_patient):
            self._is_listed = True
            self._mailbox.list_reader(self)

    def take_up(self) -> None:
        """Wake whoever waits; called on the loop."""
        self._is_listed = False  # before the items are looked at: what comes after this is listed again
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def arrival(self) -> asyncio.Future[None]:
        """Give what to await before looking at `items` again. One may wait at a time."""
        self._waiter = self._mailbox.loop.create_future()
        return self._waiter

    async def next(self) -> T:
        """Wait for an item and give it."""
        while not self.items:
            await self.arrival()
        return self.items.popleft()
