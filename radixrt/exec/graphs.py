"""Decode steps as captured graphs: one per bucket of batch sizes, with grids and shapes fixed at its largest step.

A smaller step is padded: rows of zeros write their keys and values into page 0 and are never drawn from; work items of
0 tokens return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from radixrt.exec.device import Device, Graph
from radixrt.exec.device_sampling import DRAW_FIELDS
from radixrt.exec.device_step import HostStep, device_inputs, join_tokens
from radixrt.exec.packing import FLOAT64, INT32, INT64, PackedLayout
from radixrt.exec.staging import Staging
from radixrt.model.device_decoder import DeviceInputs
from radixrt.model.device_kernels import PLAN_FIELDS, AttentionPlanner, BatchPlan, DecodePlan

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ITEMS_PER_ROW = 2  # a tree with B leaves has less than 2 B segments
MEMBERS_PER_ROW = 16  # partial results of a row, on average, over the items that share its prefix


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes of one graph.

    Attributes:
        num_rows: most sequences.
        num_items, num_slots: most work items; most members of them, and as many partial results.
        num_pages: most entries of the page table.
    """

    num_rows: int
    num_items: int
    num_slots: int
    num_pages: int

    @classmethod
    def of(cls, num_rows: int, planner: AttentionPlanner, *, max_context: int) -> Bucket:
        """Choose the sizes for so many rows. Pure."""
        num_items = planner.num_wanted_items + ITEMS_PER_ROW * num_rows
        return cls(
            num_rows,
            num_items,
            num_items + MEMBERS_PER_ROW * num_rows,
            num_rows * -(-max_context // planner.page_size),
        )

    def layout(self, num_windows: int) -> PackedLayout:
        """Give where a step's arrays lie; as HostStep.arrays. Pure."""
        rows = self.num_rows
        return PackedLayout.of(
            {
                "token_ids": (INT64, (rows,)),
                "positions": (INT64, (rows,)),
                "slots": (INT64, (rows,)),
                "sampled_from": (INT32, (rows,)),
                "sample_rows": (INT64, (rows,)),
                "copies": (INT32, (rows, 2)),
                "draw_rows": (INT64, (rows,)),
                "numbers": (FLOAT64, (rows, 6)),
                "top_k": (INT32, (rows,)),
                "keys": (INT64, (rows, 3)),
                "mask_rows": (INT32, (rows,)),
                "bias_rows": (INT32, (rows,)),
                "penalty_rows": (INT32, (rows,)),
                **{
                    f"{name}_{index}": (INT32, shape)
                    for index in range(num_windows)
                    for name, shape in self._plan_shapes.items()
                },
                "page_table": (INT32, (1, self.num_pages)),
            }
        )

    def plan(self, window: int | None) -> BatchPlan:
        """Give a plan of padding only, with the sizes of this bucket. Pure."""
        shapes = self._plan_shapes
        items, members, merges = (np.zeros(shapes[name], np.int32) for name in ("items", "members", "merges"))
        return BatchPlan(DecodePlan(items, members, merges, self.num_slots, window is not None), None)

    @property
    def _plan_shapes(self) -> dict[str, tuple[int, int]]:
        sizes = {"items": self.num_items, "members": self.num_slots, "merges": self.num_rows, "tiles": 0}
        return {name: (size, PLAN_FIELDS[name]) for name, size in sizes.items()}


@dataclass(frozen=True, slots=True)
class Captured:
    """One bucket's graph, and where its step is written."""

    bucket: Bucket
    layout: PackedLayout
    views: dict[str, torch.Tensor]
    graph: Graph


class DecodeGraphs:
    """Own the graphs, the buffer that they read and their outputs.

    Memory: one output of num_rows * V logits per bucket, the buffer (mostly the page table: 4 bytes per row and page
    of the longest context), and the pool of activations, which all graphs share (Device.graph_bytes).

    Args:
        forward: computes logits; what is captured.
        sampled: [any] int64, the last step's tokens, always at this place.
        max_rows: no bucket is larger.
    """

    def __init__(
        self,
        device: Device,
        planner: AttentionPlanner,
        forward: Callable[[DeviceInputs], torch.Tensor],
        *,
        sampled: torch.Tensor,
        max_rows: int,
        max_context: int,
    ) -> None:
        windows = planner.windows
        sizes = sorted({min(size, max_rows) for size in BUCKETS}, reverse=True)
        buckets = [Bucket.of(size, planner, max_context=max_context) for size in sizes]
        layouts = [bucket.layout(len(windows)) for bucket in buckets]
        self._staging = Staging(device, num_words=max(layout.num_words for layout in layouts))
        self._captured: list[Captured] = []
        # The largest first: the others fit into its pool.
        for bucket, layout in zip(buckets, layouts, strict=True):
            views = layout.views(self._staging.buffer)
            plans = [bucket.plan(window) for window in windows]

            def launch(
                views: dict[str, torch.Tensor] = views, plans: list[BatchPlan] = plans
            ) -> torch.Tensor:
                inputs = device_inputs(views, plans, token_ids=join_tokens(views, sampled))
                return forward(inputs)

            self._captured.insert(0, Captured(bucket, layout, views, device.capture(launch)))

    def find(self, step: HostStep) -> Captured | None:
        """Give the smallest graph that can hold a step; None when none can."""
        if not step.is_decode:
            return None
        num_rows = len(step.plan.chunks)
        num_slots = max(plan.decode.num_slots for plan in step.attention if plan.decode is not None)
        for captured in self._captured:
            bucket = captured.bucket
            has_room = num_rows <= bucket.num_rows and num_slots <= bucket.num_slots
            if has_room and captured.layout.takes(step.arrays):
                return captured
        return None

    def copy(self, captured: Captured, step: HostStep) -> dict[str, torch.Tensor]:
        """Begin to copy a step to where its graph reads it; give what is read outside of it, without the padding."""
        self._staging.copy(captured.layout, step.arrays)
        return {name: captured.views[name][: len(step.arrays[name])] for name in ("copies", *DRAW_FIELDS)}
