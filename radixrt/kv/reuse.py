"""How far apart in pages the uses of the same prefix are: the hit rate as a function of pool size.

Sources: Mattson et al. 1970 for the stack distance; SHARDS (Waldspurger et al., FAST 2015) for sampling by hash.
"""

from __future__ import annotations

import zlib

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
        self._reset({})

    def _reset(self, last_used: dict[int, int]) -> None:
        self._last_used = last_used
        self._now = len(last_used)
        self._tree = [0] * (2 * MAX_TRACKED + 1)  # Fenwick tree: 1 where a page's last use stands
        for place in range(self._now):
            self._add(place, 1)

    def observe(self, namespace: Namespace, tokens: bytes) -> None:
        """Take in a use of all whole pages of a prompt. Cost: O(pages + sampled pages * log MAX_TRACKED)."""
        key = zlib.crc32(repr(namespace).encode())
        for start in range(0, len(tokens) - self._page_bytes + 1, self._page_bytes):
            key = zlib.crc32(tokens[start : start + self._page_bytes], key)  # the same in every process
            if key % SAMPLE_EVERY == 0:
                self._use(key)

    def _use(self, key: int) -> None:
        if self._now == 2 * MAX_TRACKED:
            recent = sorted(self._last_used.items(), key=lambda item: item[1])[-MAX_TRACKED:]
            self._reset({kept: place for place, (kept, _) in enumerate(recent)})
        last = self._last_used.get(key)
        if last is None:
            self.num_first += 1
        else:
            distance = (self._sum(self._now) - self._sum(last + 1)) * SAMPLE_EVERY
            self.counts[min(distance.bit_length(), NUM_BUCKETS - 1)] += 1
            self._add(last, -1)
        self._last_used[key] = self._now
        self._add(self._now, 1)
        self._now += 1

    def _add(self, place: int, value: int) -> None:
        index = place + 1
        while index < len(self._tree):
            self._tree[index] += value
            index += index & -index

    def _sum(self, stop: int) -> int:
        """Count the last uses at places [0, stop)."""
        total, index = 0, stop
        while index > 0:
            total += self._tree[index]
            index -= index & -index
        return total

    def hit_rate(self, num_pages: int) -> float:
        """Estimate the share of page uses that an lru pool of num_pages would have served, 0 to 1.

        For sizes between powers of two it is the rate of the smaller power.
        """
        total = self.num_first + sum(self.counts)
        return sum(self.counts[: num_pages.bit_length()]) / total if total else 0.0
