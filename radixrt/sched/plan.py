"""What one step does, as frozen data: the plan before it, the result after it.

What is made per sequence and step is a named tuple: a frozen dataclass takes three times as long to make. Where one is
made per token, its fields are given to `tuple.__new__` itself, which saves a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from radixrt.errors import RadixrtError
from radixrt.kv.pool import PageCopy
from radixrt.sched.sequence import NO_POSITIONS, Sequence
from radixrt.types import FinishReason, TokenLogprob


class Chunk(NamedTuple):
    """Compute tokens [start, start + num_tokens) of a sequence in this step.

    Attributes:
        wants_sample: the chunk ends at the last known token, whose row of logits gives the next one.
        is_first: the sequence was admitted in this step.
        scored: positions of known tokens whose logprob is wanted; the row before each one lies in the chunk.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    wants_sample: bool
    scored: range
    is_first: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


# Fields of many chunks, read without a step of the interpreter for each.
SEQUENCE = attrgetter("sequence")
START = attrgetter("start")
NUM_TOKENS = attrgetter("num_tokens")
IS_FIRST = attrgetter("is_first")


def make_chunk(
    sequence: Sequence, start: int, num_tokens: int, *, num_total: int, is_first: bool = False
) -> Chunk:
    """Say what a chunk is wanted for when its sequence has num_total tokens, known or under way. Pure."""
    stop, scored = start + num_tokens, NO_POSITIONS
    wants_sample = stop == num_total and len(sequence.token_ids) < sequence.num_max_total
    if sequence.plain_ends is not None:
        return tuple.__new__(Chunk, (sequence, start, num_tokens, wants_sample, scored, is_first))
    if sequence.constraint is not None:
        wants_sample = wants_sample and not sequence.is_complete
    sampling = sequence.request.sampling
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        wanted = sequence.wanted_logprobs
        first = max(start + 1, wanted.start)  # the row of position p - 1 scores the token at p
        scored = range(first, max(first, min(stop + 1, wanted.stop)))
    return tuple.__new__(Chunk, (sequence, start, num_tokens, wants_sample, scored, is_first))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Invariants: the slots written are distinct; copies are read before anything is written."""

    chunks: tuple[Chunk, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class ChunkResult(NamedTuple):
    """What the model said about one chunk.

    Attributes:
        token_id: the sampled token, None when none was wanted or `error` is set.
        logprob: of the sampled token, when asked for.
        closing_logprob: of the token that a constraint puts in its place if it leaves no way to the end in time.
        scored: one entry per position in `Chunk.scored`.
        error: this sequence cannot go on; others are not concerned.
        mask_s: time to fill the mask; None without one.
        removed_probability: share of the model's probability that the mask took away; None where not measured.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    closing_logprob: TokenLogprob | None = None
    scored: tuple[TokenLogprob, ...] = ()
    error: RadixrtError | None = None
    mask_s: float | None = None
    removed_probability: float | None = None


def sampled(token_id: int) -> ChunkResult:
    """Give the result of a chunk of which nothing but the next token was wanted. Pure."""
    return tuple.__new__(ChunkResult, (token_id, None, None, (), None, None, None))


@dataclass(frozen=True, slots=True)
class StepResult:
    """One ChunkResult per chunk of the plan, in its order."""

    chunks: tuple[ChunkResult, ...] = field(default=())


class SequenceUpdate(NamedTuple):
    """What a step changed for the reader of one sequence.

    Attributes:
        token_ids: output tokens that the reader has not seen; an end-of-sequence token is not among them.
        logprobs: one entry per token id when asked for.
        finish_reason: set on a sequence's last update.
        error: set instead of finish_reason when the sequence failed.
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
