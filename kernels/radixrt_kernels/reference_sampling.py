"""The sampling rule on tensors, in plain torch with a sort. Defines what is correct.

    logits -> + bias -> penalties -> mask -> temperature -> top-k -> top-p -> min-p -> inverse of the cumulated
    weights at one uniform number

Every row is computed from its own logits and parameters alone. Logprobs are those of the raw logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NEGATIVE_INFINITY = float("-inf")
WORD_BITS = 32
# columns of SampleInputs.numbers
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
_MASK_64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """The parameters of S rows. N is the number of sequences that use a table.

    Attributes:
        numbers: [S, 6] float64: temperature (0 = the likeliest), top_p, min_p, repetition, presence and frequency
            penalty.
        top_k: [S] int32, 0 = all.
        keys: [S, 3] int64: seed, sample index, position; they alone decide the row's uniform number.
        mask, mask_rows: [N, ceil(V / 32)] int32, bit 1 = allowed; [S] int32, the row's mask or -1.
        bias, bias_rows: [N, V] float32, added to the logits; -inf bans; [S] int32, the row's bias or -1.
        output_counts, prompt_bits, penalty_rows: [N, V] int32, how often the output holds a token;
            [N, ceil(V / 32)] int32, whether the prompt does; [S] int32, the row's place in both, or -1 = no
            penalties.
    """

    numbers: torch.Tensor
    top_k: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor
    mask_rows: torch.Tensor
    bias: torch.Tensor
    bias_rows: torch.Tensor
    output_counts: torch.Tensor
    prompt_bits: torch.Tensor
    penalty_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn.

    Attributes:
        token_ids: [S] int64; meaningless where `best` is not finite.
        logprobs: [S] float32, natural, of the raw logits over all columns.
        best: [S] float32, the largest adjusted logit: -inf = nothing is allowed, NaN or inf = broken logits.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    best: torch.Tensor


def _mix(value: int) -> int:
    """Scramble 64 bits. Source: the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Give a number in [0, 1) for one token of one sample. Pure."""
    state = seed & _MASK_64
    for word in (sample_index, position):
        state = _mix((state + _GAMMA * (word + 1)) & _MASK_64)
    return float((_mix((state + _GAMMA) & _MASK_64) >> 11) * 2.0**-53)


def unpack_bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Give [W] int32 as [num_bits] bool, lowest bit first. Pure."""
    shifts = torch.arange(WORD_BITS, device=words.device, dtype=torch.int32)
    return ((words[:, None] >> shifts) & 1).flatten()[:num_bits].bool()


def sample(logits: torch.Tensor, inputs: SampleInputs, *, num_token_ids: int) -> Sampled:
    """Draw one token per row.

    Args:
        logits: [S, any >= num_token_ids], raw; columns from num_token_ids on are never drawn.
    """
    token_ids, best = [], []
    for row in range(len(logits)):
        adjusted = adjust(logits[row, :num_token_ids].float(), inputs, row)
        top = adjusted.max()
        token_id = adjusted.argmax()
        if inputs.numbers[row, TEMPERATURE] > 0 and bool(top.isfinite()):
            token_id = _draw(adjusted, inputs, row)
        best.append(top)
        token_ids.append(token_id)
    drawn = torch.stack(token_ids)
    logprobs = logits.float().log_softmax(-1).gather(1, drawn[:, None]).squeeze(1)
    return Sampled(drawn, logprobs, torch.stack(best))


def adjust(logits: torch.Tensor, inputs: SampleInputs, row: int) -> torch.Tensor:
    """Apply one row's bias, penalties and mask to its logits [V] float32. Pure.

    Sources: repetition penalty, CTRL (arXiv:1909.05858); presence and frequency as the OpenAI API defines them.
    """
    numbers = inputs.numbers[row].tolist()
    if (at := int(inputs.bias_rows[row])) >= 0:
        logits = logits + inputs.bias[at]
    if (at := int(inputs.penalty_rows[row])) >= 0:
        counts = inputs.output_counts[at]
        seen = unpack_bits(inputs.prompt_bits[at], len(logits)) | (counts > 0)
        damped = torch.where(logits > 0, logits / numbers[REPETITION], logits * numbers[REPETITION])
        logits = torch.where(seen, damped, logits)
        logits = logits - (numbers[FREQUENCY] * counts.float() + numbers[PRESENCE] * (counts > 0))
    if (at := int(inputs.mask_rows[row])) >= 0:
        logits = logits.masked_fill(~unpack_bits(inputs.mask[at], len(logits)), NEGATIVE_INFINITY)
    return logits


def _draw(adjusted: torch.Tensor, inputs: SampleInputs, row: int) -> torch.Tensor:
    """Draw from one row's filtered distribution; equal weights are ranked by token id."""
    numbers, top_k = inputs.numbers[row].tolist(), int(inputs.top_k[row])
    weights = ((adjusted - adjusted.max()).double() / numbers[TEMPERATURE]).softmax(-1)
    ordered, order = weights.sort(descending=True, stable=True)
    kept = ordered[:top_k] if top_k else ordered
    if numbers[TOP_P] < 1:
        before = kept.cumsum(0) - kept
        kept = kept[: max(int((before < numbers[TOP_P] * kept.sum()).sum()), 1)]
    filtered = torch.zeros_like(weights)
    filtered[order[: len(kept)]] = kept
    filtered = filtered.masked_fill(filtered < numbers[MIN_P] * filtered.max(), 0.0)
    cumulated = filtered.cumsum(0)
    target = uniform(*inputs.keys[row].tolist()) * cumulated[-1]
    # The first place whose cumulated weight exceeds the target has a weight of its own.
    return torch.searchsorted(cumulated, target, right=True).clamp(max=len(adjusted) - 1)
