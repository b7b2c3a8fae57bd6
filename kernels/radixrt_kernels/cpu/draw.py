"""What the library is told of rows that a token is drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import Array, Structure, c_double, c_float, c_int64, c_void_p
from typing import TypeAlias

import torch

from radixrt_kernels.cpu.masks import Mask, mask_address

# Its logits [at least num_token_ids] float32; its mask or None; the largest allowed logit; temperature, top_k (0 = all),
# top_p, min_p; a number in [0, 1) at which the cumulated weights are inverted.
DrawRow: TypeAlias = tuple[torch.Tensor, Mask | None, float, float, int, float, float, float]


class CDraw(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("mask", c_void_p),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("uniform", c_double),
        ("top_k", c_int64),
        ("best", c_float),
    )


def draw_table(rows: Sequence[DrawRow], num_token_ids: int) -> Array[CDraw]:
    """Give the rows as the library reads them; tensors and masks must stay alive meanwhile.

    Raises:
        ValueError: a type or shape differs, a number is out of range.
    """
    return (CDraw * len(rows))(*(_draw(row, num_token_ids) for row in rows))


def _draw(row: DrawRow, num_token_ids: int) -> CDraw:
    logits, mask, best, temperature, top_k, top_p, min_p, uniform = row
    if logits.dtype != torch.float32 or logits.dim() != 1 or not logits.is_cpu or not logits.is_contiguous():
        raise ValueError(
            f"logits must be float32 in one row on the CPU, got {list(logits.shape)} {logits.dtype}"
        )
    if not 1 <= num_token_ids <= len(logits):
        raise ValueError(f"num_token_ids must be in [1, {len(logits)}], got {num_token_ids}")
    if not (math.isfinite(best) and temperature > 0 and top_k >= 0 and 0 <= uniform < 1):
        raise ValueError(
            "best must be finite, temperature > 0, top_k >= 0 and uniform in [0, 1), "
            f"got {best}, {temperature}, {top_k} and {uniform}"
        )
    address = None if mask is None else mask_address(mask, num_token_ids)
    kept = min(top_k, num_token_ids)
    return CDraw(logits.data_ptr(), address, temperature, top_p, min_p, uniform, kept, best)
