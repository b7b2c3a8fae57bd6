"""The order of things in a branch: text, calls and forks, as a reader of the program would list them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from frontend_lang.trace import CallRecord
from frontend_lang.transcript import Segment

if TYPE_CHECKING:
    from frontend_lang.traces.model import Trace, TracedBranch, TracedRun


@dataclass(frozen=True, slots=True)
class Said:
    """Text that the program or the template put in, in one go."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Called:
    """A call, where it wrote or would have written."""

    record: CallRecord


@dataclass(frozen=True, slots=True)
class Forked:
    """Branches that part here."""

    branches: tuple[TracedBranch, ...]


@dataclass(frozen=True, slots=True)
class Ran:
    """Another run that the program started here."""

    trace: Trace


Item = Said | Called | Forked | Ran


@dataclass(frozen=True, slots=True)
class Written:
    """A piece of what a call wrote: by choice of the model, or forced by its constraint."""

    text: str
    is_forced: bool


def pieces(call: CallRecord) -> list[Written]:
    """Give a call's text, cut where what was forced begins and ends. Pure."""
    found, last = list[Written](), 0
    for span in () if call.origin is None else call.origin.forced:
        found.append(Written(call.text[last : span.text_start], is_forced=False))
        found.append(Written(call.text[span.text_start : span.text_stop], is_forced=True))
        last = span.text_stop
    found.append(Written(call.text[last:], is_forced=False))
    return [piece for piece in found if piece.text] or [Written("", is_forced=False)]


Nested: TypeAlias = "Iterator[str | Nested]"


def flat(parts: Nested) -> Iterator[str]:
    """Give the texts of nested iterators in order, however deep: a program may fork a fork a thousand times."""
    under_way = [parts]
    while under_way:
        for part in under_way[-1]:
            if not isinstance(part, str):
                under_way.append(part)
                break
            yield part
        else:
            under_way.pop()


def num_calls(trace: Trace) -> str:
    """Give how many calls a run made, in words. Pure."""
    return f"{len(trace.calls)} call{'' if len(trace.calls) == 1 else 's'}"


def items(trace: Trace, branch: TracedBranch) -> list[Item]:
    """Give what a branch holds, in order. Pure."""
    return list(_merged(_items(trace, branch)))


def _items(trace: Trace, branch: TracedBranch) -> Iterator[Item]:
    calls = {call.index: call for call in trace.calls}
    written = {segment.call_index for segment in branch.segments}
    silent = [call for call in trace.calls if call.branch == branch.path and call.index not in written]
    children = [other for other in trace.branches if other.parent == branch.path]
    runs = [run for run in trace.nested if run.branch == branch.path]
    for place in range(len(branch.segments) + 1):
        segment = branch.segments[place] if place < len(branch.segments) else None
        index = None if segment is None else segment.call_index
        yield from _parted(
            [child for child in children if child.place == place],
            [run for run in runs if run.place == place],
        )
        while silent and (segment is None or (index is not None and silent[0].index < index)):
            yield Called(silent.pop(0))
        if segment is not None:
            yield Said((segment,)) if index is None else Called(calls[index])


def _parted(children: list[TracedBranch], runs: list[TracedRun]) -> Iterator[Item]:
    """Give the forks and the runs at one place in the text, in order. Pure."""
    for run in runs:
        if before := tuple(child for child in children if child.number < run.num_forked):
            yield Forked(before)
            children = children[len(before) :]
        yield Ran(run.trace)
    if children:
        yield Forked(tuple(children))


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
