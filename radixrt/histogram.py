"""Histogram: times by size, in powers of two."""

from __future__ import annotations

from dataclasses import dataclass

NUM_BUCKETS = 24


@dataclass(frozen=True, slots=True)
class Histogram:
    """Times by size: counts[b] = times below smallest_s * 2**b and not below half of that (the last: all longer).

    Attributes:
        smallest_s: upper bound of the first bucket, in s.
    """

    counts: tuple[int, ...] = (0,) * NUM_BUCKETS
    smallest_s: float = 1e-4

    def plus(self, seconds: float) -> Histogram:
        """Give the histogram with one more time. Pure."""
        bucket = min(int(seconds / self.smallest_s).bit_length(), NUM_BUCKETS - 1)
        counts = (*self.counts[:bucket], self.counts[bucket] + 1, *self.counts[bucket + 1 :])
        return Histogram(counts, self.smallest_s)

    def quantile_s(self, share: float) -> float:
        """Give an upper bound of the time that this share of all does not exceed, in s; 0 when there are none."""
        wanted, seen = share * sum(self.counts), 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen >= wanted > 0:
                return self.smallest_s * float(2**bucket)
        return 0.0
