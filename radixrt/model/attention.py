"""The torch decoder's door to kernels. Attention: plan once per step, then write and attend once per layer.

`cpu` is handed on to native.py, where a whole step is one call. device_kernels.py is the door to those for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from radixrt_kernels import cpu as cpu
from radixrt_kernels import reference

from radixrt.model.inputs import BatchTensors
from radixrt.model.spec import ModelSpec


class AttentionPlan(Protocol):
    """What one step needs in every layer."""

    def write(self, k: torch.Tensor, v: torch.Tensor, kv_layer: torch.Tensor) -> None:
        """Write the new keys and values, [T, G, D] each, into their slots of one layer."""
        ...

    def attend(self, q: torch.Tensor, kv_layer: torch.Tensor, *, layer_index: int) -> torch.Tensor:
        """Attend from the new tokens, [T, H, D], to their sequences' pages; gives [T, H, D]."""
        ...


class AttentionBackend(Protocol):
    """An implementation of paged attention; stateless, shared by all steps."""

    def plan(self, batch: BatchTensors, spec: ModelSpec, *, page_size: int) -> AttentionPlan:
        """Prepare a step: everything that does not depend on the layer's tensors."""
        ...


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A step in plain torch: one set of groups per distinct sliding window."""

    slots: torch.Tensor
    sliding_windows: tuple[int | None, ...]
    groups: dict[int | None, tuple[reference.AttentionGroup, ...]]
    scale: float

    def write(self, k: torch.Tensor, v: torch.Tensor, kv_layer: torch.Tensor) -> None:
        reference.write_kv(k, v, kv_layer, self.slots)

    def attend(self, q: torch.Tensor, kv_layer: torch.Tensor, *, layer_index: int) -> torch.Tensor:
        groups = self.groups[self.sliding_windows[layer_index]]
        return reference.attend(q, kv_layer, groups, scale=self.scale)


class TorchAttention:
    """Paged attention in plain torch, on any device."""

    def plan(self, batch: BatchTensors, spec: ModelSpec, *, page_size: int) -> TorchPlan:
        windows = _effective_windows(batch, spec)
        groups = {
            window: reference.plan_attention(
                batch.page_table,
                num_query_tokens=batch.num_query_tokens,
                num_context_tokens=batch.num_context_tokens,
                page_size=page_size,
                sliding_window=window,
            )
            for window in dict.fromkeys(windows)
        }
        return TorchPlan(batch.slots, windows, groups, spec.head_dim**-0.5)


def _effective_windows(batch: BatchTensors, spec: ModelSpec) -> tuple[int | None, ...]:
    """Give each layer's window; one at least as long as the longest context hides nothing."""
    longest = max(batch.num_context_tokens)
    return tuple(None if window is None or window >= longest else window for window in spec.sliding_windows)
