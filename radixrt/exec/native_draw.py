"""Drawing tokens by the CPU kernels, as draw.py does."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from radixrt.exec.draw import DrawnRow, Found
from radixrt.model.attention import cpu


class NativeDraw:
    """Draw on the threads of a decoder."""

    def __init__(self, native: cpu.CpuDecoder) -> None:
        self._native = native

    def __call__(self, logits: torch.Tensor, rows: Seq[DrawnRow]) -> Found:
        """Do `draw_rows`. A token differs where a number falls within rounding of a border between two."""
        return self._native.draw(logits, list(map(_draw_row, rows)), num_token_ids=logits.shape[1])


def _draw_row(drawn: DrawnRow) -> cpu.DrawRow:
    at, row, likeliest = drawn
    sequence, sampling = row.sequence, row.sequence.request.sampling
    return cpu.DrawRow(
        at,
        row.mask,
        sampling.logit_bias,
        row.banned_ids,
        sequence.token_ids,
        sequence.num_prompt_tokens,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        row.uniform,
        likeliest,
    )
