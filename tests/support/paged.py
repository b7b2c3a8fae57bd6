"""Batches over scattered pages for the GPU kernels: on a CUDA device, else in Triton's interpreter.

Every page that no sequence names and every slot past a sequence's context holds NaN.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from radixrt_kernels.gpu.checks import is_interpreted
from radixrt_kernels.reference import paged_attention

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")  # tests/conftest.py decides
# Norm of the difference over norm of the float64 result: rounding of the inputs' type, for bfloat16 also of the
# interpreter's cast, which cuts off.
TOLERANCE = {
    torch.float32: 1e-6 if DEVICE.type == "cpu" else 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 5e-3,
}


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Give |got - expected| / |expected|; NaN anywhere gives NaN."""
    got, expected = got.double().cpu(), expected.double().cpu()
    return ((got - expected).norm() / expected.norm()).item()


@dataclass
class PagedBatch:
    """A batch: N new tokens of each sequence, the last of its context.

    Attributes:
        q: [T, H, D].
        kv_layer: [num_pages, 2, page_size, G, D], the middle layer of three.
        page_table: [B, P] int32.
        num_new, contexts: B counts.
    """

    q: torch.Tensor
    kv_layer: torch.Tensor
    page_table: torch.Tensor
    num_new: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    @property
    def page_size(self) -> int:
        return self.kv_layer.shape[2]

    def expected(self, *, sliding_window=None, soft_cap=None) -> torch.Tensor:
        """Give the reference's result in float64, [T, H, D]."""
        return paged_attention(
            self.q.double(),
            self.kv_layer.double(),
            page_table=self.page_table,
            num_query_tokens=self.num_new,
            num_context_tokens=self.contexts,
            scale=self.scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )

    def permuted(self, seed: int) -> "PagedBatch":
        """Give the same batch with its pages elsewhere."""
        num_pages = len(self.kv_layer)
        order = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed))
        order = torch.cat([torch.zeros(1, dtype=order.dtype), order]).to(self.kv_layer.device)
        moved = torch.empty_like(self.kv_layer)
        moved[order] = self.kv_layer
        return PagedBatch(self.q, moved, order[self.page_table.long()].int(), self.num_new, self.contexts)


def make_batch(
    counts,
    *,
    num_kv_heads=2,
    num_group_heads=2,
    head_dim=64,
    page_size=16,
    dtype=torch.float32,
    tree=(),
    seed=0,
) -> PagedBatch:
    """Make a batch of (new, context) pairs.

    Args:
        tree: (sequences, number of pages) pairs, from the root: leading pages that these sequences share.
    """
    generator = torch.Generator().manual_seed(seed)
    num_new, contexts = zip(*counts, strict=True)
    tables: list[list[int]] = [[] for _ in counts]
    ids = iter(
        (1 + torch.randperm(4 + sum(-(-c // page_size) for c in contexts), generator=generator)).tolist()
    )
    num_pages = 5 + sum(-(-c // page_size) for c in contexts)
    for sequences, count in tree:
        shared = [next(ids) for _ in range(count)]
        for b in sequences:
            tables[b] += shared
    page_table = torch.zeros(len(counts), 1 + max(-(-c // page_size) for c in contexts), dtype=torch.int32)
    kv_layer = torch.full((num_pages, 3, 2, page_size, num_kv_heads, head_dim), math.nan, dtype=dtype)[:, 1]
    for b, context in enumerate(contexts):
        while len(tables[b]) * page_size < context:
            tables[b].append(next(ids))
        page_table[b, : len(tables[b])] = torch.tensor(tables[b])
        for column, page in enumerate(tables[b]):
            filled = min(context - column * page_size, page_size)
            if kv_layer[page, 0, 0, 0, 0].isnan():
                new = torch.randn(2, filled, num_kv_heads, head_dim, generator=generator)
                kv_layer[page, :, :filled] = new.to(dtype)
    q = torch.randn(sum(num_new), num_kv_heads * num_group_heads, head_dim, generator=generator).to(dtype)
    return PagedBatch(q.to(DEVICE), kv_layer.to(DEVICE), page_table.to(DEVICE), num_new, contexts)


def as_ints(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
