"""Token and page budgets of a step: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from radixrt.sched.in_flight import InFlight
from radixrt.sched.sequence import Sequence

# The first position that it could compute now, where those end, and how many of them it may compute.
Share = tuple[Sequence, int, int, int]


def split_tokens(sequences: Iterable[Sequence], max_tokens: int, in_flight: InFlight) -> list[Share]:
    """Share a step's tokens among running sequences, oldest first: decodes come before prefills. Pure.

    Every decode gets all of its few tokens before a prefill takes a chunk, so that a long prompt never stops
    the others' output.

    Args:
        sequences: oldest first.
    Returns: one share per sequence, in this order.
    """
    shares: list[Share] = []
    num_left, is_in_flight = max_tokens, bool(in_flight)
    for sequence in sequences:
        if is_in_flight:
            pending = in_flight.pending(sequence)
            start, stop = pending.start, pending.stop
        else:
            start, stop = sequence.num_computed, len(sequence.token_ids)
        num_tokens = stop - start
        num_left -= num_tokens
        shares.append((sequence, start, stop, num_tokens))
    if num_left >= 0:
        return shares
    num_left = max_tokens
    for is_prefill in (False, True):
        for place, (sequence, start, stop, num_tokens) in enumerate(shares):
            if is_prefill == (start < sequence.num_prompt_tokens):
                num_tokens = min(num_tokens, num_left)
                num_left -= num_tokens
                shares[place] = sequence, start, stop, num_tokens
    return shares
