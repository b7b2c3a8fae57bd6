"""The sampler without a sort against the sorting reference: on a GPU, else in Triton's interpreter."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from radixrt_kernels import reference_sampling
from radixrt_kernels.gpu.sample import sample
from radixrt_kernels.reference_sampling import SampleInputs, unpack_bits

from radixrt.exec.randomness import uniform
from tests.support.paged import DEVICE

# The interpreter computes with numpy, which warns of what kernels meet on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
NUM_TOKENS = 1000  # 7 whole chunks and a part
NEUTRAL = (1.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """Give [N, V] bool as [N, ceil(V / 32)] int32."""
    packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    padded = np.zeros((len(packed), -(-allowed.shape[1] // 32) * 4), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return torch.from_numpy(padded.view(np.int32))


def make_inputs(numbers, *, top_k=None, num_tokens=NUM_TOKENS, **tables) -> SampleInputs:
    """Give parameters without bias, masks and penalties, unless `tables` holds some."""
    num_rows = len(numbers)
    none = torch.full((num_rows,), -1, dtype=torch.int32)
    num_words = -(-num_tokens // 32)
    fields = {
        "numbers": torch.tensor(numbers, dtype=torch.float64),
        "top_k": torch.tensor(top_k or [0] * num_rows, dtype=torch.int32),
        "keys": torch.tensor([[1234567 + row, row % 3, 10 * row] for row in range(num_rows)]),
        "mask": torch.zeros(0, num_words, dtype=torch.int32),
        "mask_rows": none,
        "bias": torch.zeros(0, num_tokens),
        "bias_rows": none,
        "output_counts": torch.zeros(0, num_tokens, dtype=torch.int32),
        "prompt_bits": torch.zeros(0, num_words, dtype=torch.int32),
        "penalty_rows": none,
    }
    return SampleInputs(**{name: value.to(DEVICE) for name, value in {**fields, **tables}.items()})


def random_logits(num_rows, num_columns=NUM_TOKENS, *, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, num_columns, generator=generator) * spread).to(DEVICE)


def assert_equal_to_reference(logits, inputs, *, num_token_ids=NUM_TOKENS, **options):
    expected = reference_sampling.sample(logits, inputs, num_token_ids=num_token_ids)
    got = sample(logits, inputs, num_token_ids=num_token_ids, **options)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.equal(got.best, expected.best)
    torch.testing.assert_close(got.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    return got


def test_every_filter_alone_and_together():
    rows = [
        # temperature, top_p, min_p; top_k
        ((0.0, 1.0, 0.0), 0),
        ((1.0, 1.0, 0.0), 0),
        ((0.7, 1.0, 0.0), 1),
        ((1.3, 1.0, 0.0), 5),
        ((1.0, 1.0, 0.0), 400),  # more than there are chunks
        ((1.0, 1.0, 0.0), 5000),  # more than there are tokens
        ((0.8, 0.9, 0.0), 0),
        ((5.0, 0.999, 0.0), 0),
        ((1.0, 1e-9, 0.0), 0),
        ((1.0, 1.0, 0.05), 0),
        ((1.0, 0.9, 0.05), 0),
        ((1.0, 1.0, 0.05), 7),
        ((1.0, 1.0, 1.0), 0),
        ((1.5, 0.8, 0.02), 20),
        ((1.5, 0.3, 0.0), 20),
        ((1.5, 0.99, 0.3), 3),
    ]
    numbers = [(*three, 1.0, 0.0, 0.0) for three, _ in rows]
    inputs = make_inputs(numbers, top_k=[top_k for _, top_k in rows])
    assert_equal_to_reference(random_logits(len(rows)), inputs)


def test_many_draws_of_one_distribution():
    num_rows = 40
    logits = random_logits(1, spread=1.0).expand(num_rows, -1)
    drawn = assert_equal_to_reference(logits, make_inputs([NEUTRAL] * num_rows))
    assert len(set(drawn.token_ids.tolist())) > 10


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_ties_at_top_k_are_ranked_by_token_id(top_k):
    logits = torch.full((2, NUM_TOKENS), -20.0, device=DEVICE)
    logits[:, [7, 130, 131, 400, 999]] = 2.0
    logits[:, 500] = 3.0
    drawn = assert_equal_to_reference(logits, make_inputs([NEUTRAL] * 2, top_k=[top_k] * 2))
    allowed = [500, 7, 130, 131, 400, 999]
    if top_k <= len(allowed):
        assert set(drawn.token_ids.tolist()) <= set(allowed[:top_k])


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.125, 1), (0.5, 4), (0.5000001, 5), (0.75, 6), (1.0, 8)])
def test_ties_at_top_p_are_ranked_by_token_id(top_p, num_kept):
    # eight equal weights: their sums are exact
    at = [3, 200, 201, 300, 640, 641, 900, 998]
    logits = torch.full((2, NUM_TOKENS), -math.inf, device=DEVICE)
    logits[:, at] = 1.5
    drawn = assert_equal_to_reference(logits, make_inputs([(1.0, top_p, 0.0, 1.0, 0.0, 0.0)] * 2))
    assert set(drawn.token_ids.tolist()) <= set(at[:num_kept])


def test_ties_at_both_filters():
    logits = torch.full((4, NUM_TOKENS), -math.inf, device=DEVICE)
    logits[:, [3, 200, 300, 640, 900, 998]] = 1.5
    # of 4 equal ones, less than 0.75 of the weight lies before the first 3
    inputs = make_inputs([(1.0, 0.75, 0.0, 1.0, 0.0, 0.0)] * 4, top_k=[4] * 4)
    drawn = assert_equal_to_reference(logits, inputs)
    assert set(drawn.token_ids.tolist()) <= {3, 200, 300}


def test_zero_has_no_sign():
    logits = torch.full((2, NUM_TOKENS), -0.0, device=DEVICE)
    logits[:, 1::2] = 0.0
    inputs = make_inputs([NEUTRAL, (1.0, 0.1, 0.0, 1.0, 0.0, 0.0)], top_k=[3, 0])
    drawn = assert_equal_to_reference(logits, inputs)
    assert drawn.token_ids[0] < 3
    assert drawn.token_ids[1] < 100


def test_bias_penalties_and_masks():
    generator = torch.Generator().manual_seed(9)
    numbers = [
        NEUTRAL,
        (1.0, 0.9, 0.0, 1.3, 0.5, 0.2),
        (0.0, 1.0, 0.0, 2.0, 0.0, 0.0),
        (0.8, 1.0, 0.0, 0.7, -0.5, 0.1),
        (1.0, 1.0, 0.0, 1.0, 0.0, 1.5),
        (0.0, 1.0, 0.0, 1.0, 0.0, 0.0),
    ]
    rows = {
        "mask_rows": torch.tensor([0, -1, 1, 0, -1, 2], dtype=torch.int32),
        "bias_rows": torch.tensor([1, -1, 0, -1, 0, -1], dtype=torch.int32),
        "penalty_rows": torch.tensor([-1, 0, 1, 2, 0, -1], dtype=torch.int32),
    }
    mask = torch.rand(3, NUM_TOKENS, generator=generator) < 0.3
    mask[2] = False
    mask[2, 777] = True
    bias = torch.randn(2, NUM_TOKENS, generator=generator)
    bias[:, ::3] = -math.inf
    inputs = make_inputs(
        numbers,
        mask=pack(mask),
        bias=bias,
        output_counts=torch.poisson(torch.full((3, NUM_TOKENS), 0.5), generator=generator).int(),
        prompt_bits=pack(torch.rand(3, NUM_TOKENS, generator=generator) < 0.5),
        **rows,
    )
    drawn = assert_equal_to_reference(random_logits(6), inputs, block=512)
    assert drawn.token_ids[5] == 777
    assert torch.equal(unpack_bits(inputs.mask[0], NUM_TOKENS).cpu(), mask[0])


def test_padding_columns_are_never_drawn_but_count_in_logprobs():
    logits = random_logits(4, NUM_TOKENS + 200)
    logits[:, NUM_TOKENS:] += 50.0
    drawn = assert_equal_to_reference(logits, make_inputs([NEUTRAL, (0.0, *NEUTRAL[1:])] * 2))
    assert drawn.token_ids.max() < NUM_TOKENS
    assert drawn.logprobs.max() < -20


def test_rows_with_nothing_to_draw_say_so():
    logits = random_logits(5)
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[4, 4] = math.nan  # masked away: no harm
    mask = torch.zeros(2, NUM_TOKENS, dtype=torch.bool)
    mask[1, 5:9] = True
    inputs = make_inputs(
        [NEUTRAL] * 5, mask=pack(mask), mask_rows=torch.tensor([0, -1, -1, -1, 1], dtype=torch.int32)
    )
    best = sample(logits, inputs, num_token_ids=NUM_TOKENS).best.tolist()
    assert best[0] == -math.inf
    assert math.isnan(best[1])
    assert best[2] == math.inf
    assert math.isfinite(best[3])
    assert best[4] == logits[4, 5:9].max().item()


def test_a_row_does_not_depend_on_its_neighbours():
    numbers = [NEUTRAL, (0.9, 0.8, 0.0, 1.0, 0.0, 0.0), (1.0, 1.0, 0.1, 1.0, 0.0, 0.0)]
    logits, inputs = random_logits(3), make_inputs(numbers, top_k=[0, 30, 0])
    together = sample(logits, inputs, num_token_ids=NUM_TOKENS)
    for row in range(3):
        one = replace(
            inputs,
            **{
                name: getattr(inputs, name)[row : row + 1]
                for name in ("numbers", "top_k", "keys", "mask_rows", "bias_rows", "penalty_rows")
            },
        )
        alone = sample(logits[row : row + 1], one, num_token_ids=NUM_TOKENS)
        assert alone.token_ids.item() == together.token_ids[row].item()
        assert alone.logprobs.item() == together.logprobs[row].item()


@pytest.mark.parametrize("key", [(0, 0, 0), (-1, 3, 70), (2**63 - 1, 0, 131_072), (-(2**63), 7, 1)])
def test_uniform_number_is_the_runtimes_bit_for_bit(key):
    # Equal weights: the token is the uniform number's place among 1000, which float64 decides.
    logits = torch.zeros(1, NUM_TOKENS, device=DEVICE)
    inputs = replace(make_inputs([NEUTRAL]), keys=torch.tensor([key], device=DEVICE))
    assert reference_sampling.uniform(*key) == uniform(*key)
    drawn = sample(logits, inputs, num_token_ids=NUM_TOKENS)
    assert drawn.token_ids.item() == int(uniform(*key) * NUM_TOKENS)


def test_wrong_arguments_are_refused():
    logits, inputs = random_logits(2), make_inputs([NEUTRAL] * 2)
    with pytest.raises(ValueError, match="num_token_ids must be from 1 to the columns"):
        sample(logits, inputs, num_token_ids=NUM_TOKENS + 1)
    with pytest.raises(ValueError, match=r"inputs.mask must have shape \[any, 31\], got \[0, 32\]"):
        sample(logits, inputs, num_token_ids=NUM_TOKENS - 10)
    with pytest.raises(ValueError, match=r"inputs\.top_k must be torch\.int32, got torch\.int64"):
        sample(logits, replace(inputs, top_k=inputs.top_k.long()), num_token_ids=NUM_TOKENS)
