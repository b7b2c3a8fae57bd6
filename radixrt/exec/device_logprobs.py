"""Logprobs on the device, and the way of a step's results back to the host."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from radixrt.exec.batch import MASK_WORD_BITS
from radixrt.exec.device import Device, Event
from radixrt.exec.device_sampling import LateArrays, WantedLogprob
from radixrt.model.device_kernels import Sampled
from radixrt.types import TokenLogprob

MAX_LOGPROB_ROWS = 256  # at once: a row of float32 logprobs is half a megabyte for 128,256 tokens


@dataclass(frozen=True, slots=True)
class Returned:
    """What a step gave.

    Attributes:
        token_ids, best, drawn_logprobs: per draw, as Sampled says.
        logprobs: by WantedLogprob.key.
        removed: per measured draw, the share of probability that its mask took away.
    """

    token_ids: list[int]
    best: list[float]
    drawn_logprobs: list[float]
    logprobs: dict[tuple[int, int, bool], TokenLogprob]
    removed: dict[int, float]


@dataclass(frozen=True, slots=True)
class Readback:
    """Host tensors that the device is filling.

    Attributes:
        drawn: token ids, best and logprobs of the draws.
        blocks: per block of wanted logprobs, see _logprobs.
        removed: per measured draw.
        done: when all of them hold what they should.
    """

    drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    blocks: tuple[tuple[torch.Tensor, ...], ...]
    removed: torch.Tensor | None
    done: Event
    late: LateArrays

    def wait(self) -> Returned:
        """Wait for the device and give the values."""
        self.done.synchronize()
        token_ids, best, logprobs = ([], [], []) if self.drawn is None else (t.tolist() for t in self.drawn)
        removed = [] if self.removed is None else self.removed.tolist()
        found = {}
        for block, wanted_ones in zip(self.blocks, _blocks(self.late.logprobs), strict=True):
            for wanted, *values in zip(wanted_ones, *(tensor.tolist() for tensor in block), strict=True):
                found[wanted.key] = _token_logprob(wanted, *values)
        return Returned(token_ids, best, logprobs, found, dict(zip(self.late.measured, removed, strict=True)))


def _blocks(wanted: Seq[WantedLogprob]) -> Iterator[Seq[WantedLogprob]]:
    for start in range(0, len(wanted), MAX_LOGPROB_ROWS):
        yield wanted[start : start + MAX_LOGPROB_ROWS]


def _token_logprob(
    wanted: WantedLogprob,
    token_id: int,
    logprob: float,
    top_values: list[float],
    top_ids: list[int],
    named_values: list[float],
) -> TokenLogprob:
    top = zip(top_ids[: wanted.num_top], top_values[: wanted.num_top], strict=True)
    named = zip(wanted.named_ids, named_values, strict=False)  # padded to the longest list of names
    return TokenLogprob(token_id, logprob, (*top, *named))


def read_back(
    device: Device,
    logits: torch.Tensor,
    drawn: Sampled | None,
    late: LateArrays,
    tables: dict[str, torch.Tensor],
    *,
    num_token_ids: int,
) -> Readback:
    """Ask for a step's logprobs and for the copies of all results; nothing is waited for.

    Args:
        logits: [S, V], raw.
        tables: late.arrays on the device.
    """

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        buffer = device.host_buffer(tensor.numel() * tensor.element_size())
        return buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    blocks = []
    for index, wanted in enumerate(_blocks(late.logprobs)):
        part = slice(index * MAX_LOGPROB_ROWS, index * MAX_LOGPROB_ROWS + len(wanted))
        num_top = max(item.num_top for item in wanted)
        found = _logprobs(logits, drawn, tables, part, num_top=num_top, num_token_ids=num_token_ids)
        blocks.append(tuple(to_host(tensor) for tensor in found))
    return Readback(
        None if drawn is None else (to_host(drawn.token_ids), to_host(drawn.best), to_host(drawn.logprobs)),
        tuple(blocks),
        to_host(_removed(logits, tables, num_token_ids=num_token_ids)) if late.measured else None,
        device.record(),
        late,
    )


def _logprobs(
    logits: torch.Tensor,
    drawn: Sampled | None,
    tables: dict[str, torch.Tensor],
    part: slice,
    *,
    num_top: int,
    num_token_ids: int,
) -> tuple[torch.Tensor, ...]:
    """Give of some wanted logprobs: token ids [N], theirs [N], the likeliest [N, num_top] twice, named ones [N, any].

    Alternatives are below num_token_ids; a model's padding columns count in the sum only.
    """
    logprobs = logits[tables["logprob_rows"][part]].float().log_softmax(-1)
    token_ids = tables["logprob_ids"][part]
    if drawn is not None:
        draw = tables["logprob_draws"][part]
        token_ids = torch.where(draw >= 0, drawn.token_ids[draw.clamp(min=0)], token_ids)
    top = logprobs[:, :num_token_ids].topk(num_top, dim=-1)
    return (
        token_ids,
        logprobs.gather(1, token_ids[:, None]).squeeze(1),
        top.values,
        top.indices,
        logprobs.gather(1, tables["logprob_named"][part]),
    )


def _removed(logits: torch.Tensor, tables: dict[str, torch.Tensor], *, num_token_ids: int) -> torch.Tensor:
    """Give the share of probability that masks take away from the measured rows, [N]; see sampler.removed_probability."""
    probabilities = logits[tables["measured_rows"], :num_token_ids].float().softmax(-1)
    words = tables["mask"][tables["measured_masks"]]
    shifts = torch.arange(MASK_WORD_BITS, dtype=torch.int32, device=words.device)
    bits = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, :num_token_ids]
    return (1 - (probabilities * bits).sum(-1)).clamp(0, 1)
