"""What the decoder sees of a step: one flattened ragged batch, whatever the mix of prefill and decode."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise

import torch

INT32, INT64 = "i", "q"  # typecodes of arrays


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The arrays of one step on the host. T new tokens of B sequences; S rows of logits are wanted.

    Arrays of the interpreter, not tensors: around a step that fills the caches, the first call of numpy or torch takes
    as long as all that is done here for a small batch.

    Attributes:
        token_ids: [T] INT64.
        positions: [T] INT64, position of each token in its sequence.
        slots: [T] INT64, distinct; page_id * page_size + offset, where the token's KV goes.
        page_table: [B * P] INT32, row after row: pages of each sequence in order, padded with page 0.
        query_start: [B + 1] INT32; sequence b's new tokens are rows [query_start[b], query_start[b + 1]).
        context_lens: [B] INT32, tokens of each sequence after this step; its new tokens are the last ones.
        sample_rows: [S] INT64, rows of [0, T) whose logits are wanted.
    """

    token_ids: array[int]
    positions: array[int]
    slots: array[int]
    page_table: array[int]
    query_start: array[int]
    context_lens: array[int]
    sample_rows: array[int]

    def to(self, device: torch.device) -> BatchTensors:
        """Give the same as tensors on a device."""

        def tensor(values: array[int]) -> torch.Tensor:
            dtype = torch.int64 if values.typecode == INT64 else torch.int32
            return torch.tensor(values.tolist(), dtype=dtype).to(device)

        return BatchTensors(
            token_ids=tensor(self.token_ids),
            positions=tensor(self.positions),
            slots=tensor(self.slots),
            page_table=tensor(self.page_table).view(len(self.context_lens), -1),
            sample_rows=tensor(self.sample_rows),
            num_query_tokens=tuple(stop - start for start, stop in pairwise(self.query_start)),
            num_context_tokens=tuple(self.context_lens),
        )


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """`BatchInputs` on a device, as torch operations read them.

    Attributes:
        token_ids, positions, slots: [T] int64. sample_rows: [S] int64. page_table: [B, P] int32.
        num_query_tokens, num_context_tokens: per sequence, on the host, so that nothing is read back.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    sample_rows: torch.Tensor
    num_query_tokens: tuple[int, ...]
    num_context_tokens: tuple[int, ...]
