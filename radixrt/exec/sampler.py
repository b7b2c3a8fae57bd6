"""Logits, masks and parameters -> tokens: the plain torch reference of the sampling rule.

    logits -> + bias -> penalties -> mask -> temperature -> top-k -> top-p -> min-p -> inverse of the cumulated
    probabilities at one uniform number

Every row is computed from its own logits, parameters and number alone, so the batch never changes an answer.
Logprobs are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from radixrt.errors import DeviceError, GrammarDeadEnd, RadixrtError
from radixrt.exec.batch import SampleRow, unpack_masks
from radixrt.types import TokenLogprob

NEGATIVE_INFINITY = float("-inf")


def sample(logits: torch.Tensor, rows: Seq[SampleRow]) -> list[int | RadixrtError]:
    """Draw one token per row.

    Args:
        logits: [N, V] float32; not changed.
    Returns: per row a token id, or the error that ends its sequence: GrammarDeadEnd when nothing is allowed,
        DeviceError when the logits are not numbers.
    """
    if not rows:
        return []
    adjusted = _adjust(logits, rows)
    best = adjusted.max(dim=-1)
    token_ids = best.indices
    drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if drawn:
        token_ids = token_ids.index_copy(
            0,
            torch.tensor(drawn, device=logits.device),
            _draw(adjusted[drawn], [rows[index] for index in drawn]),
        )
    values = zip(token_ids.tolist(), best.values.tolist(), rows, strict=True)
    return [_verdict(token_id, value, row) for token_id, value, row in values]


def _verdict(token_id: int, best: float, row: SampleRow) -> int | RadixrtError:
    if row.error is not None:
        return row.error
    if best == NEGATIVE_INFINITY and row.mask is not None:
        return GrammarDeadEnd("the constraint allows no token that the model has")
    if best != best or best in (NEGATIVE_INFINITY, float("inf")):
        return DeviceError(f"the model's logits are not finite (largest: {best})")
    return token_id


def _adjust(logits: torch.Tensor, rows: Seq[SampleRow]) -> torch.Tensor:
    """Give a copy of the logits with bias, penalties, bans and masks applied. [N, V]."""
    logits = logits.clone()
    vocab_size = logits.shape[1]
    for index, row in enumerate(rows):
        sampling = row.sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
            bias = torch.tensor(list(sampling.logit_bias.values()), device=logits.device, dtype=logits.dtype)
            logits[index, ids] += bias
        if _has_penalty(row):
            _penalize(logits[index], row)
        if row.banned_ids:
            logits[index, list(row.banned_ids)] = NEGATIVE_INFINITY
    masked = [index for index, row in enumerate(rows) if row.mask is not None]
    if masked:
        allowed = unpack_masks([row.mask for row in rows if row.mask is not None], vocab_size)
        logits[masked] = logits[masked].masked_fill(~allowed.to(logits.device), NEGATIVE_INFINITY)
    return logits


def _has_penalty(row: SampleRow) -> bool:
    sampling = row.sampling
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (
        1.0,
        0.0,
        0.0,
    )


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


def _draw(logits: torch.Tensor, rows: Seq[SampleRow]) -> torch.Tensor:
    """Draw from each row's filtered distribution. [N, V] -> [N]"""
    device = logits.device
    temperature = torch.tensor([row.sampling.temperature for row in rows], device=device, dtype=torch.float64)
    scaled = (logits - logits.max(dim=-1, keepdim=True).values).double() / temperature[:, None]
    weights = scaled.softmax(dim=-1)
    filtered = [index for index, row in enumerate(rows) if row.sampling.top_k or row.sampling.top_p < 1]
    for index in filtered:
        weights[index] = _filter_row(weights[index], rows[index])
    min_p = torch.tensor([row.sampling.min_p for row in rows], device=device, dtype=weights.dtype)
    weights = weights.masked_fill(weights < min_p[:, None] * weights.max(dim=-1, keepdim=True).values, 0.0)
    cumulated = weights.cumsum(dim=-1)
    draws = torch.tensor([row.uniform for row in rows], device=device, dtype=weights.dtype)
    targets = draws[:, None] * cumulated[:, -1:]
    # The first place whose cumulated weight exceeds the target has a weight of its own.
    return torch.searchsorted(cumulated, targets, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def _filter_row(weights: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Zero the weights outside top-k and then top-p; equal weights are ranked by token id. [V]"""
    ordered, order = weights.sort(descending=True, stable=True)
    num_kept = len(weights)
    if row.sampling.top_k:
        num_kept = min(row.sampling.top_k, num_kept)
    kept = ordered[:num_kept]
    if row.sampling.top_p < 1:
        before = kept.cumsum(0) - kept
        num_kept = max(int((before < row.sampling.top_p * kept.sum()).sum()), 1)  # the likeliest always stays
        kept = kept[:num_kept]
    result = torch.zeros_like(weights)
    result[order[: len(kept)]] = kept
    return result


def removed_probability(logits: torch.Tensor, rows: Seq[SampleRow]) -> list[float | None]:
    """Give the share of each row's probability that its mask takes away, 0 to 1; None where it is not measured.

    Two passes over a row of logits cost more than most masks, so one masked row in MEASURE_EVERY is looked at.

    Args:
        logits: [N, V] float32, raw.
    """
    found: list[float | None] = [None] * len(rows)
    wanted = [
        index
        for index, row in enumerate(rows)
        if row.mask is not None and row.error is None and row.is_measured
    ]
    if wanted:
        allowed = unpack_masks(
            [row.mask for index in wanted if (row := rows[index]).mask is not None], logits.shape[1]
        )
        chosen = logits[wanted]
        weights = (chosen - chosen.max(dim=-1, keepdim=True).values).exp_()
        total = weights.sum(dim=-1)
        kept = weights.mul_(allowed.to(logits.device)).sum(dim=-1)
        for index, value in zip(wanted, (1 - kept / total).clamp(0, 1).tolist(), strict=True):
            found[index] = value
    return found


def token_logprobs(
    logits: torch.Tensor, token_ids: Seq[int], num_top: Seq[int], *, num_token_ids: int | None = None
) -> list[TokenLogprob]:
    """Give the natural-log probability of one token per row, with the row's likeliest alternatives.

    Args:
        logits: [N, V] float32, raw.
        token_ids, num_top: N token ids; how many alternatives each row reports, best first.
        num_token_ids: alternatives are below this id; a model's padding columns count in the sum only.
    """
    if not token_ids:
        return []
    logprobs = logits.log_softmax(dim=-1)[:, :num_token_ids]
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]).squeeze(1).tolist()
    top = logprobs.topk(max(max(num_top), 1), dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprob(token_id, chosen[row], tuple(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
