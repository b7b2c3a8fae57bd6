"""How long outputs will be, learned per call site, and the pages they will take at their peak.

Source of the peak: LightLLM's past-future scheduler (arXiv:2507.10150): sequences end at different times, so the
most memory is needed at one of their ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

QUANTILE = 0.9
NUM_KEPT_LENGTHS = 128
NUM_KEPT_LABELS = 1024
MIN_LENGTHS = 8


class _Lengths:
    """The last NUM_KEPT_LENGTHS lengths, in order of arrival and in order of size."""

    __slots__ = ("_by_size", "_recent")

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._by_size: list[int] = []

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, length: int) -> None:
        if len(self._recent) == NUM_KEPT_LENGTHS:
            oldest = self._recent.popleft()
            del self._by_size[bisect_left(self._by_size, oldest)]
        self._recent.append(length)
        insort(self._by_size, length)

    def quantile_above(self, num_so_far: int) -> int:
        """Give the QUANTILE of the lengths above num_so_far; twice num_so_far when there is none."""
        first = bisect_right(self._by_size, num_so_far)
        num_longer = len(self._by_size) - first
        if num_longer == 0:
            return 2 * num_so_far  # longer than anything seen: expect it to go on as long again
        return self._by_size[first + int(QUANTILE * (num_longer - 1))]


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

    def predict(self, label: str, *, num_so_far: int, max_tokens: int) -> int:
        """Give a length that nine of ten outputs like this one, already num_so_far long, do not exceed.

        Without MIN_LENGTHS observations of the label, and then of all labels, it is max_tokens: nothing is
        promised that might not be there. Cost: O(log NUM_KEPT_LENGTHS).
        """
        for lengths in (self._by_label.get(label), self._all):
            if lengths is not None and len(lengths) >= MIN_LENGTHS:
                return max(min(lengths.quantile_above(num_so_far), max_tokens), num_so_far + 1)
        return max_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """What one sequence holds alone and will still need.

    Attributes:
        num_own_pages: pages that are free again when it ends.
        num_more_pages: pages it will lease until its predicted end.
    """

    num_own_pages: int
    num_more_pages: int


def peak_pages(demands: Iterable[Demand], *, num_held_pages: int) -> int:
    """Give the most pages that will be held at once. Pure. Cost: O(n log n).

    Args:
        num_held_pages: distinct pages held now, shared ones counted once.
    """
    # All grow at the same rate; when the one with the k-th smallest need ends, it has grown to its full need, the
    # longer ones have grown as much, and the shorter ones are gone.
    ordered = sorted(demands, key=lambda demand: demand.num_more_pages)
    peak, num_ended, num_running = num_held_pages, 0, len(ordered)
    for demand in ordered:
        peak = max(peak, num_held_pages + num_running * demand.num_more_pages - num_ended)
        num_ended += demand.num_own_pages
        num_running -= 1
    return peak
