"""Who is admitted first: pure keys that order the waiting list, smallest first.

All fair policies share one bound: a request that was passed over in max_skips steps stands before everything that
arrived later, whatever the policy prefers. The unfair ones are there to be measured against.

Why the default order is one of time, not of cached pages first and age second: under that, a request with nothing
cached waits for as long as others with something keep coming. Over 35 simulated runs (few-shot, trees, chats, Zipf
groups, the agent logs; several seeds and pools) the order by time keeps 90.3 of the offline optimum's hits in place of
90.9, its 99th percentile of the time to first token is 0.89 of fcfs's in place of 0.96 (geometric means), and it is
worse than fcfs's in 7 runs in place of 14, all in pools far smaller than what is alive. A head start of 10, 25, 100 or
200 trades the one for the other: 89.8, 90.1, 90.6, 90.8% of the hits, worse in 7, 9, 10, 11 runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from radixrt.sched.sequence import Sequence

OrderKey = tuple[float | bytes, ...]

HEAD_START = 50  # seconds of age that a second of saved computation is worth


class Cached(NamedTuple):
    """What of a waiting request is cached.

    Attributes:
        num_pages: whole pages; the few tokens that any two prompts share by accident do not count.
        saved_s: seconds it would take to compute them.
    """

    num_pages: int
    saved_s: float


def fcfs(sequence: Sequence, cached: Cached, tokens: bytes) -> OrderKey:
    """First come, first served."""
    return (sequence.arrival,)


def cache_aware(sequence: Sequence, cached: Cached, tokens: bytes) -> OrderKey:
    """Oldest first, with a head start for what its cached pages save: equal to fcfs where nothing is shared.

    A request passes those that came up to HEAD_START times as many seconds before it as the cache saves it.
    """
    return (sequence.origin.submitted_at_s - HEAD_START * cached.saved_s, sequence.arrival)


def longest_prefix(sequence: Sequence, cached: Cached, tokens: bytes) -> OrderKey:
    """Most cached pages first, then oldest."""
    return (-cached.num_pages, sequence.arrival)


def priority(sequence: Sequence, cached: Cached, tokens: bytes) -> OrderKey:
    """Largest request priority first, then oldest."""
    return (-sequence.request.priority, sequence.arrival)


def random(sequence: Sequence, cached: Cached, tokens: bytes) -> OrderKey:
    """In an order that depends on nothing but the arrival's number."""
    return (zlib.crc32(sequence.arrival.to_bytes(8, "little")), sequence.arrival)


def dfs(sequence: Sequence, cached: Cached, tokens: bytes) -> OrderKey:
    """In the order of the tokens: branch after branch of the tree."""
    return (tokens, sequence.arrival)


@dataclass(frozen=True, slots=True)
class Policy:
    """An order of the waiting list.

    Attributes:
        key: smallest first; never smaller for fewer cached pages.
        is_fair: max_skips holds.
    """

    key: Callable[[Sequence, Cached, bytes], OrderKey]
    is_fair: bool = True


POLICIES: dict[str, Policy] = {
    "cache_aware": Policy(cache_aware),
    "fcfs": Policy(fcfs),
    "priority": Policy(priority),
    "random": Policy(random),
    "dfs": Policy(dfs),
    "longest_prefix": Policy(longest_prefix, is_fair=False),
}
