"""What a program would send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frontend_lang.traces.model import Trace


@dataclass(frozen=True, slots=True)
class DryPrompt:
    """The prompt of one call.

    Attributes:
        is_exact: the model will get this very text; False when a stand-in for a model's answer is part of it.
    """

    call: str
    branch: str
    location: str
    text: str
    token_ids: tuple[int, ...]
    is_exact: bool


@dataclass(frozen=True, slots=True)
class DryRun:
    """The prompts of a program that sent nothing; `print` shows them in full.

    Attributes:
        ended: why it did not come to its end, or None.
        trace: the whole run, stand-ins included.
    """

    prompts: tuple[DryPrompt, ...]
    ended: str | None
    trace: Trace

    def __str__(self) -> str:
        parts = []
        for prompt in self.prompts:
            note = "" if prompt.is_exact else ", with stand-ins"
            head = f"--- {prompt.call} in {prompt.branch}: {len(prompt.token_ids)} tokens{note} ({prompt.location})"
            parts.append(f"{head}\n{prompt.text}")
        if self.ended is not None:
            parts.append(f"--- ended here: {self.ended}")
        return "\n".join(parts)


def dry_run_of(trace: Trace, stand_ins: Sequence[str]) -> DryRun:
    """Give the prompts of a trace. Pure."""
    prompts = tuple(
        DryPrompt(
            call.label,
            call.branch,
            call.location,
            text,
            call.prompt_ids,
            not any(stand_in in text for stand_in in stand_ins),
        )
        for call in trace.calls
        for text in trace.sent(call.index)
    )
    return DryRun(prompts, trace.error, trace)
