"""Room: whether the pool holds one more sequence beside those that run, up to the end of all."""

from __future__ import annotations

from collections.abc import Collection

from radixrt.kv.cache import PrefixCache
from radixrt.sched.prediction import Demand, OutputLengths, Peak, demands_of
from radixrt.sched.sequence import Sequence

UNBOUNDED = 1 << 62


class Room:
    """Own what is predicted of the outputs, and while sequences are admitted, the peak of those that run.

    Args:
        running: the scheduler's own list.
    """

    def __init__(self, cache: PrefixCache, running: list[Sequence]) -> None:
        self.output_lengths = OutputLengths()
        self._cache = cache
        self._running = running
        self._peak: Peak | None = None  # from when it is first asked for

    @property
    def num_pages(self) -> int:
        """Pages that a sequence may take when it begins. All while nothing runs: it cannot become more.

        One page per running sequence is kept back: needs are rounded to pages, and a prediction is no promise.
        """
        if not self._running:
            return UNBOUNDED
        return self._cache.num_obtainable_pages - len(self._running)

    def demands_of(self, sequences: list[Sequence]) -> list[Demand]:
        """Say what sequences will lease until their predicted ends, and what each holds alone."""
        return demands_of(sequences, self.output_lengths, page_size=self._cache.page_size)

    def holds(self, sequence: Sequence, shared: Collection[int]) -> bool:
        """Tell whether the predicted peak fits the pool with one more sequence, which would share these pages."""
        if not self._running:
            return True
        cache = self._cache
        num_fresh = cache.num_pages_for(len(sequence.token_ids)) - len(shared)
        num_free = self.num_pages - num_fresh
        if num_free < 0:
            return False
        [own] = demands_of(
            [sequence], self.output_lengths, page_size=cache.page_size, num_own_pages=num_fresh
        )
        if num_free < own.num_more_pages:
            return False
        if self._peak is None:
            self._peak = Peak(self.demands_of(self._running))
        # Most that do not fit would not even fit if all they share were leased already.
        return self._peak.fits(own, num_free) and self._peak.fits(own, num_free - cache.num_unleased(shared))

    def began(self, sequence: Sequence) -> None:
        """Take in one more that runs now."""
        if self._peak is not None:
            self._peak.add(*self.demands_of([sequence]))

    def forget(self) -> None:
        """Let the peak be found anew: those that run go on."""
        self._peak = None
