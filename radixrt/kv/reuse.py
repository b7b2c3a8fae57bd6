"""How far apart in pages the uses of the same prefix are: the hit rate as a function of pool size.

Sources: Mattson et al. 1970 for the stack distance; SHARDS (Waldspurger et al., FAST 2015) for sampling by hash.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from zlib import crc32

import numpy as np
import numpy.typing as npt

from radixrt.kv.packed import TOKEN_BYTES
from radixrt.types import Namespace

SAMPLE_EVERY = 8  # a power of two: one page in so many is followed; distances are scaled up again
MAX_TRACKED = 1 << 13
NUM_BUCKETS = 32
MAX_PENDING_BYTES, MAX_PENDING = 1 << 20, 32  # prompts are taken in together, while numpy's code is at hand
SAMPLED_BITS = 1 << 24  # and those above it decide which keys are followed


class ReuseDistances:
    """A histogram of stack distances of prefix pages.

    A page's distance is the number of distinct pages used since its last use: a pool of more pages (under lru) would
    have had it. Invariant: at most 2 * MAX_TRACKED keys are remembered.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._counts = [0] * NUM_BUCKETS
        self._num_first = 0
        self._pending: list[tuple[Namespace, bytes]] = []
        self._num_pending_bytes = 0
        self._remember([])

    @property
    def counts(self) -> list[int]:
        """counts[b] = uses at a distance of [2**(b-1), 2**b) pages; counts[0] = immediate."""
        self._take_in()
        return self._counts

    @property
    def num_first(self) -> int:
        """Uses that had no earlier one in memory."""
        self._take_in()
        return self._num_first

    def _remember(self, keys: list[int]) -> None:
        """Start over with keys in order of their last use."""
        self._last_used = {key: place for place, key in enumerate(keys)}  # stays in order of last use
        self._places = list(range(len(keys)))  # of the last uses, sorted
        self._now = len(keys)

    def observe(self, namespace: Namespace, tokens: bytes) -> None:
        """Note a use of all whole pages of a prompt.

        Cost, a little later: O(tokens) in numpy, and O(log MAX_TRACKED) and a move of up to 2 * MAX_TRACKED pointers
        per sampled page that was used before.
        """
        self._pending.append((namespace, tokens))
        self._num_pending_bytes += len(tokens)
        if self._num_pending_bytes > MAX_PENDING_BYTES or len(self._pending) > MAX_PENDING:
            self._take_in()

    def _take_in(self) -> None:
        pending, self._pending, self._num_pending_bytes = self._pending, [], 0
        for namespace, tokens in pending:
            self._use(_sampled_keys(namespace, tokens, self._page_bytes))

    def _use(self, keys: list[int]) -> None:
        last_used, places = self._last_used, self._places
        for index, key in enumerate(keys):
            if self._now == 2 * MAX_TRACKED:
                self._remember(list(last_used)[-MAX_TRACKED:])
                last_used, places = self._last_used, self._places
            last = last_used.pop(key, None)
            if last is None:
                # Behind a page that is new all are, as a rule.
                rest = keys[index:]
                if self._now + len(rest) <= 2 * MAX_TRACKED and last_used.keys().isdisjoint(rest):
                    self._use_new(rest)
                    return
                self._num_first += 1
            else:
                place = bisect_left(places, last)
                distance = (len(places) - place - 1) * SAMPLE_EVERY  # pages used since, each counted once
                self._counts[min(distance.bit_length(), NUM_BUCKETS - 1)] += 1
                del places[place]
            last_used[key] = self._now
            places.append(self._now)
            self._now += 1

    def _use_new(self, keys: list[int]) -> None:
        now, self._now = self._now, self._now + len(keys)
        self._num_first += len(keys)
        self._last_used.update(zip(keys, range(now, self._now), strict=True))
        self._places += range(now, self._now)

    def hit_rate(self, num_pages: int) -> float:
        """Estimate the share of page uses that an lru pool of num_pages would have served, 0 to 1.

        For sizes between powers of two it is the rate of the smaller power.
        """
        total = self.num_first + sum(self.counts)
        return sum(self.counts[: num_pages.bit_length()]) / total if total else 0.0


def _sampled_keys(namespace: Namespace, tokens: bytes, page_bytes: int) -> list[int]:
    """Give the keys of one whole page in SAMPLE_EVERY, in order. Pure; the same in every process.

    A page's key is a weighted sum of all tokens up to its end, modulo 2**64: one pass over a prompt gives all keys.
    """
    num_page_tokens = page_bytes // TOKEN_BYTES
    num_tokens = len(tokens) // page_bytes * num_page_tokens
    token_ids = np.frombuffer(tokens, np.int32, num_tokens)
    # A token of 0 has to count too: a page of nothing else is not the page before it.
    sums = np.add.accumulate((token_ids + 1) * _weights(num_tokens.bit_length())[:num_tokens])
    keys = sums[num_page_tokens - 1 :: num_page_tokens] + _seed(namespace)
    sampled: list[int] = keys[keys & SAMPLED_BITS * (SAMPLE_EVERY - 1) == 0].tolist()
    return sampled


@functools.cache
def _weights(num_bits: int) -> npt.NDArray[np.int64]:
    """Give 2**num_bits odd numbers without a pattern: the first outputs of splitmix64 (Steele et al., OOPSLA 2014)."""
    mixed = np.arange(1, (1 << num_bits) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)


@functools.lru_cache(maxsize=1024)
def _seed(namespace: Namespace) -> int:
    return crc32(repr(namespace).encode()) << 24
