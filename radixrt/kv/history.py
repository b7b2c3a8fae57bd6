"""What was evicted lately, when and for whom: the memory behind "why did my prefix miss"."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from radixrt.kv.eviction import Eviction
from radixrt.kv.packed import TOKEN_BYTES, num_common_tokens
from radixrt.types import Namespace

MAX_RECORDS = 1024
MAX_RECORD_BYTES = 16 << 20


class EvictionRecord(NamedTuple):
    """A prefix that lost its tail.

    Attributes:
        runs: packed tokens, in pieces.
        num_tokens, num_kept_tokens: how many of them were cached before, and how many stayed.
        at_s: by the scheduler's clock.
        reason: "room" (another sequence needed pages) or "cleared".
        label: of the request that needed the room.
    """

    namespace: Namespace
    runs: tuple[bytes, ...]
    num_tokens: int
    num_kept_tokens: int
    at_s: float
    reason: str
    label: str


class EvictionLog:
    """Keep the last evictions, at most MAX_RECORDS and MAX_RECORD_BYTES of tokens."""

    def __init__(self) -> None:
        self._records: deque[EvictionRecord] = deque()
        self._num_tokens = 0

    def add(self, eviction: Eviction, *, at_s: float, reason: str, label: str) -> None:
        """Remember one eviction."""
        namespace, runs, num_tokens, num_kept_tokens, _ = eviction
        record = (namespace, runs, num_tokens, num_kept_tokens, at_s, reason, label)
        self._records.append(tuple.__new__(EvictionRecord, record))
        self._num_tokens += num_tokens
        while len(self._records) > MAX_RECORDS or self._num_tokens > MAX_RECORD_BYTES // TOKEN_BYTES:
            self._num_tokens -= self._records.popleft().num_tokens

    def longest(
        self, namespace: Namespace, tokens: bytes, *, min_tokens: int
    ) -> tuple[int, EvictionRecord | None]:
        """Find the eviction that cost `tokens` most; give what would be cached without it, and its record.

        Args:
            min_tokens: what is cached now; only more than that counts.
        Cost: one comparison per record.
        """
        best, found = min_tokens, None
        for record in self._records:
            if record.namespace == namespace:
                num_common = _num_common(record, tokens)
                if num_common > max(best, record.num_kept_tokens):
                    best, found = num_common, record
        return best, found


def _num_common(record: EvictionRecord, tokens: bytes) -> int:
    """Give how many leading tokens of a record `tokens` share. Joins nothing: its pieces may go far beyond it."""
    start, limit = 0, record.num_tokens * TOKEN_BYTES
    for run in record.runs:
        stop = start + len(run)
        if stop > limit:
            run, stop = run[: limit - start], limit
        if not tokens.startswith(run, start):
            return start // TOKEN_BYTES + num_common_tokens(run, tokens[start:stop])
        start = stop
        if start == limit:
            break
    return start // TOKEN_BYTES
