"""How long outputs will be, learned per call site, and the pages they will take at their peak.

Source of the peak: LightLLM's past-future scheduler (arXiv:2507.10150): sequences end at different times, so the
most memory is needed at one of their ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import accumulate
from operator import add, attrgetter, mul, sub
from typing import NamedTuple

from radixrt.sched.sequence import Sequence

QUANTILE = 0.9
NUM_KEPT_LENGTHS = 128
NUM_KEPT_LABELS = 1024
MIN_LENGTHS = 8
# The place of the quantile among so many sorted lengths; asked for per running sequence and step.
PLACES = (-1, *(int(QUANTILE * (num_lengths - 1)) for num_lengths in range(1, NUM_KEPT_LENGTHS + 1)))


class _Lengths:
    """The last NUM_KEPT_LENGTHS lengths, in order of arrival and in order of size."""

    __slots__ = ("_recent", "by_size")

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self.by_size: list[int] = []

    def add(self, length: int) -> None:
        if len(self._recent) == NUM_KEPT_LENGTHS:
            oldest = self._recent.popleft()
            del self.by_size[bisect_left(self.by_size, oldest)]
        self._recent.append(length)
        insort(self.by_size, length)


class OutputLengths:
    """Remember the last output lengths of every label (call site) and of all together.

    Invariant: at most NUM_KEPT_LABELS labels, the most recently used ones.
    """

    def __init__(self) -> None:
        self._all = _Lengths()
        self._by_label: OrderedDict[str, _Lengths] = OrderedDict()

    def observe(self, label: str, num_output_tokens: int) -> None:
        """Take in the length of a finished output."""
        self._all.add(num_output_tokens)
        if label:
            self._by_label.setdefault(label, _Lengths()).add(num_output_tokens)
            self._by_label.move_to_end(label)
            if len(self._by_label) > NUM_KEPT_LABELS:
                self._by_label.popitem(last=False)

    def like(self, label: str) -> list[int]:
        """Give the lengths, in order of size, by which those of a label are predicted; none if there are too few."""
        by_size = self._by_label.get(label, self._all).by_size
        if len(by_size) < MIN_LENGTHS:
            by_size = self._all.by_size
        return by_size if len(by_size) >= MIN_LENGTHS else []


def expected_length(by_size: list[int], num_so_far: int, max_tokens: int) -> int:
    """Give a length that nine of ten outputs of known lengths, already num_so_far long, do not exceed.

    Without known lengths it is max_tokens: nothing is promised that might not be there.
    Cost: O(log NUM_KEPT_LENGTHS).
    """
    if not by_size:
        return max_tokens
    first = bisect_right(by_size, num_so_far)
    place = PLACES[len(by_size) - first]
    # Longer than anything seen: expect it to go on as long again.
    expected = by_size[first + place] if place >= 0 else 2 * num_so_far
    if expected > max_tokens:
        expected = max_tokens
    return expected if expected > num_so_far else num_so_far + 1


class Demand(NamedTuple):
    """What one sequence holds alone and will still need.

    Attributes:
        num_more_pages: pages it will lease until its predicted end.
        num_own_pages: pages that are free again when it ends.
    """

    num_more_pages: int
    num_own_pages: int


NUM_MORE_PAGES = attrgetter("num_more_pages")


def demands_of(
    sequences: Iterable[Sequence], lengths: OutputLengths, *, page_size: int, num_own_pages: int = 0
) -> list[Demand]:
    """Say what sequences will lease until their predicted ends, and what each holds alone. Pure.

    Args:
        num_own_pages: of those that wait. Those that run are taken to share what they began with, and no more.
    """
    known: dict[str, list[int]] = {}
    demands = []
    for sequence in sequences:
        request, lease, num_prompt = sequence.request, sequence.lease, sequence.num_prompt_tokens
        num_total, max_tokens = len(sequence.token_ids), request.sampling.max_tokens
        label = request.label
        by_size = known.get(label)
        if by_size is None:
            by_size = known[label] = lengths.like(label)
        num_outputs = expected_length(by_size, num_total - num_prompt, max_tokens)
        # Pages at its end less pages now, both rounded up.
        num_more = -num_total // page_size - -(num_prompt + num_outputs) // page_size
        num_own = num_own_pages if lease is None else len(lease.pages) - lease.num_shared_tokens // page_size
        demands.append(tuple.__new__(Demand, (num_more, num_own)))
    return demands


class Peak:
    """Whether one more sequence fits beside others at the time when they will hold most.

    All grow at the same rate; when the one with the k-th smallest need ends, it has grown to its full need, the longer
    ones have grown as much, and the shorter ones are gone: then (n - k) * need[k] - sum of own[:k] more pages are held.
    Cost: O(n log n).
    """

    def __init__(self, demands: Iterable[Demand]) -> None:
        self._demands = list(demands)  # sorted when it is needed
        self._num_more_pages = sum(map(NUM_MORE_PAGES, self._demands))
        self._ended: list[int] = []  # own pages of the first k; empty until it is needed
        self._known: dict[tuple[Demand, int], bool] = {}  # many who wait have the same needs

    def add(self, demand: Demand) -> None:
        """Take in one more that has begun."""
        self._demands.append(demand)
        self._num_more_pages += demand.num_more_pages
        self._ended = []
        self._known = {}

    def fits(self, own: Demand, num_free_pages: int) -> bool:
        """Tell whether so many pages, free once it has begun, suffice for another sequence and the others. Cost: O(n)."""
        if self._num_more_pages + own.num_more_pages <= num_free_pages:
            return True  # even if nobody ended before all have grown
        known = self._known.get((own, num_free_pages))
        if known is None:
            known = self._known[own, num_free_pages] = self._peak_with(own) <= num_free_pages
        return known

    def _peak_with(self, own: Demand) -> int:
        if not self._ended:
            self._prepare()
        place = bisect_left(self._demands, own)
        num_more_pages, num_own_pages = own
        at_its_end = (len(self._demands) - place + 1) * num_more_pages - self._ended[place]
        before = max(self._with_longer[:place], default=0)
        behind = max(self._ends[place:], default=0)
        return max(num_more_pages, before, at_its_end, behind - num_own_pages)

    def _prepare(self) -> None:
        self._demands.sort()
        num_running = len(self._demands)
        mores, owns = zip(*self._demands, strict=True) if num_running else ((), ())
        self._ended = [0, *accumulate(owns)]
        # More pages at each end, and when one more grows as long.
        self._ends = list(map(sub, map(mul, range(num_running, 0, -1), mores), self._ended))
        self._with_longer = list(map(add, self._ends, mores))
