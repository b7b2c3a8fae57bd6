"""StepPlan -> arrays: what the decoder reads (BatchInputs) and what the sampler reads (SampleRow)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from radixrt.errors import GrammarDeadEnd
from radixrt.exec.randomness import uniform
from radixrt.model.inputs import INT32, INT64, BatchInputs
from radixrt.model.outputs import Mask
from radixrt.sched.plan import StepPlan
from radixrt.sched.sequence import Sequence
from radixrt.types import SamplingParams

MASK_WORD_BITS = 32
NEGATIVE_INFINITY_BITS = np.float32(-np.inf).view(np.int32)
MEASURE_FIRST, MEASURE_EVERY = 4, 16


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits from which a token is drawn.

    Attributes:
        sequence: whose next token it is (read only).
        uniform: number in [0, 1), keyed by seed, sample and position; 0 under greedy sampling, which needs none.
        mask: [ceil(V / 32)] int32, 1 = allowed; None = everything.
        banned_ids: tokens that must not come now (ends before min_tokens).
        mask_s: time to fill the mask.
        error: the constraint gave up, so that there is no mask to sample with; concerns this sequence only.
    """

    sequence: Sequence
    uniform: float
    mask: Mask | None
    banned_ids: tuple[int, ...]
    error: GrammarDeadEnd | None = None
    mask_s: float = 0.0

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.sampling


def build_inputs(plan: StepPlan, *, page_size: int) -> BatchInputs:
    """Give one flattened ragged batch for a non-empty plan. Pure.

    sample_rows holds, chunk after chunk, the rows of its scored positions and then its row to sample from.
    """
    tokens, positions, slots, rows = array(INT32), array(INT64), array(INT64), array(INT64)
    query_start, context_lens = array(INT32, (0,)), array(INT32)
    tables: list[list[int]] = []
    for sequence, start, num_tokens, wants_sample, scored, _ in plan.chunks:
        assert sequence.lease is not None
        stop, first, pages = start + num_tokens, len(positions), sequence.lease.pages
        tokens += sequence.token_ids[start:stop]
        positions.extend(range(start, stop))
        slots.extend([pages[at // page_size] * page_size + at % page_size for at in range(start, stop)])
        if scored:  # the row before a position tells of it
            rows.extend(range(first + scored.start - 1 - start, first + scored.stop - 1 - start))
        if wants_sample:
            rows.append(first + num_tokens - 1)
        query_start.append(first + num_tokens)
        context_lens.append(stop)
        tables.append(pages[: -(-stop // page_size)])
    num_columns = max(map(len, tables))
    page_table = array(INT32)
    for table in tables:
        page_table.extend(table)
        page_table.extend([0] * (num_columns - len(table)))
    token_ids = array(INT64, tokens)
    return BatchInputs(token_ids, positions, slots, page_table, query_start, context_lens, rows)


def build_sample_rows(plan: StepPlan, *, vocab_size: int) -> list[SampleRow]:
    """Give one SampleRow per chunk that wants a sample, in plan order. Cost: one grammar mask per constrained row."""
    return [build_sample_row(chunk.sequence, vocab_size) for chunk in plan.chunks if chunk.wants_sample]


def build_sample_row(sequence: Sequence, vocab_size: int) -> SampleRow:
    """Say how to draw a sequence's next token. Cost: a grammar mask under a constraint."""
    is_greedy = sequence.sampling.is_greedy
    draw = 0.0 if is_greedy else uniform(sequence.seed, sequence.sample_index, sequence.num_total)
    if sequence.constraint is None:
        return SampleRow(sequence, draw, None, banned_ids(sequence, vocab_size))
    mask = np.zeros(-(-vocab_size // MASK_WORD_BITS), dtype=np.int32)
    started = time.perf_counter()
    try:
        sequence.constraint.matcher.fill_mask(mask)
    except GrammarDeadEnd as error:
        return SampleRow(sequence, draw, mask, (), error)
    mask_s = time.perf_counter() - started
    _ban(mask, sequence.constraint.banned.get(sequence.num_output_tokens, frozenset()))
    if sequence.allows_end:  # the ends are allowed exactly when the text so far is complete
        for token_id in (*sequence.eos_ids, *sequence.sampling.stop_token_ids):
            mask.view(np.uint32)[token_id // MASK_WORD_BITS] |= np.uint32(1 << token_id % MASK_WORD_BITS)
    return SampleRow(sequence, draw, mask, (), mask_s=mask_s)


def _ban(mask: Mask, token_ids: frozenset[int]) -> None:
    """Clear bits of a mask, unless none would be left."""
    if not token_ids:
        return
    kept = mask.copy()
    for token_id in token_ids:
        kept.view(np.uint32)[token_id // MASK_WORD_BITS] &= ~np.uint32(1 << token_id % MASK_WORD_BITS)
    if kept.any():
        mask[:] = kept


def banned_ids(sequence: Sequence, vocab_size: int) -> tuple[int, ...]:
    """Give the tokens that must not come now: those that end the sequence, before min_tokens. Pure."""
    if sequence.allows_end:
        return ()
    ends = (*sequence.eos_ids, *sequence.sampling.stop_token_ids)
    return tuple(token_id for token_id in ends if token_id < vocab_size)


def is_measured(sequence: Sequence) -> bool:
    """Tell whether the probability that its next mask takes away is measured: the same ones are in every run. Pure.

    The first samples of a sequence are, so that something is known of a short value, then one in MEASURE_EVERY.
    """
    num_sampled = sequence.num_output_tokens - sequence.num_forced
    return num_sampled < MEASURE_FIRST or num_sampled % MEASURE_EVERY == 0


def is_allowed(mask: Mask, token_id: int) -> bool:
    """Tell whether a mask allows a token. Pure."""
    return bool(int(mask[token_id // MASK_WORD_BITS]) >> token_id % MASK_WORD_BITS & 1)


def unpack_masks(masks: Seq[Mask], vocab_size: int) -> torch.Tensor:
    """Give masks as [N, V] bool. Pure."""
    bits = np.unpackbits(np.stack(masks).view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(bits[:, :vocab_size].astype(np.bool_))


def refusals(mask: Mask, vocab_size: int) -> torch.Tensor:
    """Give a mask as [V] float32 to add to logits: 0 where a token is allowed, -inf elsewhere. Pure.

    Made by arithmetic on bits: choosing by a condition takes ten times as long where allowed tokens lie scattered.
    """
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little")
    words = bits.astype(np.int32)
    words -= 1  # allowed: no bit; refused: all bits
    words &= NEGATIVE_INFINITY_BITS
    return torch.from_numpy(words.view(np.float32))
