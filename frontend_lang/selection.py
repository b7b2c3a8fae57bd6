"""How `select` scores its choices: which sequences must be computed, and who wins. Pure: no backend in here.

Choices are paths in a trie of tokens. Only its leaves are scored: a choice that another one begins with has its
log-probabilities already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from frontend_lang.backends import InvalidRequest

Method = Literal["token_length_normalised", "greedy_token", "unconditional_likelihood"]

# The names under which programs written for SGLang pass them.
token_length_normalized: Method = "token_length_normalised"
greedy_token_selection: Method = "greedy_token"
unconditional_likelihood_normalized: Method = "unconditional_likelihood"


@dataclass(frozen=True, slots=True)
class ScoredChoice:
    """A choice behind the transcript.

    Attributes:
        token_ids: its tokens, at least one.
        logprobs: their natural-log probabilities, each given all before it.
        unconditional: the same behind nothing but the begin of a sequence; () unless the method needs it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def mean(self) -> float:
        return self.total / len(self.logprobs)


def leaves(sequences: Sequence[tuple[int, ...]]) -> list[int]:
    """Give the indices of the sequences that no other one begins with (the first of equals). Pure.

    Cost: one sort: in order, what begins with a sequence follows it at once.
    """
    order = sorted(range(len(sequences)), key=lambda index: (sequences[index], -index))
    kept = [
        index
        for index, following in zip(order, [*order[1:], None], strict=True)
        if following is None or sequences[following][: len(sequences[index])] != sequences[index]
    ]
    return sorted(kept)


def covering(sequences: Sequence[tuple[int, ...]], chosen: Sequence[int]) -> list[int]:
    """Give, for each sequence, the position in `chosen` of one that begins with it. Pure."""
    starts: dict[tuple[int, ...], int] = {}
    for position, index in enumerate(chosen):
        sequence = sequences[index]
        for stop in range(1, len(sequence) + 1):
            starts.setdefault(sequence[:stop], position)
    return [starts[sequence] for sequence in sequences]


def distribution(choices: Sequence[ScoredChoice]) -> dict[str, float]:
    """Give each choice's probability as a whole among the choices: softmax of the totals. Pure."""
    most = max(choice.total for choice in choices)
    weights = [math.exp(choice.total - most) for choice in choices]
    whole = math.fsum(weights)
    return {choice.text: weight / whole for choice, weight in zip(choices, weights, strict=True)}


def winner(method: str, choices: Sequence[ScoredChoice]) -> int:
    """Give the index of the winning choice, the first of equals. Pure."""
    return METHODS[method](choices)


def checked_method(method: str) -> str:
    """Give the method; raises InvalidRequest when there is none of this name."""
    if method not in METHODS:
        raise InvalidRequest(
            f"method must be one of {', '.join(METHODS)}, got {method!r}", parameter="method", value=method
        )
    return method


def _by_mean(choices: Sequence[ScoredChoice]) -> int:
    """Take the highest mean log-probability per token: a long choice is not punished for its length."""
    return max(range(len(choices)), key=lambda index: choices[index].mean)


def _by_ratio(choices: Sequence[ScoredChoice]) -> int:
    """Take the choice that the transcript makes most likelier than it is by itself.

    Source: pointwise mutual information, Holtzman et al., "Surface Form Competition", arXiv:2104.08315.
    """
    return max(
        range(len(choices)),
        key=lambda index: choices[index].total - math.fsum(choices[index].unconditional),
    )


def _by_greedy_walk(choices: Sequence[ScoredChoice]) -> int:
    """Walk the trie of tokens, always to the likeliest next token.

    Where a choice ends and others go on, it wins when the tokens that go on have less probability together than
    ending has: what none of them takes counts as the end.
    """
    remaining, depth = list(range(len(choices))), 0
    while True:
        ending = [index for index in remaining if len(choices[index].token_ids) == depth]
        following: dict[int, list[int]] = {}
        for index in remaining:
            if len(choices[index].token_ids) > depth:
                following.setdefault(choices[index].token_ids[depth], []).append(index)
        if not following:
            return ending[0]
        odds = {
            token_id: choices[indices[0]].logprobs[depth]  # the same for all: same tokens before it
            for token_id, indices in following.items()
        }
        if ending and 1 - math.fsum(map(math.exp, odds.values())) >= math.exp(max(odds.values())):
            return ending[0]
        remaining = following[max(odds, key=lambda token_id: odds[token_id])]
        depth += 1


METHODS: Mapping[str, Callable[[Sequence[ScoredChoice]], int]] = {
    "token_length_normalised": _by_mean,
    "greedy_token": _by_greedy_walk,
    "unconditional_likelihood": _by_ratio,
}
