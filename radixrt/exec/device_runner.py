"""DeviceRunner: carries out plans on a GPU, which works while the host is ahead or behind.

    launch    copies of pages, the forward pass: asked for, not waited for
    sample    masks and other tables, drawing, logprobs: asked for, once the step before is committed
    collect   wait for what sample asked for

With overlap, launch of step k + 1 comes before collect of step k: its tokens are read on the device from step k's draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from radixrt.errors import RadixrtError
from radixrt.exec.batch import SampleRow, build_sample_row
from radixrt.exec.device import Device
from radixrt.exec.device_logprobs import Readback, read_back
from radixrt.exec.device_sampling import (
    INPUT_FIELDS,
    TABLE_FIELDS,
    DrawNumbers,
    WantedLogprob,
    late_arrays,
    padding_arrays,
)
from radixrt.exec.device_step import (
    HostStep,
    PageTables,
    attention_arrays,
    build_step,
    device_inputs,
    join_tokens,
)
from radixrt.exec.graphs import DecodeGraphs
from radixrt.exec.sampler import verdict
from radixrt.exec.staging import Staging
from radixrt.kv.store import KVStore
from radixrt.model.device_decoder import DeviceDecoder, DeviceInputs
from radixrt.model.device_kernels import (
    PLAN_FIELDS,
    AttentionPlanner,
    BatchPlan,
    ExtendPlan,
    Sampled,
    SampleInputs,
)
from radixrt.sched.plan import ChunkResult, StepPlan, StepResult, sampled
from radixrt.sched.sequence import Sequence
from radixrt.types import TokenLogprob


@dataclass(slots=True)
class DeviceStep:
    """A step on its way.

    Attributes:
        host: its arrays.
        views: those on the device that copies and draws read.
        logits: [S or more, V].
        plan: what of it still counts; rows, readback: its draws. Set by `sample`.
    """

    host: HostStep
    views: dict[str, torch.Tensor]
    logits: torch.Tensor
    plan: StepPlan | None = None
    rows: tuple[SampleRow | None, ...] = ()
    readback: Readback | None = None


class DeviceRunner:
    """Own the model, the KV store, the graphs and the buffers between host and device.

    Args:
        num_token_ids: ids that the tokenizer can decode; a model's padding columns after them are never drawn.
        max_rows: most sequences of a step; graphs are captured up to so many.
        max_context: longest sequence.
    """

    can_overlap = True

    def __init__(
        self,
        model: DeviceDecoder,
        store: KVStore,
        device: Device,
        *,
        num_token_ids: int,
        max_rows: int,
        max_context: int,
    ) -> None:
        self.model = model
        self.store = store
        self.num_token_ids = num_token_ids
        self._device = device
        self._planner = AttentionPlanner(model.spec, store.layout.page_size, model.dtype)
        self._tables, self._numbers = PageTables(), DrawNumbers()
        # The last step's tokens stay at one place, where graphs and eager steps read them.
        self._sampled = torch.zeros(max_rows, dtype=torch.int64, device=device.torch_device)
        self._sampled_rows: dict[Sequence, int] = {}
        # Of the last step; without a mask they stay the same.
        self._plain_rows: dict[Sequence, SampleRow] = {}
        self._eager, self._late = Staging(device), Staging(device)
        # What most steps send late.
        self._nothing_late = late_arrays((), (), (), (), num_token_ids=num_token_ids)
        self._no_tables = Staging(device).send(self._nothing_late.arrays)
        with torch.inference_mode():
            self.graphs = DecodeGraphs(
                device,
                self._planner,
                self._forward,
                sampled=self._sampled,
                max_rows=max_rows,
                max_context=max_context,
            )
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Ask once for what graphs do not hold, so that no request waits while kernels are compiled.

        Changes: page 0, which nobody reads.
        """
        tiles = np.zeros((1, PLAN_FIELDS["tiles"]), np.int32)  # no new token: it returns at once
        for window in {None, *self._planner.windows}:
            plans = [BatchPlan(None, ExtendPlan(tiles, window)) for _ in self._planner.windows]
            views = self._eager.send(
                {
                    **{
                        name: np.zeros(2, np.int64)
                        for name in ("token_ids", "positions", "slots", "sample_rows")
                    },
                    "copies": np.zeros((1, 2), np.int32),
                    **padding_arrays(2),
                    **attention_arrays(plans),
                    "page_table": np.zeros((1, 1), np.int32),
                }
            )
            self._copy_pages(views)
            logits = self._forward(device_inputs(views, plans, token_ids=views["token_ids"]))
            self._draw(logits, views, self._no_tables)

    def close(self) -> None:
        """Nothing to end: the device finishes what it was asked for."""

    def _forward(self, inputs: DeviceInputs) -> torch.Tensor:
        return self.model.forward(inputs, self.store)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DeviceStep:
        """Ask for a plan's copies and its forward pass. Changes: the store, in the device's order."""
        step = build_step(
            plan,
            self._planner,
            tables=self._tables,
            numbers=self._numbers,
            sampled_rows=self._sampled_rows,
        )
        captured = self.graphs.find(step)
        if captured is not None:
            views = self.graphs.copy(captured, step)
            self._copy_pages(views)
            captured.graph.replay()
            return DeviceStep(step, views, captured.graph.output)
        views = self._eager.send(step.arrays)
        self._copy_pages(views)
        token_ids = join_tokens(views, self._sampled) if step.has_unseen_tokens else views["token_ids"]
        logits = self._forward(device_inputs(views, step.attention, token_ids=token_ids))
        return DeviceStep(step, views, logits)

    def _copy_pages(self, views: dict[str, torch.Tensor]) -> None:
        if len(views["copies"]):
            self.model.kernels.copy_listed_pages(self.store.data, self.store.data, views["copies"])

    @torch.inference_mode()
    def sample(self, step: DeviceStep, plan: StepPlan) -> None:
        """Ask for the draws and logprobs of a step.

        Args:
            plan: what of the step counts now that the one before is committed; chunk for chunk the plan launched.
        """
        host = step.host
        step.plan = plan
        step.rows = tuple(
            self._sample_row(chunk.sequence) if chunk.wants_sample else None
            for chunk, draw in zip(plan.chunks, host.draw_of_chunk, strict=True)
            if draw is not None
        )
        self._plain_rows = {row.sequence: row for row in step.rows if row is not None and row.mask is None}
        late, tables, logprobs = self._nothing_late, self._no_tables, tuple(_wanted_logprobs(host, plan))
        if logprobs or host.needs_tables:
            num_ids = self.num_token_ids
            late = late_arrays(host.draws, step.rows, host.draw_rows, logprobs, num_token_ids=num_ids)
            tables = self._late.send(late.arrays)
        logits = step.logits[: host.num_logit_rows]
        drawn = None
        if host.draws:
            is_all = len(host.draws) == host.num_logit_rows
            drawn = self._draw(logits if is_all else logits[step.views["draw_rows"]], step.views, tables)
            self._sampled[: len(host.draws)].copy_(drawn.token_ids)
        self._sampled_rows = {chunk.sequence: row for row, chunk in enumerate(host.draws)}
        step.readback = read_back(self._device, logits, drawn, late, tables, num_token_ids=self.num_token_ids)

    def _sample_row(self, sequence: Sequence) -> SampleRow:
        """Say what the host must know of a draw: its mask, if there is one; the device has the rest."""
        if sequence.constraint is None:
            return self._plain_rows.get(sequence) or SampleRow(sequence, 0.0, None, ())
        return build_sample_row(sequence, self.num_token_ids)

    def _draw(
        self, logits: torch.Tensor, views: dict[str, torch.Tensor], tables: dict[str, torch.Tensor]
    ) -> Sampled:
        inputs = SampleInputs(
            **{name: views[name] for name in INPUT_FIELDS}, **{name: tables[name] for name in TABLE_FIELDS}
        )
        return self.model.kernels.sample(logits, inputs, num_token_ids=self.num_token_ids)

    def collect(self, step: DeviceStep) -> StepResult:
        """Wait for a sampled step and give its result."""
        assert step.plan is not None
        assert step.readback is not None
        found = step.readback.wait()
        results = []
        for index, (chunk, draw) in enumerate(zip(step.plan.chunks, step.host.draw_of_chunk, strict=True)):
            scored = tuple([found.logprobs[index, position, False] for position in chunk.scored])
            if not chunk.wants_sample:
                results.append(ChunkResult(scored=scored))
                continue
            assert draw is not None
            row = step.rows[draw]
            assert row is not None
            outcome = verdict(found.token_ids[draw], found.best[draw], row)
            if isinstance(outcome, RadixrtError):
                results.append(ChunkResult(error=outcome))
                continue
            if row.mask is None and row.sampling.logprobs is None and not scored:
                results.append(sampled(outcome))
                continue
            logprob = found.logprobs.get((index, chunk.stop, False))
            if logprob is None and row.sampling.logprobs is not None:
                logprob = TokenLogprob(outcome, found.drawn_logprobs[draw])
            results.append(
                ChunkResult(
                    outcome,
                    logprob,
                    found.logprobs.get((index, chunk.stop, True)),
                    scored,
                    mask_s=None if row.mask is None else row.mask_s,
                    removed_probability=found.removed.get(draw),
                )
            )
        return StepResult(tuple(results))


def _wanted_logprobs(host: HostStep, plan: StepPlan) -> Iterator[WantedLogprob]:
    """Give what the draw itself does not tell: of known tokens, alternatives, and what may take a token's place."""
    first_row = 0
    for index, (chunk, positions) in enumerate(zip(plan.chunks, host.wanted, strict=True)):
        sequence, sampling = chunk.sequence, chunk.sequence.sampling
        for position in chunk.scored:
            num_top = sampling.prompt_logprobs if position < sequence.num_prompt_tokens else sampling.logprobs
            row = first_row + positions.index(position)
            yield WantedLogprob((index, position, False), row, sequence.token_ids[position], num_top or 0)
        first_row += len(positions)
        if chunk.wants_sample and sampling.logprobs is not None:
            row, num_top, named_ids = first_row - 1, sampling.logprobs, sampling.logprob_token_ids
            draw = host.draw_of_chunk[index]
            assert draw is not None
            if num_top or named_ids:
                yield WantedLogprob((index, chunk.stop, False), row, None, num_top, draw, named_ids)
            closing = sequence.constraint.closing if sequence.constraint is not None else None
            if closing:
                key = (index, chunk.stop, True)
                yield WantedLogprob(key, row, closing[0], num_top, named_ids=named_ids)
