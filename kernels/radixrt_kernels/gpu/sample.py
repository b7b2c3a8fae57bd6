# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Sampling without a sort: two launches from raw logits to tokens and logprobs.

    adjust   [V] of a row in chunks, all in parallel: bias, penalties, mask; per chunk its largest logit and sums
    draw     one program per row: a bound from the chunks' largest, the few candidates within it, the exact
             threshold by bisection over them, one inverse of the cumulated weights; without filters the
             chunks' sums tell the chunk, and only that one is read again

A row is ordered by its gaps (largest logit minus logit), whose float32 bits order as integers do: the threshold is
an integer between 0 and the bits of infinity, found exactly, ties included.

Weights are float32 and their sums float64: a draw can differ from the float64 reference only where the uniform
number, or top_p, falls within about 1e-6 of the border between two tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt_kernels.gpu.checks import FLOAT_DTYPES, check_tensor
from radixrt_kernels.gpu.tiles import LOG2_E
from radixrt_kernels.reference_sampling import WORD_BITS, Sampled, SampleInputs

CHUNK = 128
BLOCK_CHUNKS = 32
DRAW_BLOCK = 2048
DRAW_GROUP = 16
ADJUST_WARPS = 8
DRAW_WARPS = 8
MAX_COLUMNS = 1 << 20
INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)
NO_TOKEN: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _bits(words, token, is_token):
    """Give bit `token` of packed words as bool."""
    word = tl.load(words + token // 32, mask=is_token, other=0)
    return ((word >> (token % 32)) & 1) != 0


@triton.jit
def adjust_kernel(
    logits, adjusted, chunk_top, chunk_best, chunk_sum, raw_top, raw_sum,
    numbers, mask, mask_rows, bias, bias_rows, output_counts, prompt_bits, penalty_rows,
    stride_logits, num_columns, num_tokens, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program per (row, CHUNKS chunks of CHUNK tokens)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    is_token = token < num_tokens
    num_words = (num_tokens + 31) // 32
    at = logits + row * stride_logits + token
    raw = tl.load(at, mask=token < num_columns, other=float("-inf")).to(tl.float32)
    top = tl.max(raw, 1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((raw - shift[:, None]) * LOG2_E), 1)
    is_chunk = chunk < num_chunks
    stats = row * num_chunks + chunk
    tl.store(raw_top + stats, top, mask=is_chunk)
    tl.store(raw_sum + stats, total, mask=is_chunk)
    value = raw
    place = tl.load(bias_rows + row).to(tl.int64)
    if place >= 0:
        value += tl.load(bias + place * num_tokens + token, mask=is_token, other=0.0)
    place = tl.load(penalty_rows + row).to(tl.int64)
    if place >= 0:
        repetition = tl.load(numbers + row * 6 + 3).to(tl.float32)
        presence = tl.load(numbers + row * 6 + 4).to(tl.float32)
        frequency = tl.load(numbers + row * 6 + 5).to(tl.float32)
        count = tl.load(output_counts + place * num_tokens + token, mask=is_token, other=0)
        is_seen = _bits(prompt_bits + place * num_words, token, is_token) | (count > 0)
        damped = tl.where(value > 0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
        value = tl.where(is_seen, damped, value)
        value -= frequency * count.to(tl.float32) + presence * (count > 0).to(tl.float32)
    is_allowed = is_token
    place = tl.load(mask_rows + row).to(tl.int64)
    if place >= 0:
        is_allowed = is_allowed & _bits(mask + place * num_words, token, is_token)
    value = tl.where(is_allowed, value, float("-inf"))
    tl.store(adjusted + row * num_tokens + token, value, mask=is_token)
    # A maximum may drop NaN, so it is looked for.
    is_nan = value != value
    value = tl.where(is_nan, float("-inf"), value)
    top = tl.max(value, 1)
    best = tl.min(tl.where(value == top[:, None], token, NO_TOKEN), 1)
    temperature = tl.load(numbers + row * 6).to(tl.float32)
    scale = LOG2_E / tl.where(temperature > 0, temperature, 1.0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((value - shift[:, None]) * scale).to(tl.float64), 1)
    has_nan = tl.max(is_nan.to(tl.int32), 1) > 0
    tl.store(chunk_top + stats, tl.where(has_nan, float("nan"), top), mask=is_chunk)
    tl.store(chunk_best + stats, best, mask=is_chunk)
    tl.store(chunk_sum + stats, total, mask=is_chunk)


@triton.jit
def _mix(value):
    """Scramble 64 bits: the finalizer of SplitMix64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(key):
    """Give reference_sampling.uniform of the three words at `key`, bit for bit; float64."""
    state = tl.load(key).to(tl.uint64, bitcast=True)
    sample_index = tl.load(key + 1).to(tl.uint64, bitcast=True)
    position = tl.load(key + 2).to(tl.uint64, bitcast=True)
    gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    one = tl.full([], 1, tl.uint64)
    state = _mix(state + gamma * (sample_index + one))
    state = _mix(state + gamma * (position + one))
    return (_mix(state + gamma) >> 11).to(tl.int64).to(tl.float64) * tl.full([], 2.0**-53, tl.float64)


@triton.jit
def _key(value, top):
    """Give the bits of the gap top - value >= 0: smaller = likelier. A gap of -0.0 counts as 0.0."""
    return (top - value).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weight(key, scale):
    """Give a key's weight relative to the likeliest token's; float32 in [0, 1]."""
    return tl.exp2(-key.to(tl.float32, bitcast=True) * scale)


@triton.jit
def _measure(values, num_values, top, scale, bound, BLOCK: tl.constexpr):
    """Give the number and the weight of the values whose key is at most `bound`."""
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float64)
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(values + index, mask=index < num_values, other=float("-inf"))
        key = _key(value, top)
        is_in = (key <= bound) & (index < num_values)
        count += tl.sum(is_in.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_in, _weight(key, scale), 0.0).to(tl.float64), 0)
    return count, mass


@triton.jit
def _search(values, num_values, top, scale, wanted_count, wanted_mass, BLOCK: tl.constexpr):
    """Give the smallest key within which there are at least so many values and so much weight."""
    low = tl.full([], -1, tl.int32)
    high = tl.full([], INFINITY_BITS, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        count, mass = _measure(values, num_values, top, scale, middle, BLOCK)
        is_reached = (count >= wanted_count) & (mass >= wanted_mass)
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle)
    return high


@triton.jit
def _gather(
    adjusted, tops, chunk_list, values, ids, num_tokens, top, bound,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the tokens whose key is at most `bound`, in order; give their number.

    Only the chunks whose largest logit is within the bound are read, GROUP at a time.
    """
    chunk = tl.arange(0, CHUNKS)
    is_listed = (tops > float("-inf")) & (_key(tops, top) <= bound)
    tl.store(chunk_list + tl.cumsum(is_listed.to(tl.int32), 0) - 1, chunk, mask=is_listed)
    num_listed = tl.sum(is_listed.to(tl.int32), 0)
    tl.debug_barrier()  # read below by other threads
    num_values = tl.zeros([], tl.int32)
    for start in range(0, num_listed, GROUP):
        index = start + tl.arange(0, GROUP)
        listed = tl.load(chunk_list + index, mask=index < num_listed, other=0)
        tokens = listed[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        is_token = (index < num_listed)[:, None] & (tokens < num_tokens)
        loaded = tl.load(adjusted + tokens, mask=is_token, other=float("-inf"))
        token = tl.reshape(tokens, [GROUP * CHUNK])
        value = tl.reshape(loaded, [GROUP * CHUNK])
        is_in = (value > float("-inf")) & (_key(value, top) <= bound)
        place = num_values + tl.cumsum(is_in.to(tl.int32), 0) - 1
        tl.store(values + place, value, mask=is_in)
        tl.store(ids + place, token, mask=is_in)
        num_values += tl.sum(is_in.to(tl.int32), 0)
    tl.debug_barrier()
    return num_values


@triton.jit
def _first_past(weight, before, target, place):
    """Give the first place whose cumulated weight exceeds the target, or NO_TOKEN; and the last with weight."""
    is_past = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
    first = tl.min(tl.where(is_past, place, NO_TOKEN), 0)
    return first, tl.max(tl.where(weight > 0, place, 0), 0)


@triton.jit
def _invert_all(
    adjusted, tops, sums, num_tokens, scale, uniform, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Give the token of a row without filters: first its chunk, by the chunks' sums, then its place in it."""
    chunk = tl.arange(0, CHUNKS)
    target = uniform * tl.sum(sums, 0)
    first, last = _first_past(sums, tl.zeros([], tl.float64), target, chunk)
    # Rounding may leave the target past the end of all, or of its chunk.
    first = tl.where(first == NO_TOKEN, last, first)
    before = tl.sum(tl.where(chunk < first, sums, 0.0), 0)
    token = first * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(adjusted + token, mask=token < num_tokens, other=float("-inf"))
    top = tl.max(value, 0)
    share = tl.sum(tl.where(chunk == first, sums, 0.0), 0)
    weight = _weight(_key(value, top), scale).to(tl.float64)
    place, last = _first_past(weight * (share / tl.sum(weight, 0)), before, target, token)
    return tl.where(place == NO_TOKEN, last, place)


@triton.jit
def _kept_weights(values, index, num_values, top, scale, bound, num_ties, ties_before, min_p):
    """Give the weights that the filters leave, float64, and the number of values at the bound so far.

    Of the values whose key is the bound itself, the first num_ties stay.
    """
    is_value = index < num_values
    value = tl.load(values + index, mask=is_value, other=float("-inf"))
    key = _key(value, top)
    weight = _weight(key, scale).to(tl.float64)
    is_tie = is_value & (key == bound)
    rank = ties_before + tl.cumsum(is_tie.to(tl.int32), 0) - 1
    is_kept = is_value & ((key < bound) | (is_tie & (rank < num_ties))) & (weight >= min_p)
    return tl.where(is_kept, weight, 0.0), ties_before + tl.sum(is_tie.to(tl.int32), 0)


@triton.jit
def _invert(
    values, num_values, top, scale, bound, num_ties, min_p, uniform, BLOCK: tl.constexpr
):  # fmt: skip
    """Give the place of the first value whose cumulated weight exceeds uniform times the sum of all."""
    total = tl.zeros([], tl.float64)
    ties = tl.zeros([], tl.int32)
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        weight, ties = _kept_weights(
            values, index, num_values, top, scale, bound, num_ties, ties, min_p
        )  # fmt: skip
        total += tl.sum(weight, 0)
    target = uniform * total
    before = tl.zeros([], tl.float64)
    ties = tl.zeros([], tl.int32)
    place = tl.full([], NO_TOKEN, tl.int32)
    last = tl.zeros([], tl.int32)  # should rounding leave the target past the end
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        weight, ties = _kept_weights(
            values, index, num_values, top, scale, bound, num_ties, ties, min_p
        )  # fmt: skip
        first, last_here = _first_past(weight, before, target, index)
        place = tl.minimum(place, first)
        last = tl.maximum(last, last_here)
        before += tl.sum(weight, 0)
    return tl.where(place == NO_TOKEN, last, place)


@triton.jit
def _threshold(values, num_values, top, scale, total, top_k, top_p, BLOCK: tl.constexpr):
    """Give the key down to which top-k and top-p keep tokens, and how many of those at it.

    total: the weight of all tokens; values: those that can be kept.
    """
    bound = tl.full([], INFINITY_BITS, tl.int32)
    num_ties = tl.full([], NO_TOKEN, tl.int32)
    if top_k > 0:
        bound = _search(values, num_values, top, scale, top_k, -1.0, BLOCK)
        count, mass = _measure(values, num_values, top, scale, bound - 1, BLOCK)
        num_ties = top_k - count
        total = mass + num_ties.to(tl.float64) * _weight(bound, scale).to(tl.float64)
    if top_p < 1.0:
        # A token stays while the weight before it is less than the target.
        target = top_p * total
        nucleus = _search(values, num_values, top, scale, 0, target, BLOCK)
        num_ties = tl.where(nucleus < bound, NO_TOKEN, num_ties)
        bound = tl.minimum(bound, nucleus)
        count, mass = _measure(values, num_values, top, scale, bound - 1, BLOCK)
        weight = _weight(bound, scale).to(tl.float64)
        wanted = tl.ceil((target - mass) / tl.where(weight > 0, weight, 1.0))
        wanted = tl.minimum(tl.maximum(wanted, 1.0), 1.0e9).to(tl.int32)
        num_ties = tl.where(weight > 0, tl.minimum(num_ties, wanted), num_ties)
    return bound, num_ties


@triton.jit
def _first_bound(
    row_tops, num_chunks, top, scale, total, top_k, top_p, min_p, CHUNKS: tl.constexpr
):  # fmt: skip
    """Give a key beyond which no token is kept, from the chunks' largest logits alone."""
    bound = tl.full([], INFINITY_BITS, tl.int32)
    if (top_k > 0) | (top_p < 1.0):
        # Enough of them, or enough weight, lie within it, so that the filters end there at the latest.
        wanted_mass = tl.where(top_k > 0, -1.0, top_p * total)
        bound = _search(row_tops, num_chunks, top, scale, top_k, wanted_mass, CHUNKS)
    if (min_p > 0.0) & ((top_k == 0) | (top_p >= 1.0)):
        # The weights of all top-k tokens are needed to know what top-p is a part of, else only those that stay.
        farthest = -tl.log2(min_p.to(tl.float32)) / scale * 1.001 + 1e-6
        bound = tl.minimum(bound, tl.maximum(farthest, 0.0).to(tl.int32, bitcast=True))
    return bound


@triton.jit
def draw_kernel(
    logits, adjusted, chunk_top, chunk_best, chunk_sum, raw_top, raw_sum, values, ids, chunk_list,
    numbers, top_ks, keys, token_ids, logprobs, bests,
    stride_logits, num_tokens, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    stats = row * num_chunks + chunk
    tops = tl.load(chunk_top + stats, mask=is_chunk, other=float("-inf"))
    has_nan = tl.max((tops != tops).to(tl.int32), 0) > 0
    tops = tl.where(tops != tops, float("-inf"), tops)
    top = tl.max(tops, 0)
    bests_of = tl.load(chunk_best + stats, mask=is_chunk, other=NO_TOKEN)
    token = tl.min(tl.where(tops == top, bests_of, NO_TOKEN), 0)
    tl.store(bests + row, tl.where(has_nan, float("nan"), top))
    temperature = tl.load(numbers + row * 6).to(tl.float32)
    is_usable = (has_nan == 0) & (top > float("-inf")) & (top < float("inf"))
    if is_usable & (temperature > 0):
        top_p = tl.load(numbers + row * 6 + 1)
        min_p = tl.load(numbers + row * 6 + 2)
        top_k = tl.load(top_ks + row)
        scale = LOG2_E / temperature
        uniform = _uniform(keys + row * 3)
        row_adjusted = adjusted + row * num_tokens
        sums = tl.load(chunk_sum + stats, mask=is_chunk, other=0.0)
        sums = sums * _weight(_key(tops, top), scale).to(tl.float64)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            total = tl.sum(sums, 0)
            row_values = values + row * num_tokens
            row_ids = ids + row * num_tokens
            row_tops = chunk_top + row * num_chunks
            row_list = chunk_list + row * num_chunks
            bound = _first_bound(row_tops, num_chunks, top, scale, total, top_k, top_p, min_p, CHUNKS)
            num_values = _gather(
                row_adjusted, tops, row_list, row_values, row_ids, num_tokens, top, bound, CHUNK, CHUNKS, GROUP
            )  # fmt: skip
            bound, num_ties = _threshold(row_values, num_values, top, scale, total, top_k, top_p, BLOCK)
            place = _invert(row_values, num_values, top, scale, bound, num_ties, min_p, uniform, BLOCK)
            token = tl.load(row_ids + place)
        else:
            token = _invert_all(row_adjusted, tops, sums, num_tokens, scale, uniform, CHUNK, CHUNKS)
    raw_tops = tl.load(raw_top + stats, mask=is_chunk, other=float("-inf"))
    raw_sums = tl.load(raw_sum + stats, mask=is_chunk, other=0.0)
    raw_best = tl.max(raw_tops, 0)
    total_raw = tl.sum(raw_sums * tl.exp2((raw_tops - raw_best) * LOG2_E), 0)
    token = tl.where(token < num_tokens, token, 0)  # every logit is NaN
    raw = tl.load(logits + row * stride_logits + token).to(tl.float32)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, raw - raw_best - tl.log2(total_raw) / LOG2_E)


def check_inputs(inputs: SampleInputs, num_rows: int, num_token_ids: int, device: torch.device) -> None:
    """Raise ValueError unless the parameters fit the logits."""
    num_words = -(-num_token_ids // WORD_BITS)
    int32, float32 = (torch.int32,), (torch.float32,)
    for name, tensor, shape, dtypes in (
        ("numbers", inputs.numbers, (num_rows, 6), (torch.float64,)),
        ("top_k", inputs.top_k, (num_rows,), int32),
        ("keys", inputs.keys, (num_rows, 3), (torch.int64,)),
        ("mask", inputs.mask, (None, num_words), int32),
        ("mask_rows", inputs.mask_rows, (num_rows,), int32),
        ("bias", inputs.bias, (None, num_token_ids), float32),
        ("bias_rows", inputs.bias_rows, (num_rows,), int32),
        ("output_counts", inputs.output_counts, (None, num_token_ids), int32),
        ("prompt_bits", inputs.prompt_bits, (None, num_words), int32),
        ("penalty_rows", inputs.penalty_rows, (num_rows,), int32),
    ):
        check_tensor(f"inputs.{name}", tensor, shape=shape, dtypes=dtypes, device=device)


def sample(
    logits: torch.Tensor, inputs: SampleInputs, *, num_token_ids: int, block: int = DRAW_BLOCK
) -> Sampled:
    """Draw one token per row. Arguments, result: see reference_sampling.sample.

    Args:
        block: tokens per step of a row's program.
    Raises:
        ValueError: shape, dtype or device differs (names the argument, expected, got).
    Cost: two launches, no sort and no read-back; scratch of 12 bytes per logit.
    """
    check_tensor("logits", logits, shape=(None, None), dtypes=FLOAT_DTYPES, is_contiguous=False)
    num_rows, num_columns = logits.shape
    if not 1 <= num_token_ids <= num_columns <= MAX_COLUMNS:
        raise ValueError(
            f"num_token_ids must be from 1 to the columns of logits (at most {MAX_COLUMNS}), "
            f"got {num_token_ids} for {num_columns} columns"
        )
    device = logits.device
    check_inputs(inputs, num_rows, num_token_ids, device)
    num_chunks = triton.cdiv(num_columns, CHUNK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    adjusted, values = (empty(num_rows, num_token_ids) for _ in range(2))
    ids = empty(num_rows, num_token_ids, dtype=torch.int32)
    tops, raw_tops, raw_sums = (empty(num_rows, num_chunks) for _ in range(3))
    bests, chunk_list = (empty(num_rows, num_chunks, dtype=torch.int32) for _ in range(2))
    sums = empty(num_rows, num_chunks, dtype=torch.float64)
    drawn = Sampled(empty(num_rows, dtype=torch.int64), empty(num_rows), empty(num_rows))
    if not num_rows:
        return drawn
    adjust_kernel[(num_rows, triton.cdiv(num_chunks, BLOCK_CHUNKS))](
        logits, adjusted, tops, bests, sums, raw_tops, raw_sums, inputs.numbers, inputs.mask,
        inputs.mask_rows, inputs.bias, inputs.bias_rows, inputs.output_counts, inputs.prompt_bits,
        inputs.penalty_rows, logits.stride(0), num_columns, num_token_ids, num_chunks,
        CHUNK=CHUNK, CHUNKS=BLOCK_CHUNKS, num_warps=ADJUST_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    draw_kernel[(num_rows,)](
        logits, adjusted, tops, bests, sums, raw_tops, raw_sums, values, ids, chunk_list,
        inputs.numbers, inputs.top_k, inputs.keys, drawn.token_ids, drawn.logprobs, drawn.best,
        logits.stride(0), num_token_ids, num_chunks,
        CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(num_chunks), GROUP=DRAW_GROUP, BLOCK=block, num_warps=DRAW_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return drawn
