"""What constraints cost and did, since the engine's start."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from radixrt.histogram import Histogram


@dataclass(frozen=True, slots=True)
class CompileStats:
    """What the cache of compiled constraints did.

    Attributes:
        num_cached: constraints that were there already, refused ones included.
        num_compiled, num_refused: that were not: taken, and refused.
        compile_s: times of the compilations as who waited saw them, the worker process included.
        num_bytes, num_entries: what is held now.
    """

    num_cached: int = 0
    num_compiled: int = 0
    num_refused: int = 0
    compile_s: Histogram = field(default_factory=Histogram)
    num_bytes: int = 0
    num_entries: int = 0


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """What constraints did to the sampling.

    Attributes:
        compilations: of the cache of compiled constraints.
        mask_s: times to fill one mask.
        num_masks: masks filled, one for each token sampled under a constraint.
        removed_probability: mean share of the model's probability that masks took away, 0 to 1, over the
            `num_measured` masks that were looked at: the first 4 of each sequence, then one in 16.
        num_dead_ends: sequences that ended because nothing could follow, or no valid value was found.
        num_retries: finished values that were not valid and were taken back.
    """

    compilations: CompileStats = field(default_factory=CompileStats)
    mask_s: Histogram = field(default_factory=partial(Histogram, smallest_s=1e-6))
    num_masks: int = 0
    num_measured: int = 0
    removed_probability: float = 0.0
    num_dead_ends: int = 0
    num_retries: int = 0
