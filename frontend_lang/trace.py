"""What each call sent, found cached and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from frontend_lang.backends import FinishReason, Origin, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One gen, select or decide; one per round of a gen with tools, and one per sample of a gen with n > 1.

    Attributes:
        index: order of start within the program's run, from 0.
        name: the variable it set, or None.
        location: "file:line" of the statement.
        branch: "root", or the fork it ran in: "root/0" is the first child.
        prompt_ids: what was sent; for select the shared prefix of its requests.
        token_ids: what came back, as it stands in the transcript.
        usage: the runtime's count of the call; for select the sum over its choices.
        logprobs: one entry per generated token when asked for.
        origin: gen only: which of the tokens were forced and what masks took away, by places in token_ids and text; None
            where the runtime does not tell.
        queued_s: gen only: how long its request waited in the runtime before it began; None where that is not told.
        distribution: select only; choice -> probability of the whole choice among the choices, adding up to 1.
        error: what went wrong, or None.
    """

    index: int
    kind: Literal["gen", "select", "decide"]
    name: str | None
    location: str
    branch: str
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    origin: Origin | None = None
    queued_s: float | None = None
    distribution: Mapping[str, float] | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """Give kind and name, on one line and without what a terminal would obey."""
        if not self.name:
            return self.kind
        return f"{self.kind} {self.name if self.name.isprintable() else repr(self.name)}"

    @property
    def prompt_tokens(self) -> int:
        return self.usage.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.usage.cached_tokens

    @property
    def computed_tokens(self) -> int:
        return self.usage.computed_tokens

    @property
    def forced_tokens(self) -> int | None:
        """Give how many tokens were forced; None where the runtime does not tell."""
        return num_forced([self])

    @property
    def output_tokens(self) -> int:
        return self.usage.output_tokens


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Add usages up. Pure."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        computed_tokens=sum(usage.computed_tokens for usage in usages),
        forced_tokens=sum(usage.forced_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
    )


def num_forced(calls: Sequence[CallRecord]) -> int | None:
    """Give how many tokens of calls were forced; None when the runtime of one that wrote some does not tell. Pure."""
    if any(call.kind == "gen" and call.token_ids and call.origin is None for call in calls):
        return None
    return sum(call.usage.forced_tokens for call in calls)


def table(calls: Sequence[CallRecord]) -> str:
    """Give a plain-text table of calls, one a line, and their total. Pure."""
    head = ("call", "branch", "prompt", "cached", "computed", "forced", "output", "seconds")
    rows = [(call.label, call.branch, *_counts([call]), f"{call.seconds:.3f}") for call in calls]
    rows.append(("total", "", *_counts(calls), f"{sum(call.seconds for call in calls):.3f}"))
    return lined_up(head, rows, num_left=2)


def lined_up(head: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> str:
    """Give a table as plain text; the first `num_left` columns begin at the left, the others end at the right. Pure."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def counts(calls: Sequence[CallRecord]) -> list[tuple[str, int | None]]:
    """Give the token counts of calls by name, added up; None = the runtime does not tell. Pure."""
    usage = total_usage([call.usage for call in calls])
    return [
        ("prompt", usage.prompt_tokens),
        ("cached", usage.cached_tokens),
        ("computed", usage.computed_tokens),
        ("forced", num_forced(calls)),
        ("output", usage.output_tokens),
    ]


def shown_count(count: int | None) -> str:
    """Give a count for a table's cell. Pure."""
    return "?" if count is None else str(count)


def _counts(calls: Sequence[CallRecord]) -> tuple[str, ...]:
    return tuple(shown_count(count) for _, count in counts(calls))
