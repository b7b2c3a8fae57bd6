"""A short way to the end of a constrained text, where the engine does not tell its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
from numpy.typing import NDArray

_NUM_TRIES = 4
_ORDINARY = 50.0  # tokens that close nothing; the longer come first, so that least lengths are reached soon
_LAST = 100.0  # escapes and pieces of characters
_ELSEWHERE = {b"null": 2, b"0": 3, b"true": 4, b"false": 4, b'""': 4, b"[]": 5, b"{}": 5, b'"': 7, b"[": 8, b"{": 9, b",": 10}  # fmt: skip
_PLAIN_LETTER = b"q"  # begins no JSON value


@dataclass(frozen=True, slots=True)
class ClosingRanks:
    """How much each token helps to end a JSON text: lower is better.

    Attributes:
        in_string, elsewhere: [V] float64.
        letter_id: a token that is allowed inside free strings only; -1 if there is none.
    """

    in_string: NDArray[np.float64]
    elsewhere: NDArray[np.float64]
    letter_id: int

    @classmethod
    def build(cls, vocab_bytes: Sequence[bytes]) -> ClosingRanks:
        """Rank a vocabulary. Cost: linear."""
        letter_id = next((index for index, token in enumerate(vocab_bytes) if token == _PLAIN_LETTER), -1)
        return cls(
            np.array([_rank_in_string(token) for token in vocab_bytes]),
            np.array([_rank_elsewhere(token) for token in vocab_bytes]),
            letter_id,
        )

    def choose(self, allowed: NDArray[np.int64], generator: np.random.Generator | None) -> int:
        """Give the allowed token of the lowest rank; a generator disturbs the order of ordinary tokens."""
        ranks = (self.in_string if self.letter_id in allowed else self.elsewhere)[allowed]
        if generator is not None:
            ranks = np.where(ranks < _ORDINARY - 25, ranks, _ORDINARY + 10 * generator.random(len(ranks)))
        return int(allowed[int(np.argmin(ranks))])


def _rank_in_string(token: bytes) -> float:
    if token.startswith(b'"') and not token.strip(b'"}]'):
        return 1 - len(token) / 100
    return _rank_ordinary(token)


def _rank_elsewhere(token: bytes) -> float:
    if token and not token.strip(b"}])"):
        return 1 - len(token) / 100
    if token in _ELSEWHERE:
        return _ELSEWHERE[token]
    return 6.0 if token.isdigit() else _rank_ordinary(token)


def _rank_ordinary(token: bytes) -> float:
    is_plain = not token.startswith((b'"', b"\\")) and token.isascii()
    return _ORDINARY - min(len(token), 20) if is_plain else _LAST


def closing_run(
    cursor: llguidance.LLMatcher, ranks: ClosingRanks, text_flags: NDArray[np.uint8], max_tokens: int
) -> list[int] | None:
    """Search greedily for a run of at most `max_tokens` tokens to an accepting state.

    Each step takes the forced tokens, else the allowed token that closes most. JSON closes in the first try but
    for patterns that go round in circles: the other tries take ordinary tokens at random (from fixed seeds).
    Cost: at most four masks per token.

    Args:
        text_flags: [V] uint8, 1 for tokens with text.
    """
    for attempt in range(_NUM_TRIES):
        generator = np.random.default_rng(attempt) if attempt else None
        run = _attempt(cursor.deep_copy(), ranks, text_flags, max_tokens, generator)
        if run is not None:
            return run
    return None


def _attempt(
    cursor: llguidance.LLMatcher,
    ranks: ClosingRanks,
    text_flags: NDArray[np.uint8],
    max_tokens: int,
    generator: np.random.Generator | None,
) -> list[int] | None:
    run: list[int] = []
    while not cursor.is_accepting():
        if cursor.is_stopped() or len(run) >= max_tokens:
            return None
        tokens = cursor.compute_ff_tokens()
        if not tokens:
            mask = np.frombuffer(cursor.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(mask, bitorder="little", count=len(text_flags))
            allowed = np.flatnonzero(bits & text_flags)
            if not allowed.size:
                return None
            tokens = [ranks.choose(allowed, generator)]
        if cursor.try_consume_tokens(tokens) != len(tokens):
            return None
        run += tokens
    return run if len(run) <= max_tokens else None
