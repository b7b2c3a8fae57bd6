"""How long a step takes, learned from the steps just run, and how much work fits into a target."""

from __future__ import annotations

from collections.abc import Iterable

from radixrt.sched.plan import Chunk

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


def load_of(chunks: Iterable[Chunk]) -> tuple[int, float]:
    """Give a step's tokens and attention pairs. Pure."""
    num_tokens, num_pairs = 0, 0.0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        num_pairs += pairs_of(chunk.start, chunk.num_tokens)
    return num_tokens, num_pairs


class StepTimeModel:
    """Fit seconds = fixed + per_token * tokens + per_pair * pairs by recursive least squares.

    Loads that always come together share their costs in any proportion; their sum is what is fitted.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[INITIAL_VARIANCE if i == j else 0.0 for j in range(3)] for i in range(3)]

    @property
    def is_ready(self) -> bool:
        return self.num_steps >= MIN_STEPS

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Take in one step's load and time."""
        features = [1.0 * UNITS[0], num_tokens * UNITS[1], num_pairs * UNITS[2]]
        spread = [sum(row[j] * features[j] for j in range(3)) for row in self._covariance]
        gain_base = FORGETTING + sum(features[i] * spread[i] for i in range(3))
        error = seconds - sum(self._weights[i] * features[i] for i in range(3))
        for i in range(3):
            self._weights[i] += spread[i] / gain_base * error
        # Loads that never change would let the unseen directions grow for ever.
        self._covariance = [
            [
                max(
                    min(
                        (self._covariance[i][j] - spread[i] * spread[j] / gain_base) / FORGETTING,
                        INITIAL_VARIANCE,
                    ),
                    -INITIAL_VARIANCE,
                )
                for j in range(3)
            ]
            for i in range(3)
        ]
        self.num_steps += 1

    def predict(self, num_tokens: int, num_pairs: float) -> float:
        """Give the seconds of a step, never less than 0."""
        features = (1.0, num_tokens, num_pairs)
        seconds = sum(w * u * f for w, u, f in zip(self._weights, UNITS, features, strict=True))
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
