"""A trace as one self-contained HTML page.

Nothing is fetched (the page forbids it to itself), all text of programs and models is escaped, and the page can be
read without scripts: they only open and close everything at once.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape
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
from frontend_lang.transcript import Segment

if TYPE_CHECKING:
    from frontend_lang.traces.model import CallTimes, Trace, TracedBranch

STYLE = """
.radixrt-trace{font:14px/1.45 system-ui,sans-serif;color:#1c2330;background:#fff;max-width:70rem;margin:auto;padding:1rem}
.radixrt-trace h1{font-size:1.3rem;margin:.2rem 0}
.radixrt-trace pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.15rem 0;padding:.2rem .5rem;
font:13px/1.4 ui-monospace,monospace;border-left:3px solid #d5dae3}
.radixrt-trace table{border-collapse:collapse;margin:.4rem 0}
.radixrt-trace td,.radixrt-trace th{padding:.1rem .7rem .1rem 0;text-align:left;font-weight:normal}
.radixrt-trace td{font-variant-numeric:tabular-nums;text-align:right}
.radixrt-trace .template{color:#8a93a3}
.radixrt-trace .written{border-left-color:#2f7d4f;background:#f0f8f2}
.radixrt-trace .forced{color:#6b7688;background:#e3e8f0;border-radius:2px}
.radixrt-trace .branch{border-left:2px solid #b9c4d8;margin:.3rem 0 .3rem .4rem;padding-left:.8rem}
.radixrt-trace summary{cursor:pointer}
.radixrt-trace summary b{margin-right:.6rem}
.radixrt-trace .count{margin-right:.8rem;color:#556072;font-variant-numeric:tabular-nums}
.radixrt-trace .error{color:#a4262c}
.radixrt-trace .place{color:#8a93a3}
"""
SCRIPT = """
for (const button of document.querySelectorAll("button[data-open]")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    for (const part of document.querySelectorAll("details")) part.open = button.dataset.open === "yes";
  });
}
"""


def as_page(trace: Trace) -> str:
    """Give the whole page. Pure."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{_safe(trace.program)}</title></head><body>{as_fragment(trace)}<script>{SCRIPT}</script></body></html>\n"
    )


def as_fragment(trace: Trace) -> str:
    """Give the trace as an element with its own style, to stand in another page. Pure."""
    return "".join(flat(_trace(trace)))


def _trace(trace: Trace) -> Nested:
    yield f'<style>{STYLE}</style><main class="radixrt-trace"><h1>{_safe(trace.program)}</h1>'
    yield f'<p><span class="num-calls">{len(trace.calls)}</span> calls '
    yield '<button data-open="yes" hidden>open all</button> <button data-open="no" hidden>close all</button></p>'
    if trace.error is not None:
        yield f'<pre class="error">\n{_safe(trace.error)}</pre>'
    yield '<table class="totals">'
    for name, count in counts(trace.calls):
        yield f'<tr><th>{name} tokens</th><td data-count="{name}">{_told(count)}</td></tr>'
    yield "</table>"
    yield _branch(trace, trace.branch())
    yield "</main>"


def _branch(trace: Trace, branch: TracedBranch) -> Nested:
    yield f'<section class="branch" data-branch="{_safe(branch.path)}"><div class="place">{_safe(branch.path)}</div>'
    for item in items(trace, branch):
        yield _item(trace, item)
    if branch.error is not None:
        yield f'<pre class="error">\n{_safe(branch.error)}</pre>'
    yield "</section>"


def _item(trace: Trace, item: Item) -> Nested:
    match item:
        case Said(segments=segments):
            yield f'<pre class="said">{"".join(map(_segment, segments))}</pre>'
        case Called(record=call):
            yield _call(trace, call)
            if call.kind != "decide":  # which writes nothing
                yield f'<pre class="written">\n{"".join(map(_piece, pieces(call)))}</pre>'
        case Ran(trace=inner):
            yield _run(inner)
        case Forked(branches=branches):
            yield f'<details class="fork" open><summary><b>fork({len(branches)})</b></summary>'
            for branch in branches:
                yield _branch(trace, branch)
            yield "</details>"


def _run(trace: Trace) -> Nested:
    """Give a run inside another one."""
    yield f'<details class="run" data-run="{_safe(trace.program)}" open><summary><b>run {_safe(trace.program)}</b>'
    yield f'<span class="count">{num_calls(trace)}</span>'
    for name, count in counts(trace.calls):
        yield f'<span class="count" data-count="{name}">{name} {_told(count)}</span>'
    yield "</summary>"
    if trace.error is not None:
        yield f'<pre class="error">\n{_safe(trace.error)}</pre>'
    yield _branch(trace, trace.branch())
    yield "</details>"


def _call(trace: Trace, call: CallRecord) -> Iterator[str]:
    times = trace.times(call.index)
    yield f'<details class="call" data-call="{call.index}" data-kind="{_safe(call.kind)}" data-of="{_safe(call.branch)}">'
    yield f"<summary><b>{_safe(call.label)}</b>"
    for name, count in counts([call]):
        yield f'<span class="count" data-count="{name}">{name} {_told(count)}</span>'
    yield f'<span class="count">{call.seconds:.3f} s</span>'
    if call.error is not None:
        yield f' <span class="error">{_safe(call.error)}</span>'
    yield f'</summary><div class="place">{_safe(call.location)}</div>'
    rows = [
        *_origin_rows(call, times),
        ("first token", "" if times.first_token_s is None else f"{times.first_token_s:.3f} s"),
        ("requests", str(times.num_requests)),
        ("finish reason", "" if call.finish_reason is None else call.finish_reason.value),
        *[(choice, f"{share:.1%}") for choice, share in (call.distribution or {}).items()],
    ]
    yield "<table>"
    for name, value in rows:
        if value:
            yield f"<tr><th>{_safe(name)}</th><td>{_safe(value)}</td></tr>"
    yield '</table><details class="prompt"><summary>exact prompt, '
    yield f"{len(call.prompt_ids)} tokens</summary>"
    for text in trace.sent(call.index):
        yield f"<pre>\n{_safe(text)}</pre>"
    yield "</details></details>"


def _origin_rows(call: CallRecord, times: CallTimes) -> Iterator[tuple[str, str]]:
    """Give what a runtime tells of how a text came about; what it does not tell is said to be unknown."""
    if call.kind != "gen" or call.error is not None:
        return
    yield "queued", "unknown" if times.queued_s is None else f"{times.queued_s:.3f} s"
    if call.origin is None:
        yield "masked share", "unknown"
    elif call.origin.masked_share is not None:
        yield "masked share", f"{call.origin.masked_share:.1%} ({call.origin.num_measured} tokens looked at)"


def _piece(piece: Written) -> str:
    if piece.is_forced:
        return f'<span class="forced" title="forced by the constraint">{_safe(piece.text)}</span>'
    return f'<span class="generated">{_safe(piece.text)}</span>'


def _told(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _segment(segment: Segment) -> str:
    return f'<span class="{"template" if segment.is_template else "own"}">{_safe(segment.text)}</span>'


def _safe(text: str) -> str:
    """Escape text for an element or an attribute; what UTF-8 cannot say is replaced. Pure."""
    return escape(text.encode("utf-8", "replace").decode(), quote=True)
