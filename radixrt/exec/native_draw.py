"""Drawing tokens by the CPU kernels, as draw.py does."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import repeat

import torch

from radixrt.exec.batch import SampleRow
from radixrt.exec.draw import Found, Likeliest
from radixrt.model.attention import cpu


class NativeDraw:
    """Draw on the threads of a decoder."""

    def __init__(self, native: cpu.CpuDecoder) -> None:
        self._native = native

    def __call__(
        self, logits: Seq[torch.Tensor], rows: Seq[SampleRow], known: Seq[Likeliest | None] | None = None
    ) -> Found:
        """Do `draw_rows`. A token differs where a number falls within rounding of a border between two."""
        draws = list(map(_draw_row, logits, rows, known or repeat(None)))
        return self._native.draw(draws, num_token_ids=len(logits[0]))


def _draw_row(logits: torch.Tensor, row: SampleRow, likeliest: Likeliest | None) -> cpu.DrawRow:
    sequence, sampling = row.sequence, row.sampling
    return cpu.DrawRow(
        logits,
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
