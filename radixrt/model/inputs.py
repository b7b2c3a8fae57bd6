"""What the decoder sees of a step: one flattened ragged batch, whatever the mix of prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The tensors of one step. T new tokens of B sequences; S rows of logits are wanted.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, position of each token in its sequence.
        slots: [T] int64, distinct; page_id * page_size + offset, where the token's KV goes.
        page_table: [B, P] int32, pages of each sequence in order, padded with page 0.
        query_start: [B + 1] int32; sequence b's new tokens are rows [query_start[b], query_start[b + 1]).
        context_lens: [B] int32, tokens of each sequence after this step; its new tokens are the last ones.
        sample_rows: [S] int64, rows of [0, T) whose logits are wanted.
        num_query_tokens: the differences of query_start as plain ints, so that no backend reads them back.
        num_context_tokens: context_lens as plain ints.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    sample_rows: torch.Tensor
    num_query_tokens: tuple[int, ...]
    num_context_tokens: tuple[int, ...]
