"""Runner: carries out plans, in three calls per step. ModelRunner does each at once; see also device_runner.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from radixrt.errors import RadixrtError
from radixrt.exec import sampler
from radixrt.exec.batch import SampleRow, build_inputs, build_sample_rows
from radixrt.exec.draw import Draw, Found, draw_rows
from radixrt.kv.store import KVStore
from radixrt.model.inputs import BatchInputs
from radixrt.model.outputs import GetMasks, Mask, Prediction
from radixrt.sched.plan import Chunk, ChunkResult, StepPlan, StepResult, sampled
from radixrt.types import TokenLogprob

S = TypeVar("S")  # a step on its way, as its runner keeps it


class Runner(Protocol[S]):
    """Carries out one plan after the other.

    Attributes:
        can_overlap: a step may be launched before the one before it is collected.
    """

    can_overlap: bool

    @property
    def store(self) -> KVStore: ...

    def launch(self, plan: StepPlan) -> S:
        """Begin a step: copies and the forward pass. Changes: the store."""
        ...

    def sample(self, step: S, plan: StepPlan) -> None:
        """Draw what is wanted.

        Args:
            plan: what of the launched plan counts, chunk for chunk; the step before is committed.
        """
        ...

    def collect(self, step: S) -> StepResult:
        """Give what a sampled step gave, waiting for it."""
        ...

    def close(self) -> None:
        """Let go of threads; no plan can be run afterwards."""
        ...


@dataclass(slots=True)
class ComputedStep:
    """A step of ModelRunner: its plan, what the model gave, what to sample by, and the result once sampled."""

    plan: StepPlan
    prediction: Prediction
    rows: list[SampleRow]
    result: StepResult | None = None


class Model(Protocol):
    """What the runner needs of a decoder."""

    def predict(
        self,
        inputs: BatchInputs,
        store: KVStore,
        *,
        num_token_ids: int,
        wants_logits: bool,
        get_masks: GetMasks | None,
    ) -> Prediction:
        """Compute a batch, writing its KV into the store; give logits and the likeliest of the first num_token_ids tokens.

        Args:
            wants_logits: False where the likeliest allowed tokens will do; there may be logits all the same.
            get_masks: gives the rows' masks, and may have to wait for them: to be called as late as can be. Need not be
                called where there are logits. None: no row has one.
        """


class ModelRunner:
    """Own the model and the KV store. A step is over when its launch returns, so that nothing can overlap.

    Args:
        num_token_ids: ids that the tokenizer can decode; a model's padding columns after them are never drawn.
        draw: draws where more than the likeliest token is wanted.
    """

    can_overlap = False

    def __init__(self, model: Model, store: KVStore, *, num_token_ids: int, draw: Draw = draw_rows) -> None:
        self.model = model
        self.draw = draw
        self.store = store
        self.num_token_ids = num_token_ids
        # Masks are filled here while the forward pass runs: it lets go of the interpreter.
        self._masking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="radixrt-masks")

    def close(self) -> None:
        """End the thread that fills masks; no plan can be run afterwards."""
        self._masking.shutdown()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> ComputedStep:
        """Carry out a plan's copies and its forward pass, and fill its masks. Changes: the store."""
        self.store.copy_pages(plan.page_copies)
        inputs = build_inputs(plan, page_size=self.store.layout.page_size)
        has_masks = any(chunk.wants_sample and chunk.sequence.constraint for chunk in plan.chunks)
        pending = self._make_rows(plan, has_masks=has_masks)
        wants_logits = any(
            chunk.scored or (chunk.wants_sample and sampler.wants_logits(chunk.sequence))
            for chunk in plan.chunks
        )
        try:
            prediction = self.model.predict(
                inputs,
                self.store,
                num_token_ids=self.num_token_ids,
                wants_logits=wants_logits,
                get_masks=(lambda: _masks_of(plan, pending())) if has_masks else None,
            )
        finally:
            rows = pending()  # in any case: nobody else may use a matcher before its mask is filled
        return ComputedStep(plan, prediction, rows)

    @torch.inference_mode()
    def sample(self, step: ComputedStep, plan: StepPlan) -> None:
        """Draw what the step wants; all that was launched counts."""
        logits, token_ids, largest = step.prediction
        if logits is None:
            drawn = sampler.take_likeliest(step.rows, (token_ids, largest))
            step.result = _result_of(plan, drawn, step.rows)
        elif all(chunk.sequence.plain_ends is not None for chunk in plan.chunks):  # a row of logits each
            found, drawable = (token_ids, largest), self._drawable(logits)
            drawn = sampler.sample(drawable, step.rows, found=found, draw=self.draw)
            step.result = _result_of(plan, drawn, step.rows)
        else:
            step.result = self._sample(plan, logits, (token_ids, largest), step.rows)

    def collect(self, step: ComputedStep) -> StepResult:
        """Give the result of a sampled step."""
        assert step.result is not None
        return step.result

    def _make_rows(self, plan: StepPlan, *, has_masks: bool) -> Callable[[], list[SampleRow]]:
        """Begin to make the sample rows; the call gives them."""
        make = partial(build_sample_rows, plan, vocab_size=self.num_token_ids)
        if has_masks:
            return self._masking.submit(make).result
        rows = make()
        return lambda: rows

    def _drawable(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if logits.shape[1] == self.num_token_ids else logits[:, : self.num_token_ids]

    def _sample(
        self, plan: StepPlan, logits: torch.Tensor, found: Found, rows: list[SampleRow]
    ) -> StepResult:
        # Rows of logits, chunk after chunk: [its scored positions][its next token]
        sample_at, scored_at, row = [], [], 0
        for chunk in plan.chunks:
            scored_at.append(range(row, row + len(chunk.scored)))
            row += len(chunk.scored)
            if chunk.wants_sample:
                sample_at.append(row)
                row += 1
        token_ids, largest = found
        drawable = self._drawable(logits)
        if row > len(sample_at):
            drawable = drawable[sample_at]
            token_ids, largest = [token_ids[at] for at in sample_at], [largest[at] for at in sample_at]
        drawn = sampler.sample(drawable, rows, found=(token_ids, largest), draw=self.draw)
        removed = sampler.removed_probability(drawable, rows)
        outcomes = iter(zip(drawn, sample_at, rows, removed, strict=True))
        results = []
        for chunk, scored in zip(plan.chunks, scored_at, strict=True):
            known = self._score(chunk, logits[scored.start : scored.stop]) if scored else ()
            if not chunk.wants_sample:
                results.append(ChunkResult(scored=known))
                continue
            outcome, at, sample_row, removed_probability = next(outcomes)
            if isinstance(outcome, RadixrtError):
                results.append(ChunkResult(error=outcome))
            else:
                constraint = chunk.sequence.constraint
                closing = constraint.closing if constraint is not None else None
                results.append(
                    ChunkResult(
                        outcome,
                        self._logprob(chunk, logits, at, outcome),
                        self._logprob(chunk, logits, at, closing[0]) if closing else None,
                        known,
                        mask_s=None if sample_row.mask is None else sample_row.mask_s,
                        removed_probability=removed_probability,
                    )
                )
        return StepResult(tuple(results))

    def _score(self, chunk: Chunk, logits: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Give the logprobs of a chunk's known tokens."""
        sequence, sampling = chunk.sequence, chunk.sequence.sampling
        token_ids = [sequence.token_ids[position] for position in chunk.scored]
        num_top = [
            (sampling.prompt_logprobs if position < sequence.num_prompt_tokens else sampling.logprobs) or 0
            for position in chunk.scored
        ]
        return tuple(sampler.token_logprobs(logits, token_ids, num_top, num_token_ids=self.num_token_ids))

    def _logprob(self, chunk: Chunk, logits: torch.Tensor, row: int, token_id: int) -> TokenLogprob | None:
        num_top, wanted_ids = chunk.sequence.sampling.logprobs, chunk.sequence.sampling.logprob_token_ids
        if num_top is None:
            return None
        values, num_ids = logits[row], self.num_token_ids
        [found] = sampler.token_logprobs(values[None], [token_id], [num_top], num_token_ids=num_ids)
        if wanted_ids:
            others = values.log_softmax(dim=-1)[list(wanted_ids)].tolist()
            found = replace(found, top=(*found.top, *zip(wanted_ids, others, strict=True)))
        return found


def _masks_of(plan: StepPlan, rows: list[SampleRow]) -> list[Mask | None]:
    """Give masks for the rows of logits: chunk after chunk, its scored positions and its next token."""
    masks: list[Mask | None] = []
    sample_rows = iter(rows)
    for chunk in plan.chunks:
        masks += [None] * len(chunk.scored)
        if chunk.wants_sample:
            masks.append(next(sample_rows).mask)
    return masks


def _result_of(plan: StepPlan, drawn: list[int | RadixrtError], rows: list[SampleRow]) -> StepResult:
    """Give the result of a step of which nothing but tokens was wanted."""
    outcomes = iter(zip(drawn, rows, strict=True))
    results = []
    for chunk in plan.chunks:
        if not chunk.wants_sample:
            results.append(ChunkResult())
            continue
        outcome, row = next(outcomes)
        if isinstance(outcome, RadixrtError):
            results.append(ChunkResult(error=outcome))
        elif row.mask is None:
            results.append(sampled(outcome))
        else:
            results.append(ChunkResult(outcome, mask_s=row.mask_s))
    return StepResult(tuple(results))
