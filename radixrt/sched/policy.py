"""Who is admitted first: pure functions that order the waiting list.

All policies share one bound: a request that was passed over in max_skips steps stands before everything that
arrived later, whatever the policy prefers.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from radixrt.kv.radix import PrefixMatch
from radixrt.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting sequence with its cached prefix."""

    sequence: Sequence
    match: PrefixMatch

    @property
    def num_cached_pages(self) -> int:
        """Whole pages saved; the few tokens that any two prompts share by accident do not count."""
        return len(self.match.pages)


OrderKey = tuple[int, ...]


def fcfs(candidate: Candidate) -> OrderKey:
    """First come, first served."""
    return (candidate.sequence.arrival,)


def cache_aware(candidate: Candidate) -> OrderKey:
    """Most cached pages first, then oldest: equal to fcfs where nothing is shared."""
    return (-candidate.num_cached_pages, candidate.sequence.arrival)


def priority(candidate: Candidate) -> OrderKey:
    """Largest request priority first, then oldest."""
    return (-candidate.sequence.request.priority, candidate.sequence.arrival)


POLICIES: dict[str, Callable[[Candidate], OrderKey]] = {
    "fcfs": fcfs,
    "cache_aware": cache_aware,
    "priority": priority,
}


def is_urgent(sequence: Sequence, max_skips: int) -> bool:
    """Tell whether nothing that arrived later may pass this sequence any more. Pure."""
    return sequence.num_skips >= max_skips


def order(candidates: Seq[Candidate], policy: str, *, max_skips: int) -> list[Candidate]:
    """Give the candidates in the order of admission. Pure."""
    key = POLICIES[policy]
    urgent = [item for item in candidates if is_urgent(item.sequence, max_skips)]
    others = [item for item in candidates if not is_urgent(item.sequence, max_skips)]
    return sorted(urgent, key=fcfs) + sorted(others, key=key)
