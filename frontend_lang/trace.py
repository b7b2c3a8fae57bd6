"""What each call sent, found cached and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from frontend_lang.backends import FinishReason, TokenLogprob, Usage


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
    def forced_tokens(self) -> int:
        return self.usage.forced_tokens

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


def table(calls: Sequence[CallRecord]) -> str:
    """Give a plain-text table of calls, one a line, and their total. Pure."""
    head = ("call", "branch", "prompt", "cached", "computed", "forced", "output", "seconds")
    rows = [(call.label, call.branch, *_counts(call.usage), f"{call.seconds:.3f}") for call in calls]
    total = total_usage([call.usage for call in calls])
    rows.append(("total", "", *_counts(total), f"{sum(call.seconds for call in calls):.3f}"))
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


def _counts(usage: Usage) -> tuple[str, ...]:
    return tuple(
        str(count)
        for count in (
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.computed_tokens,
            usage.forced_tokens,
            usage.output_tokens,
        )
    )
