# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Paged decode, split-KV decode and shared-prefix decode in one kernel; layouts: kernels/README.md.

A work item is a segment of pages times the rows of q that read it; decode_plan.py cuts a batch into items. Items
leave partial results, which a second small kernel merges by their log-sum-exp; a row with one item is written at once.

Sources of the ideas: FlashDecoding (split-KV); Hydragen, arXiv:2402.05099, DeFT, arXiv:2404.00242 and FastTree,
MLSys 2025 (decoding over a tree of segments).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt_kernels.gpu.checks import check_kv_layer, check_soft_cap, check_tensor, needs_upcast
from radixrt_kernels.gpu.configs import DecodeConfig, decode_config
from radixrt_kernels.gpu.decode_plan import ITEM_FIELDS, MEMBER_FIELDS, MERGE_FIELDS, DeviceDecodePlan
from radixrt_kernels.gpu.tiles import score_tile, softmax_update, token_offsets

MERGE_PARTS = 16
MERGE_WARPS = 2


@triton.jit
def _attend_item(
    q, kv, out, partial, partial_lse, page_table, members, num_tokens, num_members, first_position,
    kv_head, stride_page, scale, soft_cap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = H // G
    dims = tl.arange(0, D)
    # rows of the tile:  member 0 x R heads | member 1 x R heads | ... | unused
    row = tl.arange(0, ROWS)
    head = kv_head * R + row % R
    is_row = row // R < num_members
    member = members + (row // R) * 3
    q_row = tl.load(member, mask=is_row, other=0).to(tl.int64)
    slot = tl.load(member + 1, mask=is_row, other=-1)
    offsets = (q_row * H + head)[:, None] * D + dims[None, :]
    queries = tl.load(q + offsets, mask=is_row[:, None], other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    if HAS_WINDOW:
        first_visible = tl.load(member + 2, mask=is_row, other=0) - first_position
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, num_tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)
        is_token = token < num_tokens
        at = token_offsets(page_table, token, is_token, stride_page, PAGE, G * D) + kv_head * D
        pointers = kv + at[:, None] + dims[None, :]
        keys = tl.load(pointers, mask=is_token[:, None], other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
        scores = score_tile(queries, keys, scale, soft_cap, HAS_CAP)
        is_visible = is_token[None, :]
        if HAS_WINDOW:
            is_visible = is_visible & (token[None, :] >= first_visible[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
        values = tl.load(pointers + PAGE * G * D, mask=is_token[:, None], other=0.0)
        if UPCAST:
            values = values.to(tl.float32)
        top, total, acc = softmax_update(scores, values, top, total, acc, HAS_WINDOW)
    result = acc / tl.where(is_row, total, 1.0)[:, None]
    is_whole = is_row & (slot < 0)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_whole[:, None])
    is_part = is_row & (slot >= 0)
    part = slot.to(tl.int64) * H + head
    tl.store(partial + part[:, None] * D + dims[None, :], result, mask=is_part[:, None])
    tl.store(partial_lse + part, top + tl.log2(total), mask=is_part)


@triton.jit
def tree_decode_kernel(
    q, kv, out, partial, partial_lse, page_table, items, members, stride_page, scale, soft_cap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    NARROW: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program per (item, kv head). Items have five fields: see decode_plan.py."""
    item = items + tl.program_id(0) * 5
    num_tokens = tl.load(item + 1)
    if num_tokens == 0:  # padding of a captured graph
        return
    table = page_table + tl.load(item)
    first_position = tl.load(item + 2)
    first_member = members + tl.load(item + 3) * 3
    num_members = tl.load(item + 4)
    kv_head = tl.program_id(1)
    if num_members * (H // G) <= NARROW:
        _attend_item(
            q, kv, out, partial, partial_lse, table, first_member, num_tokens, num_members, first_position,
            kv_head, stride_page, scale, soft_cap,
            H, G, D, PAGE, NARROW, TOKENS, HAS_WINDOW, HAS_CAP, UPCAST,
        )  # fmt: skip
    else:
        _attend_item(
            q, kv, out, partial, partial_lse, table, first_member, num_tokens, num_members, first_position,
            kv_head, stride_page, scale, soft_cap,
            H, G, D, PAGE, WIDE, TOKENS, HAS_WINDOW, HAS_CAP, UPCAST,
        )  # fmt: skip


@triton.jit
def merge_parts_kernel(
    partial, partial_lse, out, merges,
    H: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program per (row with parts, head): weigh the parts by their log-sum-exp."""
    merge = merges + tl.program_id(0) * 3
    head = tl.program_id(1)
    row = tl.load(merge)
    first = tl.load(merge + 1)
    stop = tl.load(merge + 2)
    if first == stop:  # padding of a captured graph
        return
    dims = tl.arange(0, D)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for start in range(first, stop, PARTS):
        slot = start + tl.arange(0, PARTS)
        is_part = slot < stop
        part = slot.to(tl.int64) * H + head
        lse = tl.load(partial_lse + part, mask=is_part, other=float("-inf"))
        values = tl.load(partial + part[:, None] * D + dims[None, :], mask=is_part[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * values, 0)
        top = new_top
    tl.store(out + (row.to(tl.int64) * H + head) * D + dims, (acc / total).to(out.dtype.element_ty))


def tree_decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    page_table: torch.Tensor,
    plan: DeviceDecodePlan,
    scale: float,
    soft_cap: float | None = None,
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Attend from one new token per sequence to its pages.

    Args:
        q: [T, H, D]; rows that the plan does not name are left alone.
        kv_layer: [num_pages, 2, page_size, G, D]; the new tokens' keys and values are already in it.
        page_table: [B, P] int32, the one that was planned.
        plan: made by decode_plan.plan_decode for this page table, page size and config.
        out: [T, H, D], where to write; a new tensor when None.
        config: the one that was planned with; the production entry when None.
    Returns: [T, H, D], dtype of q. Rows that the plan does not name keep what `out` held.
    Raises:
        ValueError: shape, dtype or device differs (names the argument, expected, got).
    Cost: two launches; reads each item's keys and values once per `wide_rows` rows.
    """
    check_kv_layer(kv_layer, q)
    check_soft_cap(soft_cap)
    num_heads, head_dim = q.shape[1:]
    page_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    if config is None:
        config = decode_config(q.dtype, head_dim, num_heads // num_kv_heads, page_size)
    int32 = (torch.int32,)
    check_tensor("page_table", page_table, shape=(None, None), dtypes=int32, device=q.device)
    check_tensor("plan.items", plan.items, shape=(None, ITEM_FIELDS), dtypes=int32, device=q.device)
    check_tensor("plan.members", plan.members, shape=(None, MEMBER_FIELDS), dtypes=int32, device=q.device)
    check_tensor("plan.merges", plan.merges, shape=(None, MERGE_FIELDS), dtypes=int32, device=q.device)
    if out is None:
        out = torch.empty_like(q)
    check_tensor("out", out, shape=tuple(q.shape), dtypes=(q.dtype,), device=q.device)
    partial = torch.empty((plan.num_slots, num_heads, head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((plan.num_slots, num_heads), dtype=torch.float32, device=q.device)
    if not len(plan.items):
        return out
    tree_decode_kernel[(len(plan.items), num_kv_heads)](
        q, kv_layer, out, partial, partial_lse, page_table, plan.items, plan.members,
        kv_layer.stride(0), scale, 1.0 if soft_cap is None else soft_cap,
        H=num_heads, G=num_kv_heads, D=head_dim, PAGE=page_size,
        NARROW=config.narrow_rows, WIDE=config.wide_rows, TOKENS=config.block_tokens,
        HAS_WINDOW=plan.has_window, HAS_CAP=soft_cap is not None, UPCAST=needs_upcast(q.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if len(plan.merges):
        merge_parts_kernel[(len(plan.merges), num_heads)](
            partial, partial_lse, out, plan.merges,
            H=num_heads, D=head_dim, PARTS=MERGE_PARTS, num_warps=MERGE_WARPS,
        )  # fmt: skip
    return out
