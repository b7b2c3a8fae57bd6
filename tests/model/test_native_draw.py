"""Tokens that the CPU kernels draw are those that the plain rule draws (src/draw.h)."""

import itertools
import math
import shutil

import numpy as np
import pytest
import torch
from radixrt_kernels.cpu.build import COMPILER

from radixrt.exec.batch import refusals
from radixrt.exec.draw import draw_rows
from radixrt.model.outputs import DrawRow
from tests.model.test_native import build
from tests.support.models import tiny_model
from tests.support.variants import VARIANT_NAMES

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")

SIZES = (1, 40, 1357)
UNIFORMS = (1e-12, 0.01731, 0.31337, 0.50021, 0.77123, 0.99171, 0.999999)  # no borders between equal weights
# temperature, top_k, top_p, min_p; no top_p that equal weights add up to
NUMBERS = (
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1e-6, 0, 1.0, 0.0),
    (5e-324, 0, 1.0, 0.0),
    (100.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.13),
    (1.0, 0, 1.0, 1.0),
    (1.0, 1, 1.0, 0.0),
    (5.0, 5, 1.0, 0.0),
    (5.0, 700, 1.0, 0.0),
    (1.0, 1 << 62, 1.0, 0.0),
    (1.0, 0, 0.6123, 0.0),
    (2.0, 0, 0.98765, 0.0),
    (2.0, 0, 1e-9, 0.0),
    (100.0, 2, 5e-324, 0.0),
    (2.0, 100, 0.7123, 0.0),
    (2.0, 20, 0.9123, 0.1),
)
LOGITS = {
    "normal": lambda x: 3 * x,
    "peaked": lambda x: 3 * x + 12.0 * (torch.arange(len(x)) == len(x) // 2),
    "flat": lambda x: 0.01 * x,
    "equal": torch.zeros_like,
    "many equal": lambda x: (2 * x).round(),
    "far apart": lambda x: 1000 * x,
    "high": lambda x: 3 * x + 3e4,
    "banned": lambda x: torch.where((torch.arange(len(x)) % 3 > 0) & (x < x.max()), -math.inf, 3 * x),
}


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    folder = tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")
    return {variant: build(folder, variant=variant, num_threads=3) for variant in VARIANT_NAMES}


@pytest.fixture(params=VARIANT_NAMES)
def decoder(request, decoders):
    return decoders[request.param]


def assert_drawn(decoders, rows, num_token_ids):
    expected = draw_rows(rows, num_token_ids=num_token_ids)
    for variant, decoder in decoders.items():
        assert decoder.draw(rows, num_token_ids=num_token_ids) == expected, variant


def logits_of(kind, size, seed):
    generator = torch.Generator().manual_seed(seed)
    return LOGITS[kind](torch.randn(size, generator=generator)).float()


def mask_of(share, size, seed):
    """Allow a share of tokens, at least one; the bits after the last one say nothing."""
    rng = np.random.default_rng(seed)
    allowed = np.ones(size + -size % 32, np.bool_)
    allowed[:size] = rng.random(size) < share
    allowed[rng.integers(size)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


def row_of(logits, mask, numbers, uniform):
    values = logits if mask is None else logits + refusals(mask, len(logits))
    best = float(values.max())
    if math.isinf(best):  # the mask allows banned tokens only
        return row_of(logits, None, numbers, uniform)
    return DrawRow(logits, mask, best, *numbers, uniform)


@pytest.mark.parametrize("kind", LOGITS)
def test_tokens_are_those_of_the_plain_rule(decoders, kind):
    for seed, size in enumerate(SIZES):
        logits = logits_of(kind, size, seed)
        for share in (None, 0.9, 0.02):
            mask = None if share is None else mask_of(share, size, seed)
            rows = [
                row_of(logits, mask, numbers, uniform)
                for numbers, uniform in itertools.product(NUMBERS, UNIFORMS)
            ]
            assert_drawn(decoders, rows, size)


def test_a_large_vocabulary_is_drawn_from_alike(decoders):
    """Bands of weights are split before they are sorted; equal ones cannot be."""
    for seed, kind in enumerate(("normal", "flat", "many equal")):
        logits = logits_of(kind, 49_152, seed)
        for mask in (None, mask_of(0.7, 49_152, seed)):
            rows = [row_of(logits, mask, numbers, 0.61803) for numbers in NUMBERS]
            assert_drawn(decoders, rows, 49_152)


def test_padding_is_never_drawn(decoder):
    logits = torch.zeros(64)
    logits[50:] = 30.0
    rows = [DrawRow(logits, None, 0.0, *NUMBERS[4], uniform) for uniform in UNIFORMS]
    drawn = decoder.draw(rows, num_token_ids=50)
    assert drawn == draw_rows(rows, num_token_ids=50)
    assert max(drawn) == 49


def test_zero_draws_the_first_token_that_has_a_weight(decoder):
    logits = torch.tensor([-math.inf, -1e4, -1.0, 0.0])
    for mask, expected in ((None, 2), (np.array([0b1011], np.int32), 3)):
        row = DrawRow(logits, mask, 0.0, 1.0, 0, 1.0, 0.0, 0.0)
        assert decoder.draw([row], num_token_ids=4) == draw_rows([row], num_token_ids=4) == [expected]


def test_rows_do_not_see_one_another(decoder):
    rows = [
        row_of(logits_of("normal", 513, seed), mask_of(0.5, 513, seed) if seed % 2 else None, numbers, 0.4)
        for seed, numbers in enumerate(NUMBERS)
    ]
    alone = [decoder.draw([row], num_token_ids=513)[0] for row in rows]
    assert decoder.draw(rows, num_token_ids=513) == alone
    assert decoder.draw([], num_token_ids=513) == []


def test_frequencies_follow_the_probabilities(decoder):
    logits = torch.tensor([0.0, math.log(2.0), math.log(5.0)])
    rows = [DrawRow(logits, None, math.log(5.0), 1.0, 0, 1.0, 0.0, (i + 0.5) / 8000) for i in range(8000)]
    drawn = decoder.draw(rows, num_token_ids=3)
    assert [drawn.count(token_id) for token_id in range(3)] == [1000, 2000, 5000]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(40, dtype=torch.float64)}, "logits must be float32 in one row on the CPU"),
        ({"logits": torch.zeros(2, 40)}, "logits must be float32 in one row"),
        ({"logits": torch.zeros(80)[::2]}, "logits must be float32 in one row"),
        ({"logits": torch.zeros(39)}, r"num_token_ids must be in \[1, 39\], got 40"),
        ({"mask": np.ones(1, np.int32)}, r"a mask must be \[2\] int32"),
        ({"best": -math.inf}, "best must be finite"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"temperature": math.nan}, "temperature > 0"),
        ({"top_k": -1}, "top_k >= 0"),
        ({"uniform": 1.0}, r"uniform in \[0, 1\)"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(decoder, changed, message):
    row = DrawRow(torch.zeros(40), None, 0.0, 1.0, 0, 1.0, 0.0, 0.5)
    with pytest.raises(ValueError, match=message):
        decoder.draw([row, row._replace(**changed)], num_token_ids=40)
