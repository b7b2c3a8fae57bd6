# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Attention of ragged new tokens over a paged cached prefix; layouts: kernels/README.md.

A tile is `block_rows` rows of one sequence and one kv head, row = new token x head of the group, so that the heads
of a group share each tile of keys. Sources: PagedAttention, arXiv:2309.06180; FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt_kernels.gpu.checks import (
    check_kv_layer,
    check_soft_cap,
    check_tensor,
    check_window,
    needs_upcast,
)
from radixrt_kernels.gpu.configs import ExtendConfig, extend_config
from radixrt_kernels.gpu.decode_plan import AnyInts, Ints
from radixrt_kernels.gpu.tiles import score_tile, softmax_update, token_offsets

TILE_FIELDS = 5  # where in the flat page table, first row of q, new tokens, context, first row of the tile


@triton.jit
def _extend_tiles(
    queries, kv, page_table, start, stop, context, position, kv_head, stride_page,
    scale, soft_cap, window, top, total, acc,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Take the keys [start, stop) into (top, total, acc); unmasked, they must all be visible to all rows."""
    dims = tl.arange(0, D)
    for first in range(start, stop, TOKENS):
        token = first + tl.arange(0, TOKENS)
        if IS_MASKED:
            is_token = token < context
        else:
            is_token = token >= 0
        at = token_offsets(page_table, token, is_token, stride_page, PAGE, G * D) + kv_head * D
        pointers = kv + at[:, None] + dims[None, :]
        if IS_MASKED:
            keys = tl.load(pointers, mask=is_token[:, None], other=0.0)
        else:
            keys = tl.load(pointers)
        if UPCAST:
            keys = keys.to(tl.float32)
        scores = score_tile(queries, keys, scale, soft_cap, HAS_CAP)
        if IS_MASKED:
            is_visible = token[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_visible = is_visible & (token[None, :] > position[:, None] - window)
            scores = tl.where(is_visible, scores, float("-inf"))
            values = tl.load(pointers + PAGE * G * D, mask=is_token[:, None], other=0.0)
        else:
            values = tl.load(pointers + PAGE * G * D)
        if UPCAST:
            values = values.to(tl.float32)
        top, total, acc = softmax_update(scores, values, top, total, acc, HAS_WINDOW)
    return top, total, acc


@triton.jit
def extend_kernel(
    q, kv, out, page_table, tiles, stride_page, scale, soft_cap, window,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program per (tile, kv head)."""
    R: tl.constexpr = H // G
    tile = tiles + tl.program_id(0) * 5
    num_new = tl.load(tile + 2)
    if num_new == 0:  # padding
        return
    table = page_table + tl.load(tile)
    q_start = tl.load(tile + 1)
    context = tl.load(tile + 3)
    first_row = tl.load(tile + 4)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, D)
    # rows of a sequence:  token 0 x R heads | token 1 x R heads | ...
    row = first_row + tl.arange(0, ROWS)
    token = row // R
    is_row = token < num_new
    offsets = ((q_start + token).to(tl.int64) * H + kv_head * R + row % R)[:, None] * D + dims[None, :]
    queries = tl.load(q + offsets, mask=is_row[:, None], other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    # positions:  [0, context - num_new) cached | new: the first and the last token of this tile bound what it sees
    cached = context - num_new
    position = cached + token
    first_position = cached + first_row // R
    last_position = cached + tl.minimum((first_row + ROWS - 1) // R, num_new - 1)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    if HAS_WINDOW:
        start = tl.maximum(first_position + 1 - window, 0) // TOKENS * TOKENS
    else:
        start = 0
        masked_from = (first_position + 1) // TOKENS * TOKENS
        top, total, acc = _extend_tiles(
            queries, kv, table, start, masked_from, context, position, kv_head, stride_page,
            scale, soft_cap, window, top, total, acc,
            G, D, PAGE, TOKENS, False, False, HAS_CAP, UPCAST,
        )  # fmt: skip
        start = masked_from
    top, total, acc = _extend_tiles(
        queries, kv, table, start, last_position + 1, context, position, kv_head, stride_page,
        scale, soft_cap, window, top, total, acc,
        G, D, PAGE, TOKENS, True, HAS_WINDOW, HAS_CAP, UPCAST,
    )  # fmt: skip
    result = acc / tl.where(is_row, total, 1.0)[:, None]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_row[:, None])


@dataclass(frozen=True, slots=True)
class DeviceExtendPlan:
    """The tiles of one step on the device.

    Attributes:
        tiles: [I, 5] int32; a tile of 0 new tokens does nothing.
        sliding_window: a token sees this many positions, itself included; None = all.
    """

    tiles: torch.Tensor
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """The tiles of one step on the host; fields as in DeviceExtendPlan."""

    tiles: Ints
    sliding_window: int | None

    def to_device(self, device: torch.device) -> DeviceExtendPlan:
        """Copy the tiles to a device."""
        return DeviceExtendPlan(torch.from_numpy(self.tiles).to(device), self.sliding_window)


def plan_extend(
    *,
    q_start: AnyInts,
    num_new: AnyInts,
    contexts: AnyInts,
    sequences: AnyInts,
    num_columns: int,
    num_group_heads: int,
    config: ExtendConfig,
    sliding_window: int | None = None,
) -> ExtendPlan:
    """Cut sequences with new tokens into tiles. Pure.

    Args:
        q_start, num_new, contexts: per sequence its first row of q, new tokens (at least 1), and context (cached
            and new).
        sequences: their rows of the page table.
        num_columns: P, columns of the page table.
    Raises:
        ValueError: a sequence has no new token, or more of them than context.
    """
    check_window(sliding_window)
    news, context = np.asarray(num_new, np.int64), np.asarray(contexts, np.int64)
    if len(news) and not (news.min() >= 1 and (news <= context).all()):
        raise ValueError(f"num_new must be from 1 to the context {contexts}, got {num_new}")
    num_tiles = -(-news * num_group_heads // config.block_rows)
    of = np.repeat(np.arange(len(news)), num_tiles)
    index = np.arange(len(of)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first_row = index * config.block_rows
    where = np.asarray(sequences, np.int64) * num_columns
    start = np.asarray(q_start, np.int64)
    tiles = np.stack([where[of], start[of], news[of], context[of], first_row], 1)
    # The longest first: a tile's work grows with the last position it sees.
    reach = context[of] - news[of] + first_row // num_group_heads
    tiles = tiles[np.argsort(-reach, kind="stable")].astype(np.int32)
    return ExtendPlan(tiles, sliding_window)


def extend(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    page_table: torch.Tensor,
    plan: DeviceExtendPlan,
    scale: float,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    config: ExtendConfig | None = None,
) -> torch.Tensor:
    """Attend from new tokens to their sequences' pages, causally.

    Args:
        q: [T, H, D]; rows that the plan does not name are left alone.
        kv_layer: [num_pages, 2, page_size, G, D]; the new tokens' keys and values are already in it.
        page_table: [B, P] int32, the one that was planned.
        plan: made by plan_extend for this page table and config.
        out: [T, H, D], where to write; a new tensor when None.
        config: the one that was planned with; the production entry when None.
    Returns: [T, H, D], dtype of q. Rows that the plan does not name keep what `out` held.
    Raises:
        ValueError: shape, dtype or device differs (names the argument, expected, got).
    Cost: one launch; 4 * H * D operations per visible pair of positions.
    """
    check_kv_layer(kv_layer, q)
    check_soft_cap(soft_cap)
    num_heads, head_dim = q.shape[1:]
    page_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    if config is None:
        config = extend_config(q.dtype, head_dim, num_heads // num_kv_heads, page_size)
    int32 = (torch.int32,)
    check_tensor("page_table", page_table, shape=(None, None), dtypes=int32, device=q.device)
    check_tensor("plan.tiles", plan.tiles, shape=(None, TILE_FIELDS), dtypes=int32, device=q.device)
    if out is None:
        out = torch.empty_like(q)
    check_tensor("out", out, shape=tuple(q.shape), dtypes=(q.dtype,), device=q.device)
    if not len(plan.tiles):
        return out
    extend_kernel[(len(plan.tiles), num_kv_heads)](
        q, kv_layer, out, page_table, plan.tiles, kv_layer.stride(0), scale,
        1.0 if soft_cap is None else soft_cap, plan.sliding_window or 0,
        H=num_heads, G=num_kv_heads, D=head_dim, PAGE=page_size,
        ROWS=config.block_rows, TOKENS=config.block_tokens,
        HAS_WINDOW=plan.sliding_window is not None, HAS_CAP=soft_cap is not None,
        UPCAST=needs_upcast(q.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
