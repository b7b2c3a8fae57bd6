"""The device decoder's and sampler's door to the GPU kernels. Importing this module needs the optional package triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from radixrt_kernels.gpu import attention, configs, copy_pages, rope_write, rows, sample
from radixrt_kernels.gpu.attention import BatchPlan as BatchPlan
from radixrt_kernels.gpu.attention import DeviceBatchPlan as DeviceBatchPlan
from radixrt_kernels.gpu.decode_plan import ITEM_FIELDS, MEMBER_FIELDS, MERGE_FIELDS
from radixrt_kernels.gpu.decode_plan import DecodePlan as DecodePlan
from radixrt_kernels.gpu.decode_plan import DeviceDecodePlan as DeviceDecodePlan
from radixrt_kernels.gpu.extend import TILE_FIELDS
from radixrt_kernels.gpu.extend import DeviceExtendPlan as DeviceExtendPlan
from radixrt_kernels.gpu.extend import ExtendPlan as ExtendPlan
from radixrt_kernels.reference_sampling import Sampled as Sampled
from radixrt_kernels.reference_sampling import SampleInputs as SampleInputs

from radixrt.model.spec import ModelSpec

Ints = npt.NDArray[np.int32]
PLAN_FIELDS = {"items": ITEM_FIELDS, "members": MEMBER_FIELDS, "merges": MERGE_FIELDS, "tiles": TILE_FIELDS}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a step; arguments and results: radixrt_kernels.gpu."""

    rope_write: Callable[..., torch.Tensor]
    attend: Callable[..., torch.Tensor]
    add_norm: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    sample: Callable[..., Sampled]
    copy_listed_pages: Callable[..., None]


TRITON = Kernels(
    rope_write=rope_write.rope_write,
    attend=attention.attend,
    add_norm=rows.add_norm,
    silu_mul=rows.silu_mul,
    sample=sample.sample,
    copy_listed_pages=copy_pages.copy_listed_pages,
)


def refusals(spec: ModelSpec, *, page_size: int) -> list[str]:
    """Say what of a model no kernel takes; empty when it can run on them. Pure."""
    found = []
    try:
        configs.check_shape(spec.head_dim, spec.num_heads // spec.num_kv_heads)
    except ValueError as error:
        found.append(str(error))
    if page_size & (page_size - 1):
        found.append(f"page_size must be a power of two, got {page_size}")
    if spec.hidden_size > rows.MAX_ROW:
        found.append(f"hidden size must be at most {rows.MAX_ROW}, got {spec.hidden_size}")
    if spec.vocab_size > sample.MAX_COLUMNS:
        found.append(f"vocabulary size must be at most {sample.MAX_COLUMNS}, got {spec.vocab_size}")
    return found


@dataclass(frozen=True, slots=True)
class AttentionPlanner:
    """Cuts batches of one model into work items.

    Attributes:
        dtype: of queries, keys and values.
        windows: the model's distinct sliding windows; a step has one plan for each.
    """

    spec: ModelSpec
    page_size: int
    dtype: torch.dtype

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(self.spec.sliding_windows))

    def plan(
        self, page_table: Ints, num_query_tokens: tuple[int, ...], num_context_tokens: tuple[int, ...]
    ) -> tuple[BatchPlan, ...]:
        """Give the work items per distinct window. Pure.

        A window that hides nothing is left out, but not of a step with one token per sequence: a captured graph holds
        one kind of each kernel.

        Raises:
            ValueError: counts do not fit together.
        """
        spec = self.spec
        longest = 0 if max(num_query_tokens) == 1 else max(num_context_tokens)
        return tuple(
            attention.plan_attention(
                page_table,
                num_query_tokens=num_query_tokens,
                num_context_tokens=num_context_tokens,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                page_size=self.page_size,
                dtype=self.dtype,
                sliding_window=None if window is None or window >= longest > 0 else window,
            )
            for window in self.windows
        )

    @property
    def num_wanted_items(self) -> int:
        """About how many items a decode is cut into, besides those that its tree of segments needs."""
        spec = self.spec
        num_group_heads = spec.num_heads // spec.num_kv_heads
        config = configs.decode_config(self.dtype, spec.head_dim, num_group_heads, self.page_size)
        return max(config.num_programs // spec.num_kv_heads, 1)
