"""Who is admitted first: pure keys that order the waiting list, smallest first.

All fair policies share one bound: a request that was passed over in max_skips steps stands before everything that
arrived later, whatever the policy prefers. The unfair ones are there to be measured against.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from radixrt.sched.sequence import Sequence

OrderKey = tuple[int | bytes, ...]


def fcfs(sequence: Sequence, num_cached_pages: int, tokens: bytes) -> OrderKey:
    """First come, first served."""
    return (sequence.arrival,)


def cache_aware(sequence: Sequence, num_cached_pages: int, tokens: bytes) -> OrderKey:
    """Most cached pages first, then oldest: equal to fcfs where nothing is shared.

    Whole pages: the few tokens that any two prompts share by accident do not count.
    """
    return (-num_cached_pages, sequence.arrival)


def priority(sequence: Sequence, num_cached_pages: int, tokens: bytes) -> OrderKey:
    """Largest request priority first, then oldest."""
    return (-sequence.request.priority, sequence.arrival)


def random(sequence: Sequence, num_cached_pages: int, tokens: bytes) -> OrderKey:
    """In an order that depends on nothing but the arrival's number."""
    return (zlib.crc32(sequence.arrival.to_bytes(8, "little")), sequence.arrival)


def dfs(sequence: Sequence, num_cached_pages: int, tokens: bytes) -> OrderKey:
    """In the order of the tokens: branch after branch of the tree."""
    return (tokens, sequence.arrival)


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of the waiting list.

    Attributes:
        key: smallest first; never smaller for fewer cached pages.
        is_fair: max_skips holds.
    """

    key: Callable[[Sequence, int, bytes], OrderKey]
    is_fair: bool = True


POLICIES: dict[str, Policy] = {
    "cache_aware": Policy(cache_aware),
    "fcfs": Policy(fcfs),
    "priority": Policy(priority),
    "random": Policy(random),
    "dfs": Policy(dfs),
    "longest_prefix": Policy(cache_aware, is_fair=False),
}
