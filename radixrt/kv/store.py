"""KVStore: the page tensors of all layers. A page is one contiguous blob, so it is copied as opaque bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixrt.errors import InvariantViolation
from radixrt.kv.pool import PageCopy
from radixrt.memory import advise_huge_pages


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one page: [L, 2 (keys, values), page_size, G, D]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def num_page_elements(self) -> int:
        return self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim

    @property
    def num_page_bytes(self) -> int:
        return self.num_page_elements * self.dtype.itemsize


class KVStore:
    """Own the keys and values of every page.

    Memory is taken when a page is first written, in huge pages where the system has them: slots that nobody wrote hold anything, and nothing reads them.

    Invariants: data.shape == (num_pages, *layout.page_shape), contiguous; page 0 is padding.
    """

    def __init__(self, layout: KVLayout, *, num_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.data = torch.empty((num_pages, *layout.page_shape), dtype=layout.dtype, device=device)
        advise_huge_pages(self.data)

    def layer(self, layer_index: int) -> torch.Tensor:
        """Give one layer's view: [num_pages, 2, page_size, G, D], keys at [:, 0], values at [:, 1]."""
        return self.data[:, layer_index]

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages, all layers at once; every source is read before any target is written.

        Changes: data at the targets. Slots past `num_tokens` hold whatever the source held.
        """
        if not copies:
            return
        device = self.data.device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        targets = torch.tensor([copy.target for copy in copies], device=device)
        self.data.index_copy_(0, targets, self.data.index_select(0, sources))

    def check(self) -> None:
        """Raise InvariantViolation unless shape and layout agree."""
        if self.data.shape != (self.num_pages, *self.layout.page_shape) or not self.data.is_contiguous():
            raise InvariantViolation(f"KV store has shape {tuple(self.data.shape)}, layout {self.layout}")
