"""How long a step takes, learned from the steps just run, and how much work fits into a target."""

from __future__ import annotations

from collections.abc import Collection
from operator import mul

from radixrt.sched.plan import NUM_TOKENS, START, Chunk

FORGETTING = 0.98  # weight of a step against the next one
MIN_STEPS = 8  # before that, nothing is predicted
INITIAL_VARIANCE = 1e6
MIN_CHUNK_TOKENS = 16  # a prefill always gets this much, or a target that cannot be met would stop it
MAX_CHUNK_TOKENS = 1 << 20
TYPICAL_PREFILL_TOKENS = 1024
FASTEST_S_PER_TOKEN = 4e-6  # a small model on a large card
UNITS = (1.0, 1e-3, 1e-6)  # scales of the three features, so that their weights are of one size


def pairs_of(start: int, num_tokens: int) -> float:
    """Give how many (query, key) pairs attention computes for a chunk. Pure."""
    return num_tokens * (start + (num_tokens + 1) / 2)


def load_of(chunks: Collection[Chunk]) -> tuple[int, float]:
    """Give a step's tokens and attention pairs. Pure."""
    news = list(map(NUM_TOKENS, chunks))
    num_tokens = sum(news)
    # As in pairs_of, twice and summed up: twice n * start, and n * (n + 1).
    num_pairs = 2 * sum(map(mul, news, map(START, chunks))) + sum(map(mul, news, news)) + num_tokens
    return num_tokens, num_pairs / 2


class StepTimeModel:
    """Fit seconds = fixed + per_token * tokens + per_pair * pairs by recursive least squares.

    Loads that always come together share their costs in any proportion; their sum is what is fitted.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._weights = (0.0, 0.0, 0.0)
        # Of a symmetric matrix: the diagonal, then the entries (0, 1), (0, 2) and (1, 2).
        self._covariance = (INITIAL_VARIANCE, INITIAL_VARIANCE, INITIAL_VARIANCE, 0.0, 0.0, 0.0)

    @property
    def is_ready(self) -> bool:
        return self.num_steps >= MIN_STEPS

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Take in one step's load and time."""
        one, tokens, pairs = UNITS[0], num_tokens * UNITS[1], num_pairs * UNITS[2]
        c00, c11, c22, c01, c02, c12 = self._covariance
        s0 = c00 * one + c01 * tokens + c02 * pairs
        s1 = c01 * one + c11 * tokens + c12 * pairs
        s2 = c02 * one + c12 * tokens + c22 * pairs
        gain = FORGETTING + (one * s0 + tokens * s1 + pairs * s2)
        w0, w1, w2 = self._weights
        error = seconds - (w0 * one + w1 * tokens + w2 * pairs)
        self._weights = w0 + s0 / gain * error, w1 + s1 / gain * error, w2 + s2 / gain * error
        self._covariance = (
            _bounded((c00 - s0 * s0 / gain) / FORGETTING),
            _bounded((c11 - s1 * s1 / gain) / FORGETTING),
            _bounded((c22 - s2 * s2 / gain) / FORGETTING),
            _bounded((c01 - s0 * s1 / gain) / FORGETTING),
            _bounded((c02 - s0 * s2 / gain) / FORGETTING),
            _bounded((c12 - s1 * s2 / gain) / FORGETTING),
        )
        self.num_steps += 1

    def predict(self, num_tokens: int, num_pairs: float) -> float:
        """Give the seconds of a step, never less than 0."""
        fixed, per_token, per_pair = self._weights
        seconds = fixed * UNITS[0] + per_token * UNITS[1] * num_tokens + per_pair * UNITS[2] * num_pairs
        return max(seconds, 0.0)

    @property
    def prefill_s_per_token(self) -> float:
        """Give the seconds that a prompt token adds to a step; FASTEST_S_PER_TOKEN while too little is known."""
        if not self.is_ready:
            return FASTEST_S_PER_TOKEN
        num_tokens = TYPICAL_PREFILL_TOKENS
        seconds = self.predict(num_tokens, pairs_of(0, num_tokens)) - self.predict(0, 0.0)
        return max(seconds, 0.0) / num_tokens

    def max_chunk_tokens(self, target_s: float, *, num_tokens: int, num_pairs: float, start: int) -> int:
        """Give how many prompt tokens, the first one at position `start`, fit beside a load into a target.

        At least MIN_CHUNK_TOKENS, however late it is; at most MAX_CHUNK_TOKENS.
        """
        fitting, too_many = MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS + 1
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            seconds = self.predict(num_tokens + middle, num_pairs + pairs_of(start, middle))
            if seconds <= target_s:
                fitting = middle
            else:
                too_many = middle
        return fitting


def _bounded(variance: float) -> float:
    """Keep a variance within its first value: loads that never change would let the unseen directions grow for ever."""
    if -INITIAL_VARIANCE <= variance <= INITIAL_VARIANCE:
        return variance
    return INITIAL_VARIANCE if variance > 0 else -INITIAL_VARIANCE
