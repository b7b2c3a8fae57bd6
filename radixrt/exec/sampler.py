"""Logits, masks and parameters -> tokens: the plain torch reference of the sampling rule.

    logits -> + bias -> penalties -> mask -> temperature -> top-k -> top-p -> min-p -> inverse of the cumulated
    probabilities at one uniform number

Every row is computed from its own logits, parameters and number alone, so the batch never changes an answer.
Logprobs are those of the raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from radixrt.errors import DeviceError, GrammarDeadEnd, RadixrtError
from radixrt.exec.batch import SampleRow, is_allowed, is_measured, refusals, unpack_masks
from radixrt.exec.draw import draw_rows
from radixrt.model.outputs import Draw, DrawRow, Mask, likeliest
from radixrt.sched.sequence import Sequence
from radixrt.types import SamplingParams, TokenLogprob

NEGATIVE_INFINITY = float("-inf")

Found = tuple[list[int], list[float]]  # of N rows: the likeliest token and its logit


def wants_logits(sequence: Sequence) -> bool:
    """Tell whether a sequence asks for more than the likeliest token that its mask allows. Pure."""
    sampling = sequence.sampling
    if not sampling.is_greedy or sampling.logprobs is not None or _changes_logits(sampling):
        return True
    return not sequence.allows_end if sequence.constraint is None else is_measured(sequence)


def take_likeliest(rows: Seq[SampleRow], found: Found) -> list[int | RadixrtError]:
    """Do `sample` for rows that want no logits, by the likeliest token that each one's mask allows."""
    return [verdict(*row) for row in zip(*found, rows, strict=True)]


def sample(
    logits: torch.Tensor, rows: Seq[SampleRow], *, found: Found | None = None, draw: Draw = draw_rows
) -> list[int | RadixrtError]:
    """Draw one token per row.

    Args:
        logits: [N, V] float32; not changed.
        found: `likeliest(logits)`, where it is known; it may heed the rows' masks.
        draw: draws where the likeliest token is not wanted.
    Returns: per row a token id, or the error that ends its sequence: GrammarDeadEnd when nothing is allowed,
        DeviceError when the logits are not numbers.
    """
    if not rows:
        return []
    known_ids, known_best = found or likeliest(logits)
    token_ids, best = list(known_ids), list(known_best)
    changed = [index for index, row in enumerate(rows) if not _is_settled(row, token_ids[index])]
    adjusted: dict[int, torch.Tensor] = {}
    if changed:
        values = _adjust(logits[changed], [rows[index] for index in changed])
        adjusted = dict(zip(changed, values.unbind(), strict=True))
        for index, token_id, value in zip(changed, *likeliest(values), strict=True):
            token_ids[index], best[index] = token_id, value
    drawn = [
        index for index, row in enumerate(rows) if not row.sampling.is_greedy and math.isfinite(best[index])
    ]
    wanted = [
        _draw_row(adjusted[index], best[index], rows[index], mask=None)
        if index in adjusted
        else _draw_row(logits[index], best[index], rows[index], mask=rows[index].mask)
        for index in drawn
    ]
    if wanted:
        for index, token_id in zip(drawn, draw(wanted, num_token_ids=logits.shape[1]), strict=True):
            token_ids[index] = token_id
    return [verdict(*found) for found in zip(token_ids, best, rows, strict=True)]


def verdict(token_id: int, best: float, row: SampleRow) -> int | RadixrtError:
    """Give a drawn token, or the error that its largest adjusted logit tells of. Pure."""
    if row.error is not None:
        return row.error
    if best == NEGATIVE_INFINITY and row.mask is not None:
        return GrammarDeadEnd("the constraint allows no token that the model has")
    if best != best or best in (NEGATIVE_INFINITY, float("inf")):
        return DeviceError(f"the model's logits are not finite (largest: {best})")
    return token_id


def _draw_row(logits: torch.Tensor, best: float, row: SampleRow, *, mask: Mask | None) -> DrawRow:
    sampling = row.sampling
    numbers = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, row.uniform)
    return DrawRow(logits, mask, best, *numbers)


def _is_settled(row: SampleRow, likeliest: int) -> bool:
    """Tell whether a row's raw logits will do: nothing applies but a mask, and that allows the likeliest token."""
    return not _is_adjusted(row) and (row.mask is None or is_allowed(row.mask, likeliest))


def _is_adjusted(row: SampleRow) -> bool:
    """Tell whether something besides a mask changes a row's logits."""
    return bool(row.banned_ids) or _changes_logits(row.sampling)


def _changes_logits(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias) or has_penalty(sampling)


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


def has_penalty(sampling: SamplingParams) -> bool:
    """Tell whether tokens that are there already change a row. Pure."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


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


def removed_probability(logits: torch.Tensor, rows: Seq[SampleRow]) -> list[float | None]:
    """Give the share of each row's probability that its mask takes away, 0 to 1; None where it is not measured.

    Two passes over a row of logits cost more than most masks, so a few are looked at (`is_measured`).

    Args:
        logits: [N, V] float32, raw.
    """
    found: list[float | None] = [None] * len(rows)
    wanted = [
        index
        for index, row in enumerate(rows)
        if row.mask is not None and row.error is None and is_measured(row.sequence)
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
