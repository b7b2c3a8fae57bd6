"""Drawing tokens from rows of logits, in plain torch. Defines what is correct.

logits -> + bias -> penalties -> bans -> mask -> temperature -> top-k -> top-p -> min-p -> inverse of the cumulated
weights at one uniform number
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from radixrt.exec.batch import SampleRow, refusals
from radixrt.model.outputs import likeliest
from radixrt.types import SamplingParams

NEGATIVE_INFINITY = float("-inf")
FIRST_SORTED = 1024

Found = tuple[list[int], list[float]]  # of N rows: a token, and the largest logit


class DrawnRow(NamedTuple):
    """A row to draw from.

    Attributes:
        at: which row of logits.
        row: how to draw.
        likeliest: the first of the largest logits after all that is before temperature, its id and itself, where that is
            known.
    """

    at: int
    row: SampleRow
    likeliest: tuple[int, float] | None = None


# Raw logits [N, V] float32, which are not changed, and the rows to draw from -> tokens, and the largest logits after all that
# is before temperature; where that is not finite nothing can be drawn, and the token is the likeliest.
Draw = Callable[[torch.Tensor, Seq[DrawnRow]], Found]


def draw_rows(logits: torch.Tensor, wanted: Seq[DrawnRow]) -> Found:
    """Draw one token per row, from its own numbers alone; a greedy row's is the likeliest. See `Draw`."""
    rows = [row for _, row, _ in wanted]
    values = _adjust(logits[[at for at, _, _ in wanted]], rows)
    token_ids, best = likeliest(values)
    whole: list[int] = []  # drawn from all that is allowed
    for index, row in enumerate(rows):
        if row.sampling.is_greedy or not math.isfinite(best[index]):
            continue
        if row.sampling.top_k or row.sampling.top_p < 1:
            token_ids[index] = _draw_filtered(values[index], row)
        else:
            whole.append(index)
    if whole:
        drawn = _draw_whole(values[whole], [rows[index] for index in whole])
        for index, token_id in zip(whole, drawn.tolist(), strict=True):
            token_ids[index] = token_id
    return token_ids, best


def changes_logits(sampling: SamplingParams) -> bool:
    """Tell whether a bias or a penalty changes logits. Pure."""
    return bool(sampling.logit_bias) or has_penalty(sampling)


def has_penalty(sampling: SamplingParams) -> bool:
    """Tell whether tokens that are there already change a row. Pure."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def _adjust(logits: torch.Tensor, rows: Seq[SampleRow]) -> torch.Tensor:
    """Apply bias, penalties, bans and masks in place; give the logits. [N, V]."""
    vocab_size = logits.shape[1]
    for index, row in enumerate(rows):
        sampling = row.sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
            bias = torch.tensor(list(sampling.logit_bias.values()), device=logits.device, dtype=logits.dtype)
            logits[index, ids] += bias
        if has_penalty(row.sampling):
            _penalize(logits[index], row)
        if row.banned_ids:
            logits[index, list(row.banned_ids)] = NEGATIVE_INFINITY
    for index, row in enumerate(rows):
        if row.mask is not None:
            logits[index] += refusals(row.mask, vocab_size).to(logits.device)
    return logits


def _penalize(logits: torch.Tensor, row: SampleRow) -> None:
    """Apply the penalties to one row in place. [V]

    Sources: repetition penalty, CTRL (arXiv:1909.05858); presence and frequency as the OpenAI API defines them.
    """
    sequence, sampling = row.sequence, row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.token_ids)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    if output:
        counts = torch.bincount(torch.tensor(output), minlength=len(logits)).to(logits.device, logits.dtype)
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def _draw_whole(logits: torch.Tensor, rows: Seq[SampleRow]) -> torch.Tensor:
    """Draw from each row's distribution, but for top-k and top-p. [N, V] -> [N]"""
    device = logits.device
    temperature = torch.tensor([row.sampling.temperature for row in rows], device=device, dtype=torch.float64)
    weights = _weights(logits, temperature[:, None])
    if any(row.sampling.min_p for row in rows):
        min_p = torch.tensor([row.sampling.min_p for row in rows], device=device, dtype=weights.dtype)
        weights = weights.masked_fill(weights < min_p[:, None] * weights.amax(dim=-1, keepdim=True), 0.0)
    cumulated = weights.cumsum(dim=-1)
    draws = torch.tensor([row.uniform for row in rows], device=device, dtype=weights.dtype)
    targets = draws[:, None] * cumulated[:, -1:]
    # The first place whose cumulated weight exceeds the target has a weight of its own.
    return torch.searchsorted(cumulated, targets, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def _weights(logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """Give the probabilities of adjusted logits, in float64."""
    return ((logits - logits.amax(dim=-1, keepdim=True)).double() / temperature).softmax(dim=-1)


def _draw_filtered(logits: torch.Tensor, row: SampleRow) -> int:
    """Draw from one row's distribution within top-k, top-p and min-p; of equal weights lower token ids stay. [V]"""
    weights = _weights(logits, row.sampling.temperature)
    ordered, num_kept = _kept(weights, row)
    least = ordered[num_kept - 1]
    above = (weights > least).nonzero().squeeze(1)
    equal = (weights == least).nonzero().squeeze(1)[: num_kept - len(above)]
    token_ids = torch.cat([above, equal]).sort().values
    chosen = weights[token_ids]
    chosen = chosen.masked_fill(chosen < row.sampling.min_p * ordered[0], 0.0)
    cumulated = chosen.cumsum(0)
    place = torch.searchsorted(cumulated, row.uniform * cumulated[-1:], right=True)
    return int(token_ids[place.clamp(max=len(token_ids) - 1)])


def _kept(weights: torch.Tensor, row: SampleRow) -> tuple[torch.Tensor, int]:
    """Give the largest weights in order, and how many of them stay after top-k and top-p. [V]

    A few are enough where the model is sure of itself; else all are sorted.
    """
    size = len(weights)
    num_first = min(max(FIRST_SORTED, row.sampling.top_k), size)
    if 2 * num_first < size:
        ordered = weights.topk(num_first).values
        num_kept = _num_kept(ordered, row, total=weights.sum())
        if num_kept is not None:
            return ordered, num_kept
    ordered = _descending(weights)
    num_kept = _num_kept(ordered, row, total=None)
    assert num_kept is not None
    return ordered, num_kept


def _descending(weights: torch.Tensor) -> torch.Tensor:
    if weights.device.type == "cpu":
        return torch.from_numpy(np.sort(weights.numpy())[::-1].copy())  # twice as fast as torch's
    return weights.sort(descending=True).values


def _num_kept(ordered: torch.Tensor, row: SampleRow, *, total: torch.Tensor | None) -> int | None:
    """Give how many of the largest weights stay after top-k and top-p; None when more must be known to tell.

    Args:
        total: the sum of all weights when `ordered` holds only the largest, else None.
    """
    top_k, top_p = row.sampling.top_k, row.sampling.top_p
    kept = ordered[:top_k] if top_k else ordered
    if top_p == 1:
        return len(kept)
    share = top_p * (kept.sum() if top_k or total is None else total)
    num_kept = max(int((kept.cumsum(0) - kept < share).sum()), 1)  # the likeliest always stays
    is_open = total is not None and not top_k and num_kept == len(kept)
    return None if is_open else num_kept
