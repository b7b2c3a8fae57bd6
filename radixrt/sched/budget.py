"""Token and page budgets of a step: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from radixrt.sched.in_flight import InFlight
from radixrt.sched.sequence import Sequence


def split_tokens(sequences: Iterable[Sequence], max_tokens: int, in_flight: InFlight) -> dict[Sequence, int]:
    """Share a step's tokens among running sequences: decodes first, then prefills, oldest first. Pure.

    Every decode gets all of its few tokens before a prefill takes a chunk, so that a long prompt never stops
    the others' output.
    """
    shares: dict[Sequence, int] = {}
    for sequence in sorted(sequences, key=lambda item: (in_flight.is_prefilling(item), item.arrival)):
        shares[sequence] = min(in_flight.num_pending(sequence), max_tokens)
        max_tokens -= shares[sequence]
    return shares
