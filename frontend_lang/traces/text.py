"""A trace as a compact tree of plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from frontend_lang.backends import Usage
from frontend_lang.traces.tree import Called, Forked, Item, Said, items

if TYPE_CHECKING:
    from frontend_lang.traces.model import Trace, TracedBranch

MOST_CHARACTERS = 72  # of a text on its line


def as_text(trace: Trace) -> str:
    """Give the tree. Pure."""
    num_calls = f"{len(trace.calls)} call{'' if len(trace.calls) == 1 else 's'}"
    head = f"{trace.program}: {num_calls}, {counts(trace.usage)}"
    lines = [head, *_branch(trace, trace.branch(), "")]
    if trace.error is not None:
        lines.append(f"failed: {_short(trace.error)}")
    return "\n".join(lines)


def counts(usage: Usage) -> str:
    """Give the token counts of a call in words. Pure."""
    share = f" ({usage.cached_tokens / usage.prompt_tokens:.0%})" if usage.prompt_tokens else ""
    return (
        f"prompt {usage.prompt_tokens}, cached {usage.cached_tokens}{share}, computed {usage.computed_tokens}, "
        f"forced {usage.forced_tokens}, output {usage.output_tokens}"
    )


def _branch(trace: Trace, branch: TracedBranch, margin: str) -> Iterator[str]:
    found = [item for item in items(trace, branch) if not isinstance(item, Said) or _own(item)]
    for place, item in enumerate(found):
        is_last = place == len(found) - 1 and branch.error is None
        first, rest = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        for number, line in enumerate(_item(trace, item)):
            yield margin + (rest if number else first) + line
    if branch.error is not None:
        yield f"{margin}└─ ended by {_short(branch.error)}"


def _item(trace: Trace, item: Item) -> Iterator[str]:
    match item:
        case Said():
            yield _short(_own(item))
        case Called(record=call, segment=segment):
            times = trace.times(call.index)
            first = "" if times.first_token_s is None else f", first token {times.first_token_s:.3f} s"
            tries = f", {times.num_requests} requests" if times.num_requests > 1 else ""
            yield f"{call.label}  {counts(call.usage)}, {call.seconds:.3f} s{first}{tries}"
            if call.distribution is not None:
                yield "   " + ", ".join(
                    f"{choice!r} {share:.0%}" for choice, share in call.distribution.items()
                )
            if call.error is not None:
                yield f"   failed: {_short(call.error)}"
            elif call.kind != "decide":  # which writes nothing
                yield "   " + _short(call.text if segment is None else segment.text)
        case Forked(branches=branches):
            yield f"fork({len(branches)})"
            for branch in branches:
                yield f"   {branch.path}"
                yield from _branch(trace, branch, "   ")


def _own(said: Said) -> str:
    """Give what the program said itself; where the template stood in between there is a bar. Pure."""
    parts = [""]
    for segment in said.segments:
        if segment.is_template:
            parts.append("")
        else:
            parts[-1] += segment.text
    return " | ".join(part for part in parts if part)


def _short(text: str) -> str:
    """Give a text on one line, its middle left out when it is long. Pure."""
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        return f"{text[:half]!r}...{text[-half:]!r} ({len(text)} characters)"
    return repr(text)
