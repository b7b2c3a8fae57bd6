"""The order of things in a branch: text, calls and forks, as a reader of the program would list them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend_lang.trace import CallRecord
from frontend_lang.transcript import Segment

if TYPE_CHECKING:
    from frontend_lang.traces.model import Trace, TracedBranch


@dataclass(frozen=True, slots=True)
class Said:
    """Text that the program or the template put in, in one go."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Called:
    """A call; `segment` is what it wrote into the transcript, None when it wrote nothing."""

    record: CallRecord
    segment: Segment | None


@dataclass(frozen=True, slots=True)
class Forked:
    """Branches that part here."""

    branches: tuple[TracedBranch, ...]


Item = Said | Called | Forked


def items(trace: Trace, branch: TracedBranch) -> list[Item]:
    """Give what a branch holds, in order. Pure."""
    return list(_merged(_items(trace, branch)))


def _items(trace: Trace, branch: TracedBranch) -> Iterator[Item]:
    calls = {call.index: call for call in trace.calls}
    written = {segment.call_index for segment in branch.segments}
    silent = [call for call in trace.calls if call.branch == branch.path and call.index not in written]
    children = [other for other in trace.branches if other.parent == branch.path]
    for place in range(len(branch.segments) + 1):
        segment = branch.segments[place] if place < len(branch.segments) else None
        index = None if segment is None else segment.call_index
        if here := tuple(child for child in children if child.place == place):
            yield Forked(here)
        while silent and (segment is None or (index is not None and silent[0].index < index)):
            yield Called(silent.pop(0), None)
        if segment is not None:
            yield Said((segment,)) if index is None else Called(calls[index], segment)


def _merged(found: Iterator[Item]) -> Iterator[Item]:
    """Put neighbouring texts together. Pure."""
    waiting: tuple[Segment, ...] = ()
    for item in found:
        if isinstance(item, Said):
            waiting += item.segments
            continue
        if waiting:
            yield Said(waiting)
            waiting = ()
        yield item
    if waiting:
        yield Said(waiting)
