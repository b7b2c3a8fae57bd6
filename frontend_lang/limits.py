"""How long a program and its calls may take, how many tokens they may write, what is tried again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from frontend_lang.backends import DeadlineExceeded, InvalidRequest, ProgramError

GRACE_S = 1.0  # what a program has left, after its deadline, to handle that its calls failed


class BudgetExceeded(ProgramError):
    """A program has written all the tokens its token_budget allows."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call that failed on the way is sent again: `times` at most, waiting wait_s, then twice that, ...

    Only errors that the backend calls transient count, and only while none of the call's text was shown.

    Attributes:
        times: 0 to 100, after the first try.
        wait_s: seconds before the first of them, 0 to 3600; no wait is longer than max_wait_s.
    """

    times: int
    wait_s: float = 0.5
    max_wait_s: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.times, bool) or not isinstance(self.times, int) or not 0 <= self.times <= 100:
            raise InvalidRequest(
                f"retries must be a whole number in [0, 100], got {self.times!r}",
                parameter="retries",
                value=self.times,
            )
        for name, value in (("wait_s", self.wait_s), ("max_wait_s", self.max_wait_s)):
            _check_seconds(name, value, 0.0)

    def pause_s(self, index: int) -> float:
        """Give the seconds to wait before retry `index`, from 0. Pure."""
        return min(self.wait_s * float(1 << index), self.max_wait_s)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The limits of one call; None = the program's, if it has any."""

    timeout_s: float | None = None
    retry: Retry | None = None

    @property
    def is_none(self) -> bool:
        """Tell whether the call has none of its own."""
        return self.timeout_s is None and self.retry is None


NO_LIMITS = CallLimits()


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The limits of a program.

    Attributes:
        timeout_s: seconds from its start after which every call fails with DeadlineExceeded; the function is
            cancelled GRACE_S later if it still runs. Programs run inside it end with it.
        token_budget: most tokens that all its calls may write together.
        retry: for calls that say nothing else.
    """

    timeout_s: float | None = None
    token_budget: int | None = None
    retry: Retry | None = None


def checked_timeout(timeout_s: float | None) -> float | None:
    """Give the timeout; raises InvalidRequest unless it is None or a number of seconds in (0, 1e9]."""
    if timeout_s is not None:
        _check_seconds("timeout_s", timeout_s, 0.0, is_open=True)
    return timeout_s


def checked_budget(tokens: int | None) -> int | None:
    """Give the budget; raises InvalidRequest unless it is None or a whole number of at least 1."""
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise InvalidRequest(
            f"token_budget must be a whole number of at least 1, got {tokens!r}",
            parameter="token_budget",
            value=tokens,
        )
    return tokens


def checked_retry(retries: int | Retry | None) -> Retry | None:
    """Give the retry policy for a count; raises InvalidRequest as Retry does."""
    return retries if isinstance(retries, Retry) or retries is None else Retry(retries)


def _check_seconds(name: str, value: object, low: float, *, is_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= 1e9 or (is_open and value == low):  # type: ignore[operator]
        raise InvalidRequest(
            f"{name} must be a number of seconds {'above' if is_open else 'of at least'} {low:g}, got {value!r}",
            parameter=name,
            value=value,
        )


class TokenBudget:
    """Own what a program may still write.

    A call reserves its max_tokens and gives back what it did not write. When less is left, it waits for calls that
    run, and is cut to what is left only when none does: what a program gets does not depend on who comes first.

    Invariants: 0 <= reserved <= left; whoever waits is in `waiting`.
    """

    def __init__(self, tokens: int | None, parent: TokenBudget | None) -> None:
        self._left = tokens  # None: as much as the parent has
        self._parent = parent
        self._reserved = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_endless(self) -> bool:
        return self._left is None and (self._parent is None or self._parent.is_endless)

    async def reserve(self, wanted: int) -> int:
        """Give how many of `wanted` tokens may be written, at least 1; `settle` must follow.

        Raises:
            BudgetExceeded: none are left.
        """
        granted = wanted
        if self._left is not None:
            while self._left - self._reserved < wanted and self._reserved:
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(turn)
                await turn
            granted = min(wanted, self._left - self._reserved)
            if granted < 1:
                raise BudgetExceeded("the program's token_budget is used up")
            self._reserved += granted
        if self._parent is not None:
            try:
                inner, granted = granted, await self._parent.reserve(granted)
            except BaseException:
                self._give_back(granted, 0)
                raise
            if self._left is not None:
                self._reserved -= inner - granted
        return granted

    def settle(self, granted: int, written: int) -> None:
        """End a reservation."""
        self._give_back(granted, written)
        if self._parent is not None:
            self._parent.settle(granted, written)

    def _give_back(self, granted: int, written: int) -> None:
        if self._left is None:
            return
        self._reserved -= granted
        self._left = max(self._left - written, 0)
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a loop's clock, or never."""

    at_s: float | None
    clock: Callable[[], float]

    def left_s(self, timeout_s: float | None = None) -> float | None:
        """Give the seconds until the deadline or the timeout, whichever comes first; None = never."""
        left = None if self.at_s is None else self.at_s - self.clock()
        limits = [limit for limit in (left, timeout_s) if limit is not None]
        return min(limits) if limits else None

    def check(self) -> None:
        """Raise DeadlineExceeded when it has passed."""
        left = self.left_s()
        if left is not None and left <= 0:
            raise DeadlineExceeded("the program's timeout_s is over")
