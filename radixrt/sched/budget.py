"""Token and page budgets of a step: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress
from operator import attrgetter, lt, sub

from radixrt.sched.in_flight import InFlight
from radixrt.sched.sequence import Sequence

NUM_COMPUTED = attrgetter("num_computed")
NUM_PROMPT = attrgetter("num_prompt_tokens")
TOKEN_IDS = attrgetter("token_ids")

# The first position that it could compute now, where those end, and how many of them it may compute.
Share = tuple[Sequence, int, int, int]


def split_tokens(sequences: Iterable[Sequence], max_tokens: int, in_flight: InFlight) -> Iterator[Share]:
    """Share a step's tokens among running sequences, oldest first: decodes come before prefills. Pure.

    Every decode gets all of its few tokens before a prefill takes a chunk, so that a long prompt never stops
    the others' output.

    Args:
        sequences: oldest first.
    Returns: one share per sequence, in this order.
    """
    sequences = tuple(sequences)
    if in_flight:
        pending = list(map(in_flight.pending, sequences))
        starts, stops = [item.start for item in pending], [item.stop for item in pending]
    else:  # the usual case, without a step of the interpreter per sequence
        starts, stops = list(map(NUM_COMPUTED, sequences)), list(map(len, map(TOKEN_IDS, sequences)))
    news = list(map(sub, stops, starts))
    num_tokens = sum(news)
    if num_tokens > max_tokens:
        is_prefill = list(map(lt, starts, map(NUM_PROMPT, sequences)))
        num_left = max_tokens - num_tokens + sum(compress(news, is_prefill))  # what the decodes leave
        for place in compress(range(len(news)), is_prefill):
            news[place] = max(min(news[place], num_left), 0)
            num_left -= news[place]
        if num_left < 0:
            num_left = max_tokens
            for place, num_tokens in enumerate(news):
                news[place] = min(num_tokens, num_left)
                num_left -= news[place]
    return zip(sequences, starts, stops, news, strict=True)
