"""Paged attention, for callers outside a whole step: tests, measurements."""

from __future__ import annotations

import ctypes
import itertools
import weakref

import torch

from radixrt_kernels.cpu.library import CBatch, Library, check_status, is_bfloat16, pointer


class CpuAttention:
    """Paged attention in C++ with threads of its own; same arguments as reference.paged_attention."""

    def __init__(self, library: Library, *, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self.library = library
        self._team = library.functions.rt_team_create(num_threads)
        if not self._team:
            raise MemoryError("no memory for threads")
        weakref.finalize(self, library.functions.rt_team_destroy, self._team)

    def __call__(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        *,
        page_table: torch.Tensor,
        num_query_tokens: tuple[int, ...],
        num_context_tokens: tuple[int, ...],
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Attend in one layer. Arguments: see reference.paged_attention; no soft cap.

        Leading pages that several sequences of few new tokens have in common are read once for 96 query rows at
        most, for fewer where several threads work. That changes no bit of the result; neither do threads, chunks
        and who else is in the batch.

        Raises:
            ValueError: counts, shapes or types do not fit together.
        """
        return self.attend_layers(
            q[None],
            kv_layer[:, None],
            page_table=page_table,
            num_query_tokens=num_query_tokens,
            num_context_tokens=num_context_tokens,
            scale=scale,
            sliding_window=sliding_window,
        )[0]

    def attend_layers(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        *,
        page_table: torch.Tensor,
        num_query_tokens: tuple[int, ...],
        num_context_tokens: tuple[int, ...],
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Attend in layer after layer within one call, checked and planned once as in a step of the decoder.

        Args:
            q: [L, T, H, D] contiguous; so is the result.
            kv: [num_pages, L, 2, page_size, G, D], all but the first two dimensions contiguous.
            page_table and so on: of all layers alike.
        Raises:
            ValueError: counts, shapes or types do not fit together.
        """
        num_pages, num_layers, _, page_size, num_kv_heads, head_dim = kv.shape
        num_tokens, num_heads = q.shape[1:3]
        num_sequences, num_columns = page_table.shape
        starts = torch.tensor([0, *itertools.accumulate(num_query_tokens)], dtype=torch.int32)
        context_lens = torch.tensor(num_context_tokens, dtype=torch.int32)
        output = torch.empty_like(q)
        _check(q, kv, sliding_window)
        batch = CBatch(
            num_tokens,
            num_sequences,
            num_columns,
            pointer(page_table, "page_table", torch.int32, (num_sequences, num_columns)),
            pointer(starts, "num_query_tokens", torch.int32, (num_sequences + 1,)),
            pointer(context_lens, "num_context_tokens", torch.int32, (num_sequences,)),
        )
        status = self.library.functions.rt_attend(
            self._team,
            kv.data_ptr(),
            num_pages,
            num_layers,
            kv.stride(0),
            kv.stride(1),
            page_size,
            ctypes.byref(batch),
            pointer(q, "q", q.dtype, (num_layers, num_tokens, num_heads, head_dim)),
            output.data_ptr(),
            num_heads,
            num_kv_heads,
            head_dim,
            sliding_window or 0,
            scale,
            is_bfloat16(q),
        )
        check_status(status)
        return output


def _check(q: torch.Tensor, kv: torch.Tensor, sliding_window: int | None) -> None:
    """Raise ValueError for what no loop over the data sees."""
    if kv.shape[2] != 2 or not kv.numel():
        raise ValueError(
            f"kv must be [num_pages, L, 2, page_size, G, D] with none of them 0, got {tuple(kv.shape)}"
        )
    if not kv[0, 0].is_contiguous() or kv.dtype != q.dtype:
        raise ValueError(f"kv must be pages of contiguous {q.dtype}, got {kv.dtype}")
    if kv.shape[5] % 2 or q.shape[2] % kv.shape[4]:
        raise ValueError(f"q must have a multiple of {kv.shape[4]} heads of even size, got {tuple(q.shape)}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
