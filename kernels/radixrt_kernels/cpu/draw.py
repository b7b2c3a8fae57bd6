"""What the library is told of rows that a token is drawn from."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from ctypes import Structure, c_double, c_float, c_int64, c_void_p
from typing import NamedTuple

import torch

from radixrt_kernels.cpu.masks import Mask, mask_address


class DrawRow(NamedTuple):
    """A token to draw, by the row's own numbers.

    Attributes:
        logits: [at least num_token_ids] float32, raw.
        mask: [ceil(num_token_ids / 32)] int32, 1 = allowed; None = all are.
        bias: what is added to logits. banned_ids: tokens that are not drawn.
        token_ids: [num_tokens] int32, the sequence so far; the first num_prompt_tokens are its prompt.
        repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0 for none.
        temperature: 0 = the likeliest. top_k: 0 = all. top_p, min_p: 1 and 0 for all.
        uniform: in [0, 1), where the cumulated weights are inverted.
    """

    logits: torch.Tensor
    mask: Mask | None
    bias: Mapping[int, float]
    banned_ids: Sequence[int]
    token_ids: array[int]
    num_prompt_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


class CDraw(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "mask", "bias_ids", "biases", "banned_ids", "token_ids")),
        *((name, c_int64) for name in ("num_biases", "num_banned", "num_tokens", "num_prompt")),
        *((name, c_int64) for name in ("top_k", "likeliest")),
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "uniform")),
        *((name, c_float) for name in ("repetition", "presence", "frequency", "largest")),
    )


class DrawTable:
    """Rows as the library reads them; keeps what they point to.

    Raises:
        ValueError: a type or shape differs, a number is out of range.
    """

    def __init__(self, rows: Sequence[DrawRow], num_token_ids: int) -> None:
        self._kept: list[object] = [rows]
        self.draws = (CDraw * len(rows))()
        for row, draw in zip(rows, self.draws, strict=True):
            _check(row, num_token_ids)
            draw.logits = row.logits.data_ptr()
            draw.mask = None if row.mask is None else mask_address(row.mask, num_token_ids)
            draw.num_biases, draw.bias_ids = self._keep(array("q", row.bias))
            _, draw.biases = self._keep(array("f", row.bias.values()))
            draw.num_banned, draw.banned_ids = self._keep(array("q", row.banned_ids))
            draw.num_tokens, draw.token_ids = self._keep(row.token_ids)
            draw.num_prompt = row.num_prompt_tokens
            draw.top_k = min(row.top_k, num_token_ids)
            draw.temperature, draw.top_p, draw.min_p = row.temperature, row.top_p, row.min_p
            draw.uniform = row.uniform
            draw.repetition, draw.presence = row.repetition_penalty, row.presence_penalty
            draw.frequency = row.frequency_penalty
            draw.likeliest = -1

    def _keep(self, values: array[int] | array[float]) -> tuple[int, int | None]:
        self._kept.append(values)
        address, count = values.buffer_info()
        return count, address if count else None


def _check(row: DrawRow, num_token_ids: int) -> None:
    logits = row.logits
    if logits.dtype != torch.float32 or logits.dim() != 1 or not logits.is_cpu or not logits.is_contiguous():
        raise ValueError(
            f"logits must be float32 in one row on the CPU, got {list(logits.shape)} {logits.dtype}"
        )
    if not 1 <= num_token_ids <= len(logits):
        raise ValueError(f"num_token_ids must be in [1, {len(logits)}], got {num_token_ids}")
    if row.token_ids.typecode != "i" or not 0 <= row.num_prompt_tokens <= len(row.token_ids):
        raise ValueError(
            f"token_ids must be 'i' and begin with {row.num_prompt_tokens} of the prompt, got "
            f"[{len(row.token_ids)}] {row.token_ids.typecode!r}"
        )
    if not (0 <= row.temperature < math.inf and row.top_k >= 0 and 0 <= row.uniform < 1):
        raise ValueError(
            "temperature must be finite and >= 0, top_k >= 0 and uniform in [0, 1), "
            f"got {row.temperature}, {row.top_k} and {row.uniform}"
        )
    if not (0 < row.top_p <= 1 and 0 <= row.min_p <= 1):
        raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1], got {row.top_p} and {row.min_p}")
