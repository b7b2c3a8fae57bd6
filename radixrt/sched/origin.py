"""OriginLog: how the output tokens of one sequence came about, kept while it runs."""

from __future__ import annotations

from radixrt.errors import InvariantViolation
from radixrt.types import TokenLogprob


class OriginLog:
    """Own the runs of tokens that were not sampled, what masks took away, and the time before the first step.

        output: [ sampled | forced run | sampled | forced run ]   places count output tokens, from 0

    Invariants: runs are in order, not empty, and do not touch; num_forced is the sum of their lengths.

    Attributes:
        runs: [start, stop) of the tokens that were appended without sampling.
        removed: (place, share of the model's probability that the mask took away), where that was measured.
        logprobs: of known tokens by position, the prompt's too, where asked for.
        num_forced: how many tokens were not sampled.
        num_lost: positions that went through the model and count no more, less those that came from the cache now.
        submitted_at_s: set by the scheduler, by the clock that plan() is given.
        queued_s: from the submission to the step in which the sequence was first admitted; None before it.
    """

    __slots__ = ("logprobs", "num_forced", "num_lost", "queued_s", "removed", "runs", "submitted_at_s")

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []
        self.removed: list[tuple[int, float]] = []
        self.logprobs: dict[int, TokenLogprob] = {}
        self.num_forced = 0
        self.num_lost = 0
        self.submitted_at_s = 0.0
        self.queued_s: float | None = None

    def add_run(self, start: int, num_tokens: int) -> None:
        """Note tokens that were appended without sampling."""
        if num_tokens == 0:
            return
        self.num_forced += num_tokens
        stop = start + num_tokens
        if self.runs and self.runs[-1][1] == start:
            start = self.runs.pop()[0]
        self.runs.append((start, stop))

    def add_removed(self, place: int, share: float) -> None:
        """Note what the mask took away where a token was sampled."""
        self.removed.append((place, share))

    def cut(self, num_kept: int) -> None:
        """Forget the tokens from a place on: they were taken back."""
        self.runs = [(start, min(stop, num_kept)) for start, stop in self.runs if start < num_kept]
        self.num_forced = _num_tokens(self.runs)
        self.removed = [(place, share) for place, share in self.removed if place < num_kept]

    def check(self, num_output_tokens: int) -> None:
        """Raise InvariantViolation unless the runs lie in order within the output."""
        last = -1
        for start, stop in self.runs:
            if not last < start < stop <= num_output_tokens:
                raise InvariantViolation(f"forced runs {self.runs} of {num_output_tokens} output tokens")
            last = stop
        if self.num_forced != _num_tokens(self.runs):
            raise InvariantViolation(f"{self.num_forced} forced tokens, runs {self.runs}")


def _num_tokens(runs: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in runs)
