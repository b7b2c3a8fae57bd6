"""Attention of a mixed batch: sequences with one new token go to tree_decode, the others to extend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixrt_kernels.gpu.configs import decode_config, extend_config
from radixrt_kernels.gpu.decode_plan import DecodePlan, DeviceDecodePlan, Ints, plan_decode
from radixrt_kernels.gpu.extend import DeviceExtendPlan, ExtendPlan, extend, plan_extend
from radixrt_kernels.gpu.tree_decode import tree_decode


@dataclass(frozen=True, slots=True)
class DeviceBatchPlan:
    """One step's work items on the device; good for every layer with this sliding window.

    Attributes:
        page_table: [any, any] int32; items name entries of it by their place in memory.
        decode, extend: None when no sequence needs them.
    """

    page_table: torch.Tensor
    decode: DeviceDecodePlan | None
    extend: DeviceExtendPlan | None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step's work items on the host; decode and extend are None when no sequence needs them."""

    decode: DecodePlan | None
    extend: ExtendPlan | None

    def to_device(self, page_table: torch.Tensor) -> DeviceBatchPlan:
        """Copy the items to where the page table, [B, P] int32, is; at most two small transfers."""
        device = page_table.device
        return DeviceBatchPlan(
            page_table,
            None if self.decode is None else self.decode.to_device(device),
            None if self.extend is None else self.extend.to_device(device),
        )


def plan_attention(
    page_table: Ints,
    *,
    num_query_tokens: tuple[int, ...],
    num_context_tokens: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
) -> BatchPlan:
    """Cut a batch into work items. Pure.

    Args:
        page_table: [B, P] int32, on the host.
        num_query_tokens, num_context_tokens: see reference.paged_attention.
        dtype: of queries, keys and values.
        sliding_window: a token sees this many positions, itself included; None = all.
    Raises:
        ValueError: counts do not fit together, or no kernel for this shape.
    Cost: see plan_decode.
    """
    num_group_heads = num_heads // num_kv_heads
    news, contexts = np.array(num_query_tokens, np.int64), np.array(num_context_tokens, np.int64)
    starts = np.cumsum(news) - news
    (decoding,), (extending,) = np.nonzero(news == 1), np.nonzero(news != 1)
    shape = (dtype, head_dim, num_group_heads, page_size)
    decode = ragged = None
    if len(decoding):
        decode = plan_decode(
            page_table,
            contexts,
            sequences=decoding,
            page_size=page_size,
            num_group_heads=num_group_heads,
            num_kv_heads=num_kv_heads,
            config=decode_config(*shape),
            rows=starts[decoding],
            sliding_window=sliding_window,
        )
    if len(extending):
        ragged = plan_extend(
            q_start=starts[extending],
            num_new=news[extending],
            contexts=contexts[extending],
            sequences=extending,
            num_columns=page_table.shape[1],
            num_group_heads=num_group_heads,
            config=extend_config(*shape),
            sliding_window=sliding_window,
        )
    return BatchPlan(decode, ragged)


def attend(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: DeviceBatchPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attend from new tokens to their sequences' pages. [T, H, D] to [T, H, D]; see reference.paged_attention.

    Raises:
        ValueError: shape, dtype or device differs (names the argument, expected, got).
    """
    out = torch.empty_like(q)
    table = plan.page_table
    if plan.decode is not None:
        tree_decode(q, kv_layer, page_table=table, plan=plan.decode, scale=scale, soft_cap=soft_cap, out=out)
    if plan.extend is not None:
        extend(q, kv_layer, page_table=table, plan=plan.extend, scale=scale, soft_cap=soft_cap, out=out)
    return out
