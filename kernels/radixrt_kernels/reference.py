"""Paged attention and the kernels around it in plain torch. Defines what is correct; layouts: kernels/README.md.

Sequences with the same number of new tokens and about as many pages form a group; a group is one gather and one
scaled_dot_product_attention. Source of the idea of paged keys and values: PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Up to this many new tokens, the R query heads of a kv head become R rows of one small matrix product. Measured on
# one core (H=9, G=3, D=64, 32 sequences of 1024): 11.3 ms against 14.5 ms with enable_gqa in float32, 12.8 against
# 39.0 ms in bfloat16. For long chunks the two are equal, and the mask would grow R times.
MAX_FOLDED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences attended together: b of them, N new tokens each, c gathered positions each.

    Attributes:
        rows: [b * N] int64, their rows of q; None when they are all rows in order.
        page_ids: [b * c / page_size] int64, the pages to gather.
        padding: [any] int64, gathered positions (of b * c) that hold no context.
        is_allowed: [b, 1, N, c] bool, which positions a new token sees; None = all of [0, p], nothing cached.
        num_sequences: b.
    """

    rows: torch.Tensor | None
    page_ids: torch.Tensor
    padding: torch.Tensor
    is_allowed: torch.Tensor | None
    num_sequences: int


def write_kv(k: torch.Tensor, v: torch.Tensor, kv_layer: torch.Tensor, slots: torch.Tensor) -> None:
    """Write new keys and values into their slots.

    Args:
        k, v: [T, G, D], same dtype and device as kv_layer.
        kv_layer: [num_pages, 2, page_size, G, D].
        slots: [T] int64, distinct; slots below page_size are the padding page.
    Raises:
        ValueError: shape or dtype differs.
    Changes: kv_layer at `slots`, nothing else.
    """
    expected = (slots.shape[0], *kv_layer.shape[3:])
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape) != expected or tensor.dtype != kv_layer.dtype:
            raise ValueError(
                f"{name} must be {expected} {kv_layer.dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
            )
    page_size = kv_layer.shape[2]
    page_ids = slots.div(page_size, rounding_mode="floor")
    offsets = slots - page_ids * page_size
    kv_layer[page_ids, 0, offsets] = k
    kv_layer[page_ids, 1, offsets] = v


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    page_table: torch.Tensor,
    num_query_tokens: tuple[int, ...],
    num_context_tokens: tuple[int, ...],
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attend from new tokens to their sequences' pages: plan_attention, then attend.

    Args:
        q: [T, H, D]; the new tokens' own keys and values are already in kv_layer.
        kv_layer: [num_pages, 2, page_size, G, D].
        page_table: [B, P] int32.
        num_query_tokens: B counts of at least 1, sum T.
        num_context_tokens: B counts, each at least the number of new tokens and at most P * page_size.
        scale: factor on the dot products.
        sliding_window: a token sees this many positions, itself included; None = all.
        soft_cap: bound on the scaled scores; None = none.
    Returns: [T, H, D], dtype of q.
    Raises:
        ValueError: counts or shapes do not fit together.
    """
    groups = plan_attention(
        page_table,
        num_query_tokens=num_query_tokens,
        num_context_tokens=num_context_tokens,
        page_size=kv_layer.shape[2],
        sliding_window=sliding_window,
    )
    return attend(q, kv_layer, groups, scale=scale, soft_cap=soft_cap)


def plan_attention(
    page_table: torch.Tensor,
    *,
    num_query_tokens: tuple[int, ...],
    num_context_tokens: tuple[int, ...],
    page_size: int,
    sliding_window: int | None = None,
) -> tuple[AttentionGroup, ...]:
    """Cut a batch into groups; good for every layer with this sliding window. Arguments: see paged_attention.

    Within a group the number of gathered pages differs by less than a factor of two, so padding costs less than
    the work itself, at the price of a few more groups.
    """
    _check_counts(page_table, num_query_tokens, num_context_tokens, page_size)
    members: dict[tuple[int, int, bool], list[int]] = {}
    for b, (num_new, context) in enumerate(zip(num_query_tokens, num_context_tokens, strict=True)):
        first_page = _first_page(num_new, context, page_size, sliding_window)
        num_pages = -(-context // page_size) - first_page
        is_whole = num_new == context and sliding_window is None
        # Whole prompts of one length need no mask; a bit length is equal within a factor of two.
        members.setdefault((num_new, context if is_whole else num_pages.bit_length(), is_whole), []).append(b)
    row_starts = [0]
    for num_new in num_query_tokens:
        row_starts.append(row_starts[-1] + num_new)
    return tuple(
        _plan_group(
            page_table,
            sequences,
            row_starts=row_starts if len(members) > 1 else None,
            num_new=num_new,
            contexts=[num_context_tokens[b] for b in sequences],
            page_size=page_size,
            sliding_window=sliding_window,
        )
        for (num_new, _, _), sequences in members.items()
    )


def attend(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    groups: tuple[AttentionGroup, ...],
    *,
    scale: float,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attend group by group. Arguments and result: see paged_attention."""
    if len(groups) == 1 and groups[0].rows is None:
        return _attend_group(q, kv_layer, groups[0], scale=scale, soft_cap=soft_cap)
    output = torch.empty_like(q)
    for group in groups:
        assert group.rows is not None
        output[group.rows] = _attend_group(q[group.rows], kv_layer, group, scale=scale, soft_cap=soft_cap)
    return output


def _first_page(num_new: int, context: int, page_size: int, sliding_window: int | None) -> int:
    """Give the index of the first page that the oldest new token sees."""
    if sliding_window is None:
        return 0
    return max(0, context - num_new + 1 - sliding_window) // page_size


def _check_counts(
    page_table: torch.Tensor,
    num_query_tokens: tuple[int, ...],
    num_context_tokens: tuple[int, ...],
    page_size: int,
) -> None:
    num_sequences, num_columns = page_table.shape
    if not len(num_query_tokens) == len(num_context_tokens) == num_sequences:
        raise ValueError(
            f"page_table has {num_sequences} rows, got {len(num_query_tokens)} query counts "
            f"and {len(num_context_tokens)} context counts"
        )
    for b, (num_new, context) in enumerate(zip(num_query_tokens, num_context_tokens, strict=True)):
        if not 1 <= num_new <= context <= num_columns * page_size:
            raise ValueError(
                f"sequence {b} must have 1 <= new tokens <= context <= {num_columns * page_size}, "
                f"got {num_new} new tokens and a context of {context}"
            )


def _plan_group(
    page_table: torch.Tensor,
    sequences: list[int],
    *,
    row_starts: list[int] | None,
    num_new: int,
    contexts: list[int],
    page_size: int,
    sliding_window: int | None,
) -> AttentionGroup:
    # positions of one sequence:  [0, first page) unseen | gathered: [first page, context) | padding up to c
    device = page_table.device
    first_pages = [_first_page(num_new, context, page_size, sliding_window) for context in contexts]
    num_pages = max(
        -(-context // page_size) - first for context, first in zip(contexts, first_pages, strict=True)
    )
    meta = torch.tensor([sequences, contexts, first_pages], device=device)
    context, first_page = meta[1, :, None], meta[2, :, None]
    columns = first_page + torch.arange(num_pages, device=device)
    page_ids = page_table[meta[0, :, None], columns.clamp(max=page_table.shape[1] - 1)].long()
    positions = first_page * page_size + torch.arange(num_pages * page_size, device=device)
    padding = (positions >= context).flatten().nonzero().flatten()
    is_allowed = None
    if any(context != num_new for context in contexts) or sliding_window is not None:
        query_positions = context - num_new + torch.arange(num_new, device=device)
        is_allowed = positions[:, None, :] <= query_positions[:, :, None]
        if sliding_window is not None:
            is_allowed &= positions[:, None, :] > query_positions[:, :, None] - sliding_window
        is_allowed = is_allowed[:, None]
    rows = None
    if row_starts is not None:
        starts = torch.tensor([row_starts[b] for b in sequences], device=device)
        rows = (starts[:, None] + torch.arange(num_new, device=device)).flatten()
    return AttentionGroup(rows, page_ids.flatten(), padding, is_allowed, len(sequences))


def _attend_group(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    group: AttentionGroup,
    *,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    num_rows, num_heads, head_dim = q.shape
    b, num_new = group.num_sequences, num_rows // group.num_sequences
    k, v = (_gather(kv_layer[:, i], group) for i in (0, 1))
    is_allowed = group.is_allowed
    if is_allowed is None:
        # Nothing is cached: the context is the new tokens, and padding lies behind the last of them.
        k, v = k[:, :, :num_new], v[:, :, :num_new]
        if soft_cap is None:
            queries = q.view(b, num_new, num_heads, head_dim).transpose(1, 2)
            output = F.scaled_dot_product_attention(
                queries, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            return output.transpose(1, 2).reshape(q.shape)
        is_allowed = torch.ones(1, 1, num_new, num_new, dtype=torch.bool, device=q.device).tril()
    if soft_cap is not None:
        queries = q.view(b, num_new, num_heads, head_dim).transpose(1, 2)
        output = _attend_soft_capped(queries, k, v, is_allowed, scale=scale, soft_cap=soft_cap)
        return output.transpose(1, 2).reshape(q.shape)
    if num_new <= MAX_FOLDED_TOKENS:
        return _attend_folded(q, k, v, is_allowed, scale=scale)
    queries = q.view(b, num_new, num_heads, head_dim).transpose(1, 2)
    output = F.scaled_dot_product_attention(queries, k, v, attn_mask=is_allowed, scale=scale, enable_gqa=True)
    return output.transpose(1, 2).reshape(q.shape)


def _gather(kv: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """Copy a group's pages of [num_pages, page_size, G, D] into [b, G, c, D], zeros where there is no context."""
    pages = kv.index_select(0, group.page_ids)
    tokens = pages.view(-1, *kv.shape[2:])
    # A masked NaN would still be a NaN in the products.
    tokens.index_fill_(0, group.padding, 0)
    return tokens.view(group.num_sequences, -1, *kv.shape[2:]).transpose(1, 2)


def _attend_folded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_allowed: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Attend with the R query heads of a kv head as rows of one matrix: [b, G, N * R, D] against [b, G, c, D]."""
    (b, num_kv_heads, _, head_dim), num_new = k.shape, is_allowed.shape[2]
    num_group_heads = q.shape[1] // num_kv_heads
    folded = q.view(b, num_new, num_kv_heads, num_group_heads, head_dim).transpose(1, 2)
    queries = folded.reshape(b, num_kv_heads, num_new * num_group_heads, head_dim)
    mask = is_allowed if num_new == 1 else is_allowed.repeat_interleave(num_group_heads, 2)
    output = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)
    return output.view(folded.shape).transpose(1, 2).reshape(q.shape)


def _attend_soft_capped(
    queries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_allowed: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Attend with capped scores, softmax in float32: [b, H, N, D] against [b, G, c, D] gives [b, H, N, D]."""
    num_group_heads = queries.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(num_group_heads, 1) for tensor in (k, v))
    scores = torch.matmul(queries, k.transpose(-1, -2)).float() * scale
    scores = (soft_cap * torch.tanh(scores / soft_cap)).masked_fill(~is_allowed, -torch.inf)
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)


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
    """Norm and turn queries and keys, write keys and values into their slots; float32 inside, rounded once.

    Args:
        qkv: [T, H + 2 G, D], heads of queries, then keys, then values.
        kv_layer: [num_pages, 2, page_size, G, D], dtype of qkv.
        slots: [T] int64, distinct; slots below page_size are the padding page.
        positions: [T] int64, rows of rotation.
        rotation: [any, D] float32, per position D/2 cosines, then D/2 sines; dimensions i and i + D/2 turn by
            angle i.
        qk_norm: [H + G, D] weights of an RMSNorm per head before the rotation; None = no norm.
        epsilon: added to the mean square.
    Returns: queries [T, H, D], dtype of qkv.
    Changes: kv_layer at `slots`, nothing else.
    """
    num_kv_heads = kv_layer.shape[3]
    num_rotated = qkv.shape[1] - num_kv_heads
    qk = qkv[:, :num_rotated].float()
    if qk_norm is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], None, epsilon) * qk_norm.float()
    cosine, sine = rotation[positions][:, None].chunk(2, -1)
    low, high = qk.chunk(2, -1)
    turned = torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1).to(qkv.dtype)
    num_heads = num_rotated - num_kv_heads
    write_kv(turned[:, num_heads:], qkv[:, num_rotated:], kv_layer, slots)
    return turned[:, :num_heads].contiguous()


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, *, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add x to the residual stream and give its RMSNorm times weight.

    Args:
        x: [T, E].
        residual: [T, E], dtype of x; None = norm x itself.
        weight: [E], dtype of x.
    Returns: [T, E], dtype of x. The norm is of the rounded sum, taken in float32.
    Changes: residual becomes residual + x.
    """
    if residual is not None:
        x = residual.copy_((residual.float() + x.float()).to(x.dtype))
    return (F.rms_norm(x.float(), x.shape[-1:], None, epsilon) * weight.float()).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Give silu(gates) * ups for [T, 2 I], gates first; [T, I], float32 inside, rounded once. Pure."""
    gates, ups = gate_up.float().chunk(2, -1)
    return (F.silu(gates) * ups).to(gate_up.dtype)


def copy_pages(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole pages of all layers.

    Args:
        source, target: [num_pages, ...] of equal page shape and dtype; may be the same store.
        pairs: (source page, target page); target pages distinct and, within one store, no source.
    Changes: target at the target pages.
    """
    if pairs:
        at = torch.tensor(pairs, device=source.device)
        target[at[:, 1]] = source[at[:, 0]]
