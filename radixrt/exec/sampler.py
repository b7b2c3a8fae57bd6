"""Logits, masks and parameters -> tokens, or why there is none; and logprobs, which are those of the raw logits.

Every row is computed from its own logits, parameters and number alone, so the batch never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from radixrt.errors import DeviceError, GrammarDeadEnd, RadixrtError
from radixrt.exec.batch import SampleRow, is_allowed, is_measured, unpack_masks
from radixrt.exec.draw import NEGATIVE_INFINITY, Draw, DrawnRow, Found, changes_logits, draw_rows
from radixrt.model.outputs import likeliest
from radixrt.sched.sequence import Sequence
from radixrt.types import TokenLogprob


def wants_logits(sequence: Sequence) -> bool:
    """Tell whether a sequence asks for more than the likeliest token that its mask allows. Pure."""
    sampling = sequence.sampling
    if not sampling.is_greedy or sampling.logprobs is not None or changes_logits(sampling):
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
        draw: draws where the likeliest token will not do.
    Returns: per row a token id, or the error that ends its sequence: GrammarDeadEnd when nothing is allowed,
        DeviceError when the logits are not numbers.
    """
    if not rows:
        return []
    known_ids, known_best = found or likeliest(logits)
    token_ids, best = list(known_ids), list(known_best)
    drawn = []
    for at, (row, token_id, value) in enumerate(zip(rows, known_ids, known_best, strict=True)):
        is_left = _is_left(row, token_id)
        if not (is_left and row.sampling.is_greedy):
            drawn.append(DrawnRow(at, row, (token_id, value) if is_left else None))
    if drawn:
        for (at, _, _), token_id, value in zip(drawn, *draw(logits, drawn), strict=True):
            token_ids[at], best[at] = token_id, value
    return [verdict(*outcome) for outcome in zip(token_ids, best, rows, strict=True)]


def verdict(token_id: int, best: float, row: SampleRow) -> int | RadixrtError:
    """Give a drawn token, or the error that its largest adjusted logit tells of. Pure."""
    if row.error is not None:
        return row.error
    if best == NEGATIVE_INFINITY and row.mask is not None:
        return GrammarDeadEnd("the constraint allows no token that the model has")
    if best != best or best in (NEGATIVE_INFINITY, float("inf")):
        return DeviceError(f"the model's logits are not finite (largest: {best})")
    return token_id


def _is_left(row: SampleRow, likeliest: int) -> bool:
    """Tell whether the likeliest token stays the likeliest: nothing applies but a mask, which allows it. Pure."""
    if row.banned_ids or changes_logits(row.sampling):
        return False
    return row.mask is None or is_allowed(row.mask, likeliest)


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
    if any(num_top):
        values, ids = (part.tolist() for part in logprobs.topk(max(num_top), dim=-1))
    else:  # to look for them would take longer than all else
        values = ids = [[]] * len(token_ids)
    return [
        TokenLogprob(token_id, chosen[row], tuple(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
