"""Whether the parts of a trace fit together: a file may say anything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from frontend_lang.trace import CallRecord

if TYPE_CHECKING:
    from frontend_lang.traces.model import Trace


def faults(trace: Trace, where: str = "") -> Iterator[str]:
    """Tell what does not fit; nothing for the trace of a run. Pure.

    What holds: calls have indices of their own and stand in branches that are there; branches have paths of their own,
    the root first, each after its parent and parted from it within its text; segments name calls that are there; runs
    inside began within a branch's text; forced spans follow one another.
    """
    branches = {branch.path: branch for branch in trace.branches}
    indices = {call.index for call in trace.calls}
    if len(branches) < len(trace.branches) or len(indices) < len(trace.calls):
        yield f"{where}two branches have one path, or two calls one index"
    if not trace.branches or trace.branches[0].path != "root":
        yield f"{where}the first branch is not the root"
    known: set[str] = set()
    for branch in trace.branches:
        name = f"{where}branch {branch.path!r}"
        parent = branch.parent
        if parent is None and branch.path != "root":
            yield f"{name} has no parent"
        elif parent is not None:
            if parent not in known:
                yield f"{name} does not stand after its parent"
            elif not 0 <= branch.place <= len(branches[parent].segments):
                yield f"{name} parts at {branch.place}, outside of its parent"
        for segment in branch.segments:
            if segment.call_index is not None and segment.call_index not in indices:
                yield f"{name} has a text of call {segment.call_index}, which is not there"
        known.add(branch.path)
    for call in trace.calls:
        name = f"{where}call {call.index}"
        if call.branch not in known:
            yield f"{name} is of branch {call.branch!r}, which is not there"
        if not _spans_are_sound(call):
            yield f"{name} has forced spans that do not follow one another"
    for run in trace.nested:
        name = f"{where}run of {run.trace.program!r}"
        if run.branch not in known:
            yield f"{name} began in branch {run.branch!r}, which is not there"
        elif not 0 <= run.place <= len(branches[run.branch].segments):
            yield f"{name} began at {run.place}, outside of its branch"
        yield from faults(run.trace, f"{name}: ")


def _spans_are_sound(call: CallRecord) -> bool:
    spans = () if call.origin is None else call.origin.forced
    ends = [0, *(end for span in spans for end in (span.text_start, span.text_stop))]
    return all(first <= second for first, second in pairwise(ends))
