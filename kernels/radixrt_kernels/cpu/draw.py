"""What the library is told of rows that a token is drawn from."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from ctypes import c_char
from struct import Struct
from typing import NamedTuple

import torch

from radixrt_kernels.cpu.masks import Mask, mask_address


class DrawRow(NamedTuple):
    """A token to draw, by the row's own numbers.

    Attributes:
        at: which row of logits it is drawn from.
        mask: [ceil(num_token_ids / 32)] int32, 1 = allowed; None = all are.
        bias: what is added to logits. banned_ids: tokens that are not drawn.
        token_ids: [num_tokens] int32, the sequence so far; the first num_prompt_tokens are its prompt.
        repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0 for none.
        temperature: 0 = the likeliest. top_k: 0 = all. top_p, min_p: 1 and 0 for all.
        uniform: in [0, 1), where the cumulated weights are inverted.
        likeliest: the first of the largest logits after all but temperature, and its id first; None = to be found.
    """

    at: int
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
    likeliest: tuple[int, float] | None = None


# src/adjust.h, Draw: logits, mask, bias_ids, biases, banned_ids, token_ids | num_biases, num_banned, num_tokens, num_prompt,
# top_k, likeliest | temperature, top_p, min_p, uniform | repetition, presence, frequency, largest. One call writes it all:
# field by field it takes five times as long.
DRAW = Struct("=6q 6q 4d 4f")
UNKNOWN = (-1, 0.0)


class DrawTable:
    """Rows as the library reads them; keeps what they point to.

    Raises:
        ValueError: a type or shape differs, a number is out of range.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[DrawRow], *, num_token_ids: int) -> None:
        num_rows, first, row_bytes = *_check_logits(logits, num_token_ids), 4 * logits.stride(0)
        self._kept: list[object] = [logits, rows]
        packed = bytearray(DRAW.size * len(rows))
        for index, row in enumerate(rows):
            _check(row, num_rows, num_token_ids)
            likeliest, largest = row.likeliest or UNKNOWN
            num_biases, bias_ids, biases, num_banned, banned_ids = self._changes(row)
            token_ids, num_tokens = row.token_ids.buffer_info()
            DRAW.pack_into(
                packed,
                DRAW.size * index,
                first + row_bytes * row.at,
                0 if row.mask is None else mask_address(row.mask, num_token_ids),
                *(bias_ids, biases, banned_ids, token_ids),
                *(num_biases, num_banned, num_tokens, row.num_prompt_tokens),
                min(row.top_k, num_token_ids),
                likeliest,
                *(row.temperature, row.top_p, row.min_p, row.uniform),
                *(row.repetition_penalty, row.presence_penalty, row.frequency_penalty),
                largest,
            )
        self.draws = (c_char * len(packed)).from_buffer(packed)

    def _changes(self, row: DrawRow) -> tuple[int, int, int, int, int]:
        """Give number and addresses of biases, and of bans."""
        if not (row.bias or row.banned_ids):
            return 0, 0, 0, 0, 0
        bias_ids, biases, banned_ids = (
            array("q", row.bias),
            array("f", row.bias.values()),
            array("q", row.banned_ids),
        )
        self._kept += [bias_ids, biases, banned_ids]
        addresses = bias_ids.buffer_info()[0], biases.buffer_info()[0]
        return len(bias_ids), *addresses, len(banned_ids), banned_ids.buffer_info()[0]


def _check_logits(logits: torch.Tensor, num_token_ids: int) -> tuple[int, int]:
    """Give number of rows and address."""
    shape = logits.shape
    if logits.dtype != torch.float32 or len(shape) != 2 or not logits.is_cpu or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be rows of float32 on the CPU, got {list(shape)} {logits.dtype}, strides {logits.stride()}"
        )
    if not 1 <= num_token_ids <= shape[1]:
        raise ValueError(f"num_token_ids must be in [1, {shape[1]}], got {num_token_ids}")
    return shape[0], logits.data_ptr()


def _check(row: DrawRow, num_rows: int, num_token_ids: int) -> None:
    if not 0 <= row.at < num_rows:
        raise ValueError(f"at must be a row in [0, {num_rows}), got {row.at}")
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
    if row.likeliest is not None and not 0 <= row.likeliest[0] < num_token_ids:
        raise ValueError(f"likeliest must be a token in [0, {num_token_ids}), got {row.likeliest[0]}")
    if not (0 < row.top_p <= 1 and 0 <= row.min_p <= 1):
        raise ValueError(f"top_p must be in (0, 1] and min_p in [0, 1], got {row.top_p} and {row.min_p}")
