"""Choosing among branches: what most of them say, or the best one by a measure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from frontend_lang.outcome import Ok
from frontend_lang.state import Branches, State


@dataclass(frozen=True, slots=True)
class Vote:
    """The outcome of a vote.

    Attributes:
        value: what most branches say; of equals the one said first.
        counts: each value with how many branches say it, in the order of first appearance.
        num_failed: branches that have no vote because they failed.
    """

    value: Any
    counts: tuple[tuple[Any, int], ...]
    num_failed: int

    @property
    def share(self) -> float:
        """Give the winner's part of all votes, above 0, up to 1."""
        return max(count for _, count in self.counts) / sum(count for _, count in self.counts)


def vote(branches: Branches, name: str, *, key: Callable[[Any], Any] = lambda value: value) -> Vote:
    """Join the branches and give the value of `name` that most of them have (self-consistency).

    A branch that failed does not vote. In an async program call `await branches.outcomes()` before.

    Args:
        key: what of a value counts, e.g. str.strip or the last number in it.
    Raises:
        ProgramError: all branches failed: the first one's error; or one has no `name`.
    """
    counts: list[tuple[Any, int]] = []
    states = _ok(branches)
    for state in states:
        said = key(state[name])
        index = next((index for index, (value, _) in enumerate(counts) if value == said), None)
        if index is None:
            counts.append((said, 1))
        else:
            counts[index] = (said, counts[index][1] + 1)
    winner, _ = max(counts, key=lambda item: item[1])
    return Vote(winner, tuple(counts), len(branches) - len(states))


def best_of(branches: Branches, by: str | Callable[[State], float]) -> State:
    """Join the branches and give the one that measures most, the first of equals.

    A branch that failed takes no part. In an async program call `await branches.outcomes()` before.

    Args:
        by: name of a variable that is a number, or a function of a branch, e.g. `mean_logprob("answer")`.
    Raises:
        ProgramError: all branches failed: the first one's error.
        ValueError: a measure is not a number.
    """
    states = _ok(branches)
    measures = [float(state[by] if isinstance(by, str) else by(state)) for state in states]
    if any(map(math.isnan, measures)):
        raise ValueError(f"best_of needs a number for every branch, got {measures}")
    return states[max(range(len(states)), key=measures.__getitem__)]


def mean_logprob(name: str) -> Callable[[State], float]:
    """Make the measure "how sure the model was of `name`": the mean log-probability of its tokens.

    The call must have asked for log-probabilities: `gen(name, logprobs=0)`.
    """

    def measure(state: State) -> float:
        entries = state.record(name).logprobs
        if not entries:
            raise ValueError(f'mean_logprob needs gen("{name}", logprobs=0)')
        return math.fsum(entry.logprob for entry in entries) / len(entries)

    return measure


def _ok(branches: Branches) -> list[State]:
    """Give the branches that did not fail; raise the first failure when all did."""
    outcomes = list(branches.join())
    states = [outcome.value for outcome in outcomes if isinstance(outcome, Ok)]
    if not states:
        outcomes[0].unwrap()
    return states
