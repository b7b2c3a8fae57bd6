# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels over the rows of activations: residual add with RMSNorm, and SwiGLU's product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt_kernels.gpu.checks import FLOAT_DTYPES, check_tensor

MAX_ROW = 32768
SILU_BLOCK = 1024


@triton.jit
def add_norm_kernel(
    x, residual, weight, out, num_columns, epsilon,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One program per row, which stays in registers between the sum of squares and the product."""
    start = tl.program_id(0).to(tl.int64) * num_columns
    column = tl.arange(0, BLOCK)
    is_column = column < num_columns
    hidden = tl.load(x + start + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        hidden += tl.load(residual + start + column, mask=is_column, other=0.0).to(tl.float32)
        rounded = hidden.to(x.dtype.element_ty)
        tl.store(residual + start + column, rounded, mask=is_column)
        hidden = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(hidden * hidden, 0) / num_columns + epsilon)
    weights = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    normed = (hidden * factor * weights).to(out.dtype.element_ty)
    tl.store(out + start + column, normed, mask=is_column)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, *, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add x to the residual stream and give its RMSNorm times weight. Arguments, result: see reference.

    Raises:
        ValueError: shape, dtype or device differs (names the argument, expected, got).
    Changes: residual becomes residual + x.
    Cost: one launch; reads x and residual once, writes residual and the result once.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOAT_DTYPES)
    num_rows, num_columns = x.shape
    if not 1 <= num_columns <= MAX_ROW:
        raise ValueError(f"x must have from 1 to {MAX_ROW} columns, got {num_columns}")
    dtypes, device = (x.dtype,), x.device
    if residual is not None:
        check_tensor("residual", residual, shape=(num_rows, num_columns), dtypes=dtypes, device=device)
    check_tensor("weight", weight, shape=(num_columns,), dtypes=dtypes, device=device)
    out = torch.empty_like(x)
    if num_rows:
        block = triton.next_power_of_2(num_columns)
        add_norm_kernel[(num_rows,)](
            x, x if residual is None else residual, weight, out, num_columns, epsilon,
            BLOCK=block, HAS_RESIDUAL=residual is not None, num_warps=norm_warps(block),
        )  # fmt: skip
    return out


def norm_warps(block: int) -> int:
    """Give the warps of a row: about 16 elements per thread, at most 16 warps. Pure."""
    return min(max(block // 512, 1), 16)


@triton.jit
def silu_mul_kernel(gate_up, out, num_columns, BLOCK: tl.constexpr):
    """One program per (row, BLOCK columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    at = gate_up + row * 2 * num_columns + column
    gates = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
    ups = tl.load(at + num_columns, mask=is_column, other=0.0).to(tl.float32)
    product = (gates * tl.sigmoid(gates) * ups).to(out.dtype.element_ty)
    tl.store(out + row * num_columns + column, product, mask=is_column)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Give silu(gates) * ups for [T, 2 I], gates first; [T, I]. Pure.

    Raises:
        ValueError: shape, dtype or device differs (names the argument, expected, got).
    Cost: one launch; reads gate_up once, writes the result once.
    """
    check_tensor("gate_up", gate_up, shape=(None, None), dtypes=FLOAT_DTYPES)
    num_rows, num_both = gate_up.shape
    if num_both % 2 or not num_both:
        raise ValueError(f"gate_up must have an even number of columns, got {num_both}")
    num_columns = num_both // 2
    out = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        silu_mul_kernel[(num_rows, triton.cdiv(num_columns, SILU_BLOCK))](
            gate_up, out, num_columns, BLOCK=SILU_BLOCK, num_warps=4
        )
    return out
