# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""From the projection to attention in one launch: norm and rotation of queries and keys, write of keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt_kernels.gpu.checks import FLOAT_DTYPES, check_page_size, check_tensor

BLOCK_HEADS = 16


@triton.jit
def rope_write_kernel(
    qkv, q_out, kv, slots, positions, rotation, qk_norm, stride_token, stride_page, epsilon,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One program per (token, HEADS heads). A head is loaded as its two halves, which turn into each other."""
    token = tl.program_id(0).to(tl.int64)
    # heads of a token:  [0, H) queries | [H, H + G) keys | [H + G, H + 2 G) values
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = (head < H + 2 * G)[:, None]
    is_rotated = (head < H + G)[:, None]
    half = tl.arange(0, D // 2)
    at = qkv + token * stride_token + head[:, None] * D + half[None, :]
    low = tl.load(at, mask=is_head, other=0.0).to(tl.float32)
    high = tl.load(at + D // 2, mask=is_head, other=0.0).to(tl.float32)
    angle = rotation + tl.load(positions + token) * D + half
    cosine = tl.load(angle)[None, :]
    sine = tl.load(angle + D // 2)[None, :]
    normed_low, normed_high = low, high
    if HAS_NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        factor = tl.rsqrt(squares / D + epsilon)[:, None]
        weight = qk_norm + head[:, None] * D + half[None, :]
        normed_low = low * factor * tl.load(weight, mask=is_rotated, other=0.0).to(tl.float32)
        normed_high = high * factor * tl.load(weight + D // 2, mask=is_rotated, other=0.0).to(tl.float32)
    out_type = q_out.dtype.element_ty
    turned_low = tl.where(is_rotated, normed_low * cosine - normed_high * sine, low).to(out_type)
    turned_high = tl.where(is_rotated, normed_high * cosine + normed_low * sine, high).to(out_type)
    is_query = (head < H)[:, None]
    query = q_out + (token * H + head)[:, None] * D + half[None, :]
    tl.store(query, turned_low, mask=is_query)
    tl.store(query + D // 2, turned_high, mask=is_query)
    slot = tl.load(slots + token).to(tl.int64)
    is_written = is_head & (head >= H)[:, None]
    kv_head = head - H
    # one page of a layer:  keys [PAGE, G, D] | values [PAGE, G, D]
    inside = tl.where(kv_head < G, kv_head, kv_head - G + PAGE * G) + (slot % PAGE) * G
    written = kv + (slot // PAGE) * stride_page + inside[:, None] * D + half[None, :]
    tl.store(written, turned_low, mask=is_written)
    tl.store(written + D // 2, turned_high, mask=is_written)


def rope_warps(head_dim: int) -> int:
    """Give the warps of a program: 8 elements of each half, 128 bits, per thread. Pure."""
    return max(BLOCK_HEADS * head_dim // 512, 1)


def rope_write(
    qkv: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rotation: torch.Tensor,
    qk_norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Norm and turn queries and keys, write keys and values into their slots. Arguments, result: see reference.

    Raises:
        ValueError: shape, dtype or device differs (names the argument, expected, got).
    Changes: kv_layer at `slots`, nothing else.
    Cost: one launch; reads qkv once, writes it once.
    """
    check_tensor("qkv", qkv, shape=(None, None, None), dtypes=FLOAT_DTYPES, is_contiguous=False)
    num_tokens, num_all_heads, head_dim = qkv.shape
    shape, dtypes, device = (None, 2, None, None, head_dim), (qkv.dtype,), qkv.device
    check_tensor("kv_layer", kv_layer, shape=shape, dtypes=dtypes, device=device, is_contiguous=False)
    page_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    check_page_size(page_size)
    num_heads = num_all_heads - 2 * num_kv_heads
    if num_heads < num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(f"qkv must have a multiple of {num_kv_heads} query heads, got {num_heads}")
    if head_dim < 2 or head_dim & (head_dim - 1):
        raise ValueError(f"qkv must have a head dimension that is a power of two, got {head_dim}")
    for name, tensor in (("slots", slots), ("positions", positions)):
        check_tensor(name, tensor, shape=(num_tokens,), dtypes=(torch.int64,), device=device)
    check_tensor("rotation", rotation, shape=(None, head_dim), dtypes=(torch.float32,), device=device)
    if qk_norm is not None:
        norm_shape = (num_heads + num_kv_heads, head_dim)
        check_tensor("qk_norm", qk_norm, shape=norm_shape, dtypes=dtypes, device=device)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=device)
    if num_tokens:
        rope_write_kernel[(num_tokens, triton.cdiv(num_all_heads, BLOCK_HEADS))](
            qkv, q, kv_layer, slots, positions, rotation, q if qk_norm is None else qk_norm,
            qkv.stride(0), kv_layer.stride(0), epsilon,
            H=num_heads, G=num_kv_heads, D=head_dim, PAGE=page_size,
            HEADS=BLOCK_HEADS, HAS_NORM=qk_norm is not None, num_warps=rope_warps(head_dim),
        )  # fmt: skip
    return q
