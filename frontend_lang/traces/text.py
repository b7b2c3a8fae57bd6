"""A trace as a compact tree of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frontend_lang.trace import CallRecord, counts
from frontend_lang.traces.tree import (
    Called,
    Forked,
    Item,
    Nested,
    Ran,
    Said,
    Written,
    flat,
    items,
    num_calls,
    pieces,
)

if TYPE_CHECKING:
    from frontend_lang.traces.model import Trace, TracedBranch

MOST_CHARACTERS = 72  # of a text on its line
MOST_PIECES = 8  # of a text of which some was forced


def as_text(trace: Trace) -> str:
    """Give the tree. Pure."""
    return "\n".join(flat(_run(trace, "", "")))


def _run(trace: Trace, first: str, rest: str) -> Nested:
    """Give a run's lines; `first` stands before the first one, `rest` before the others. So it is everywhere here."""
    yield f"{first}{trace.program}: {num_calls(trace)}, {_counts(trace.calls)}"
    yield _branch(trace, trace.branch(), rest)
    if trace.error is not None:
        yield f"{rest}failed: {_short(trace.error)}"


def _counts(calls: Sequence[CallRecord]) -> str:
    """Give the token counts of calls in words. Pure."""
    found = dict(counts(calls))
    num_prompt, num_cached = found["prompt"], found["cached"]
    share = f" ({num_cached / num_prompt:.0%})" if num_prompt and num_cached is not None else ""
    words = [f"{name} {'unknown' if count is None else count}" for name, count in found.items()]
    words[1] += share
    return ", ".join(words)


def _branch(trace: Trace, branch: TracedBranch, margin: str) -> Nested:
    found = [item for item in items(trace, branch) if not isinstance(item, Said) or _own(item)]
    for place, item in enumerate(found):
        is_last = place == len(found) - 1 and branch.error is None
        first, rest = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield _item(trace, item, margin + first, margin + rest)
    if branch.error is not None:
        yield f"{margin}└─ ended by {_short(branch.error)}"


def _item(trace: Trace, item: Item, first: str, rest: str) -> Nested:
    match item:
        case Said():
            yield first + _short(_own(item))
        case Called(record=call):
            yield first + _told(trace, call)
            if call.distribution is not None:
                shares = [f"{choice!r} {share:.0%}" for choice, share in call.distribution.items()]
                yield f"{rest}   {', '.join(shares)}"
            if call.error is not None:
                yield f"{rest}   failed: {_short(call.error)}"
            elif call.kind != "decide":  # which writes nothing
                yield f"{rest}   {_written(call)}"
        case Ran(trace=inner):
            yield _run(inner, f"{first}run ", f"{rest}   ")
        case Forked(branches=branches):
            yield f"{first}fork({len(branches)})"
            for branch in branches:
                yield f"{rest}   {branch.path}"
                yield _branch(trace, branch, f"{rest}   ")


def _told(trace: Trace, call: CallRecord) -> str:
    times = trace.times(call.index)
    queued = "" if times.queued_s is None else f", queued {times.queued_s:.3f} s"
    first = "" if times.first_token_s is None else f", first token {times.first_token_s:.3f} s"
    tries = f", {times.num_requests} requests" if times.num_requests > 1 else ""
    return f"{call.label}  {_counts([call])}, {call.seconds:.3f} s{queued}{first}{tries}{_masked(call)}"


def _own(said: Said) -> str:
    """Give what the program said itself; where the template stood in between there is a bar. Pure."""
    parts = [""]
    for segment in said.segments:
        if segment.is_template:
            parts.append("")
        else:
            parts[-1] += segment.text
    return " | ".join(part for part in parts if part)


def _masked(call: CallRecord) -> str:
    """Give how much of the model's probability the constraint took away. Pure."""
    share = None if call.origin is None else call.origin.masked_share
    return "" if share is None else f", masked {share:.0%}"


def _written(call: CallRecord) -> str:
    """Give what a call wrote on one line; what was forced stands in brackets. Pure."""
    found = pieces(call)
    if not any(piece.is_forced for piece in found):
        return _short(call.text)
    parts = [f"[{_cut(piece.text)}]" if piece.is_forced else _cut(piece.text) for piece in _ends(found)]
    if len(found) > MOST_PIECES:
        parts.insert(MOST_PIECES // 2, "...")
        parts.append(f"({len(call.text)} characters)")
    return " ".join(parts)


def _ends(found: Sequence[Written]) -> Sequence[Written]:
    half = MOST_PIECES // 2
    return found if len(found) <= MOST_PIECES else [*found[:half], *found[-half:]]


def _cut(text: str) -> str:
    """Give a piece of a text, its middle left out when it is long. Pure."""
    half = MOST_CHARACTERS // 6
    return repr(text) if len(text) <= 2 * half + 3 else f"{text[:half]!r}...{text[-half:]!r}"


def _short(text: str) -> str:
    """Give a text on one line, its middle left out when it is long. Pure."""
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        return f"{text[:half]!r}...{text[-half:]!r} ({len(text)} characters)"
    return repr(text)
