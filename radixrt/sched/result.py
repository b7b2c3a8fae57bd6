"""What a step's result does to one sequence, and what its reader gets of that."""

from __future__ import annotations

from radixrt.sched.plan import Chunk, ChunkResult, SequenceUpdate
from radixrt.sched.sequence import Sequence
from radixrt.types import FinishReason, TokenLogprob

NO_LOGPROBS: tuple[TokenLogprob, ...] = ()


def take_result(sequence: Sequence, chunk: Chunk, result: ChunkResult) -> FinishReason | None:
    """Move a chunk's result into its sequence; give why the sequence ends, or None."""
    if chunk.scored or result.scored:
        sequence.token_logprobs.update(zip(chunk.scored, result.scored, strict=True))
    token_id = result.token_id
    if token_id is not None:
        if result.removed_probability is not None:
            sequence.origin.add_removed(sequence.num_output_tokens, result.removed_probability)
        if not sequence.append_sampled(token_id, result.logprob, result.closing_logprob):
            return FinishReason.STOP
    if not sequence.is_complete or sequence.num_settled < sequence.num_total:
        return None
    is_answered = sequence.constraint is not None and sequence.constraint.is_accepting
    return FinishReason.STOP if is_answered else FinishReason.LENGTH


def update_of(sequence: Sequence, error: BaseException | None) -> SequenceUpdate:
    """Give what the reader has not seen; with logprobs, tokens wait until theirs is known; see also `is_judged`."""
    token_ids, sampling = sequence.token_ids, sequence.request.sampling
    first, reason = sequence.num_prompt_tokens + sequence.num_delivered, sequence.finish_reason
    if sampling.logprobs is None and sampling.prompt_logprobs is None:
        stop = len(token_ids)  # `num_settled`, where nothing is waited for
    else:
        stop = sequence.num_settled
    if stop < first or (sequence.constraint is not None and sequence.is_judged and reason is None):
        stop = first
    sequence.num_delivered += stop - first
    logprobs = NO_LOGPROBS
    if sampling.logprobs is not None:
        logprobs = tuple(sequence.token_logprobs[position] for position in range(first, stop))
    new_ids = (token_ids[first],) if stop - first == 1 else tuple(token_ids[first:stop])
    return tuple.__new__(SequenceUpdate, (sequence, new_ids, logprobs, reason, error))
