"""How far apart in pages the uses of the same prefix are: the hit rate as a function of pool size.

Sources: Mattson et al. 1970 for the stack distance; SHARDS (Waldspurger et al., FAST 2015) for sampling by hash.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from zlib import crc32

from radixrt.types import Namespace

SAMPLE_EVERY = 8  # one page in so many is followed; distances are scaled up again
MAX_TRACKED = 1 << 13
NUM_BUCKETS = 32


class ReuseDistances:
    """A histogram of stack distances of prefix pages.

    A page's distance is the number of distinct pages used since its last use: a pool of more pages (under lru) would
    have had it. Invariant: at most 2 * MAX_TRACKED keys are remembered.

    Attributes:
        counts: counts[b] = uses at a distance of [2**(b-1), 2**b) pages; counts[0] = immediate.
        num_first: uses that had no earlier one in memory.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self.counts = [0] * NUM_BUCKETS
        self.num_first = 0
        self._remember([])

    def _remember(self, keys: list[int]) -> None:
        """Start over with keys in order of their last use."""
        self._last_used = {key: place for place, key in enumerate(keys)}
        self._places = list(range(len(keys)))  # of the last uses, sorted
        self._now = len(keys)

    def observe(self, namespace: Namespace, tokens: bytes) -> None:
        """Take in a use of all whole pages of a prompt.

        Cost: O(pages + sampled pages * log MAX_TRACKED), and one move of up to 2 * MAX_TRACKED pointers per sampled page.
        """
        key, page_bytes = _seed(namespace), self._page_bytes
        for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
            key = crc32(tokens[start : start + page_bytes], key)  # the same in every process
            if key % SAMPLE_EVERY == 0:
                self._use(key)

    def _use(self, key: int) -> None:
        if self._now == 2 * MAX_TRACKED:
            self._remember(sorted(self._last_used, key=self._last_used.__getitem__)[-MAX_TRACKED:])
        last = self._last_used.get(key)
        if last is None:
            self.num_first += 1
        else:
            index = bisect_left(self._places, last)
            distance = (len(self._places) - index - 1) * SAMPLE_EVERY  # pages used since, each counted once
            self.counts[min(distance.bit_length(), NUM_BUCKETS - 1)] += 1
            del self._places[index]
        self._last_used[key] = self._now
        self._places.append(self._now)
        self._now += 1

    def hit_rate(self, num_pages: int) -> float:
        """Estimate the share of page uses that an lru pool of num_pages would have served, 0 to 1.

        For sizes between powers of two it is the rate of the smaller power.
        """
        total = self.num_first + sum(self.counts)
        return sum(self.counts[: num_pages.bit_length()]) / total if total else 0.0


@functools.lru_cache(maxsize=1024)
def _seed(namespace: Namespace) -> int:
    return crc32(repr(namespace).encode())
