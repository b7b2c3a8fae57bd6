"""Drawing a token from a row's weights, in plain torch. Defines what is correct.

logits -> mask -> temperature -> top-k -> top-p -> min-p -> inverse of the cumulated weights at one uniform number
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from radixrt.exec.batch import refusals
from radixrt.model.outputs import DrawRow

FIRST_SORTED = 1024


def draw_rows(rows: Seq[DrawRow], *, num_token_ids: int) -> list[int]:
    """Draw one token per row, from its own numbers alone; see `DrawRow`."""
    token_ids = [0] * len(rows)
    whole: dict[int, torch.Tensor] = {}  # of rows drawn from all that is allowed
    for index, row in enumerate(rows):
        values = row.logits[:num_token_ids]
        if row.mask is not None:
            values = values + refusals(row.mask, num_token_ids).to(values.device)
        if row.top_k or row.top_p < 1:
            token_ids[index] = _draw_filtered(values, row)
        else:
            whole[index] = values
    if whole:
        drawn = _draw_whole(torch.stack(list(whole.values())), [rows[index] for index in whole])
        for index, token_id in zip(whole, drawn.tolist(), strict=True):
            token_ids[index] = token_id
    return token_ids


def _draw_whole(logits: torch.Tensor, rows: Seq[DrawRow]) -> torch.Tensor:
    """Draw from each row's distribution, but for top-k and top-p. [N, V] -> [N]"""
    device = logits.device
    temperature = torch.tensor([row.temperature for row in rows], device=device, dtype=torch.float64)
    weights = _weights(logits, temperature[:, None])
    if any(row.min_p for row in rows):
        min_p = torch.tensor([row.min_p for row in rows], device=device, dtype=weights.dtype)
        weights = weights.masked_fill(weights < min_p[:, None] * weights.amax(dim=-1, keepdim=True), 0.0)
    cumulated = weights.cumsum(dim=-1)
    draws = torch.tensor([row.uniform for row in rows], device=device, dtype=weights.dtype)
    targets = draws[:, None] * cumulated[:, -1:]
    # The first place whose cumulated weight exceeds the target has a weight of its own.
    return torch.searchsorted(cumulated, targets, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def _weights(logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """Give the probabilities of adjusted logits, in float64."""
    return ((logits - logits.amax(dim=-1, keepdim=True)).double() / temperature).softmax(dim=-1)


def _draw_filtered(logits: torch.Tensor, row: DrawRow) -> int:
    """Draw from one row's distribution within top-k, top-p and min-p; of equal weights lower token ids stay. [V]"""
    weights = _weights(logits, row.temperature)
    ordered, num_kept = _kept(weights, row)
    least = ordered[num_kept - 1]
    above = (weights > least).nonzero().squeeze(1)
    equal = (weights == least).nonzero().squeeze(1)[: num_kept - len(above)]
    token_ids = torch.cat([above, equal]).sort().values
    chosen = weights[token_ids]
    chosen = chosen.masked_fill(chosen < row.min_p * ordered[0], 0.0)
    cumulated = chosen.cumsum(0)
    place = torch.searchsorted(cumulated, row.uniform * cumulated[-1:], right=True)
    return int(token_ids[place.clamp(max=len(token_ids) - 1)])


def _kept(weights: torch.Tensor, row: DrawRow) -> tuple[torch.Tensor, int]:
    """Give the largest weights in order, and how many of them stay after top-k and top-p. [V]

    A few are enough where the model is sure of itself; else all are sorted.
    """
    size = len(weights)
    num_first = min(max(FIRST_SORTED, row.top_k), size)
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


def _num_kept(ordered: torch.Tensor, row: DrawRow, *, total: torch.Tensor | None) -> int | None:
    """Give how many of the largest weights stay after top-k and top-p; None when more must be known to tell.

    Args:
        total: the sum of all weights when `ordered` holds only the largest, else None.
    """
    top_k, top_p = row.top_k, row.top_p
    kept = ordered[:top_k] if top_k else ordered
    if top_p == 1:
        return len(kept)
    share = top_p * (kept.sum() if top_k or total is None else total)
    num_kept = max(int((kept.cumsum(0) - kept < share).sum()), 1)  # the likeliest always stays
    is_open = total is not None and not top_k and num_kept == len(kept)
    return None if is_open else num_kept
