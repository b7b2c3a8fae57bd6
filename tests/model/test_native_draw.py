"""Tokens that the CPU kernels draw are those that the plain rule draws (src/draw.h), logits and all to the bit."""

import itertools
import math
import shutil
from array import array

import numpy as np
import pytest
import torch
from radixrt_kernels.cpu.build import COMPILER

from radixrt.exec.batch import SampleRow
from radixrt.exec.draw import DrawnRow
from radixrt.exec.draw import draw_rows as plain_rule
from radixrt.exec.native_draw import NativeDraw
from radixrt.model.attention import cpu
from radixrt.sched.sequence import Sequence
from radixrt.types import GenerateRequest, SamplingParams
from tests.model.test_native import build
from tests.support.models import tiny_model
from tests.support.variants import VARIANT_NAMES

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")

SIZES = (1, 40, 1357)
UNIFORMS = (1e-12, 0.01731, 0.31337, 0.50021, 0.77123, 0.99171, 0.999999)  # no borders between equal weights
SETTINGS = (  # no top_p that equal weights add up to
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-6},
    {"temperature": 100.0},
    {"min_p": 0.13},
    {"min_p": 1.0},
    {"top_k": 1},
    {"temperature": 5.0, "top_k": 5},
    {"temperature": 5.0, "top_k": 700},
    {"top_k": 1 << 20},
    {"top_p": 0.6123},
    {"temperature": 2.0, "top_p": 0.98765},
    {"temperature": 2.0, "top_p": 1e-9},
    {"temperature": 100.0, "top_k": 2, "top_p": 5e-324},
    {"temperature": 2.0, "top_k": 100, "top_p": 0.7123},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9123, "min_p": 0.1},
)
ADJUSTMENTS = (
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": 0.3},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7},
    {"frequency_penalty": 0.3},
    {"logit_bias": {3: 100.0, 0: -2.5, 17: 0.3}},
    {"logit_bias": {5: 2.0}, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
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


def by_rows(draw):
    """Draw from one row of logits each."""

    def draw_each(logits, rows, known=None):
        likeliest = known or [None] * len(rows)
        drawn = [DrawnRow(at, row, pair) for at, (row, pair) in enumerate(zip(rows, likeliest, strict=True))]
        return draw(torch.stack(list(logits)), drawn)

    return draw_each


draw_rows = by_rows(plain_rule)


@pytest.fixture(scope="module")
def draws(tmp_path_factory):
    folder = tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")
    return {
        variant: by_rows(NativeDraw(build(folder, variant=variant, num_threads=3).native))
        for variant in VARIANT_NAMES
    }


@pytest.fixture(params=VARIANT_NAMES)
def draw(request, draws):
    return draws[request.param]


def found_of(drawn):
    """What is no number equals itself here."""
    return [
        (None, None) if math.isnan(value) else (token_id, value)
        for token_id, value in zip(*drawn, strict=True)
    ]


def assert_drawn(draws, logits, rows):
    expected = found_of(draw_rows(logits, rows))
    for variant, draw in draws.items():
        assert found_of(draw(logits, rows)) == expected, variant


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


def row_of(uniform=0.5, *, mask=None, banned=(), prompt=(1, 2, 3), output=(4, 4, 9), **sampling):
    sequence = Sequence(GenerateRequest(tuple(prompt), SamplingParams(**sampling)), arrival=0, seed=0)
    sequence.token_ids.extend(array("i", output))
    return SampleRow(sequence, uniform, mask, tuple(banned))


@pytest.mark.parametrize("kind", LOGITS)
def test_tokens_are_those_of_the_plain_rule(draws, kind):
    for seed, size in enumerate(SIZES):
        logits = logits_of(kind, size, seed)
        for share in (None, 0.9, 0.02):
            mask = None if share is None else mask_of(share, size, seed)
            rows = [
                row_of(uniform, mask=mask, **settings)
                for settings, uniform in itertools.product(SETTINGS, UNIFORMS)
            ]
            assert_drawn(draws, [logits] * len(rows), rows)


@pytest.mark.parametrize("kind", LOGITS)
def test_biases_penalties_and_bans_come_first(draws, kind):
    size = 203
    rows, logits = [], []
    for seed, (settings, adjustment) in enumerate(itertools.product(SETTINGS, ADJUSTMENTS)):
        rng = np.random.default_rng(seed)
        tokens = {
            "prompt": tuple(rng.integers(0, size, 60).tolist()),
            "output": tuple(rng.integers(0, 20, int(rng.integers(0, 40))).tolist()),
            "banned": tuple(rng.integers(0, size, int(rng.integers(0, 3))).tolist()),
            "mask": mask_of(0.8, size, seed) if seed % 3 == 0 else None,
        }
        rows.append(row_of(float(rng.random()), **tokens, **settings, **adjustment))
        logits.append(logits_of(kind, size, seed))
    assert_drawn(draws, logits, rows)
    for row, values in zip(rows, logits, strict=True):
        assert_drawn(draws, [values], [row])  # what a row counts is forgotten after it


def weights_of(logits, temperature):
    """Give float64 weights whose largest is 1."""
    gaps = logits.numpy() - logits.numpy().max()
    return np.exp(gaps.astype(np.float64) / temperature)


NEAR = (
    -1e-5,
    -1e-6,
    -1e-7,
    -1e-8,
    -1e-9,
    1e-9,
    1e-8,
    1e-7,
    1e-6,
    1e-5,
)  # far from rounding of float64, not of float32


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("kind", ["normal", "peaked", "flat"])
def test_numbers_next_to_a_border_fall_on_their_side(draws, kind, temperature):
    """Weights of float32 are used only where they cannot tell another token."""
    logits = logits_of(kind, 4999, 5)
    cumulated = weights_of(logits, temperature).cumsum()
    rng = np.random.default_rng(7)
    borders = cumulated[np.searchsorted(cumulated, rng.random(40) * cumulated[-1])] / cumulated[-1]
    uniforms = [border + near for border in borders.tolist() for near in NEAR]
    rows = [row_of(uniform, temperature=temperature) for uniform in uniforms if 0 <= uniform < 1]
    assert_drawn(draws, [logits] * len(rows), rows)


@pytest.mark.parametrize("kind", ["normal", "peaked", "flat"])
def test_top_p_next_to_a_border_keeps_its_side(draws, kind):
    """The number is so high that the last token which is kept is drawn or not."""
    logits = logits_of(kind, 4999, 6)
    weights = weights_of(logits, 1.0)
    order = np.argsort(-weights, kind="stable")
    cumulated = weights[order].cumsum()
    rows = []
    for rank in (0, 1, 2, 10, 100, 700, 2000):
        kept = np.sort(order[: rank + 1])
        shares = weights[kept].cumsum() / weights[kept].sum()
        place = int(np.flatnonzero(kept == order[rank])[0])
        inside = (shares[place] + (shares[place - 1] if place else 0.0)) / 2
        top_p = cumulated[rank] / cumulated[-1]
        rows += [row_of(inside, top_p=top_p + near) for near in NEAR if 0 < top_p + near <= 1]
    assert_drawn(draws, [logits] * len(rows), rows)


def test_a_share_of_weights_whose_sums_all_round_up_keeps_its_side(draws):
    """Half of all weights are left out of top_p's, in lanes of which each takes weights of half its last bit and more."""
    places = torch.arange(1 << 16)
    powers = torch.where(places % 256 < 8, -3.0, -27 + 2.0**-16)  # of two
    logits = torch.where(places < 256, -(2.0**-14) * places, powers)
    temperature = 1 / math.log(2)
    weights = weights_of(logits, temperature)
    assert weights[8 + 256] > weights[256] * 2**-24
    for rank in (60, 150, 200):  # all but a few of the first 256 are kept, which lie in order
        kept = weights[: rank + 1].cumsum()
        inside = 1 - weights[rank] / kept[-1] / 2
        top_p = kept[-1] / weights.sum()
        near = [side * step * 1e-7 for step in range(1, 41) for side in (-1, 1)]
        rows = [row_of(inside, temperature=temperature, top_p=top_p * (1 + part)) for part in near]
        assert_drawn(draws, [logits] * len(rows), rows)


def test_min_p_next_to_a_weight_keeps_its_side(draws):
    logits = logits_of("normal", 4999, 7)
    weights = weights_of(logits, 1.0)
    order = np.argsort(-weights, kind="stable")
    rows = []
    for rank in (1, 2, 10, 100, 700, 4000):
        kept = np.sort(order[: rank + 1])
        shares = weights[kept].cumsum() / weights[kept].sum()
        place = int(np.flatnonzero(kept == order[rank])[0])
        inside = (shares[place] + (shares[place - 1] if place else 0.0)) / 2
        rows += [row_of(inside, min_p=weights[order[rank]] * (1 + near)) for near in NEAR]
    assert_drawn(draws, [logits] * len(rows), rows)


@pytest.mark.parametrize("size", [2, 15, 17, 31, 32, 33, 255, 256, 257, 511, 513, 1025])
def test_whole_and_broken_panels_and_blocks_are_drawn_from_alike(draws, size):
    logits = logits_of("normal", size, size)
    for mask in (None, mask_of(0.6, size, size), mask_of(1e-9, size, size)):
        rows = [
            row_of(uniform, mask=mask, **settings)
            for settings in ({"temperature": 3.0}, {"top_p": 0.8123}, {"top_k": 9}, {"min_p": 0.02})
            for uniform in (0.0, 1e-9, 0.2345, 0.6789, 0.98765, 1 - 2**-53)
        ]
        assert_drawn(draws, [logits] * len(rows), rows)


def test_temperatures_and_biases_may_be_anything(draws):
    """Also what float32 has no room for."""
    rows, logits = [], []
    for kind in ("normal", "far apart", "high", "many equal"):
        for temperature in (5e-324, 1e-300, 1e-38, 1e-18, 1e-9, 1e-3, 50.0, 100.0):
            for settings in (
                {},
                {"top_p": 0.8123},
                {"top_k": 3},
                {"min_p": 0.3},
                {"logit_bias": {9: 100.0, 4: -100.0}},
            ):
                rows.append(row_of(0.61803, temperature=temperature, **settings))
                logits.append(logits_of(kind, 313, len(rows)))
    assert_drawn(draws, logits, rows)


def test_the_likeliest_may_be_told(draws):
    """Then nobody looks for it: of a row that nothing changes but a mask that allows it."""
    for size in (40, 1357):
        logits = logits_of("many equal", size, size)
        first = (int(logits.argmax()), float(logits.max()))
        mask = mask_of(0.5, size, size)
        mask.view(np.uint32)[first[0] // 32] |= np.uint32(1 << first[0] % 32)
        for allowed in (None, mask):
            rows = [
                row_of(uniform, mask=allowed, **settings)
                for settings, uniform in itertools.product(SETTINGS, UNIFORMS)
            ]
            expected = draw_rows([logits] * len(rows), rows)
            for variant, draw in draws.items():
                assert draw([logits] * len(rows), rows, [first] * len(rows)) == expected, variant


def test_what_is_told_is_believed(draw):
    """A likeliest token that is told wrongly is what a greedy row gets: nobody looks again."""
    told = (3, 1.5)
    assert draw([torch.zeros(40)], [row_of(temperature=0)], [told]) == ([3], [1.5])


def test_a_large_vocabulary_is_drawn_from_alike(draws):
    """Bands of weights are split before they are sorted; equal ones cannot be."""
    for seed, kind in enumerate(("normal", "flat", "many equal")):
        logits = logits_of(kind, 49_152, seed)
        for mask in (None, mask_of(0.7, 49_152, seed)):
            rows = [row_of(0.61803, mask=mask, **settings) for settings in SETTINGS]
            assert_drawn(draws, [logits] * len(rows), rows)


def test_padding_is_neither_read_nor_drawn(draw):
    logits = torch.zeros(64)
    logits[50:] = math.nan
    rows = [row_of(uniform, temperature=100.0) for uniform in UNIFORMS]
    drawn = draw([logits[:50]] * len(rows), rows)
    assert drawn == draw_rows([logits[:50]] * len(rows), rows)
    assert max(drawn[0]) == 49


def test_a_vocabulary_that_grows_is_drawn_from_alike(tmp_path):
    """By less than the room for weights is rounded up to: what is counted by token has no such slack."""
    draws = {"own": by_rows(NativeDraw(build(tiny_model("llama", tmp_path / "tiny")).native))}
    for size in (200_001, 200_008):
        rows = [row_of(0.5, output=[size - 1] * count, repetition_penalty=1.7) for count in (1, 2, 3)]
        assert_drawn(draws, [logits_of("normal", size, size)] * len(rows), rows)


def test_tokens_past_the_vocabulary_are_passed_over(draw):
    """A prompt may hold ids that no token is drawn with."""
    logits = torch.tensor([1.0, 2.0, 3.0])
    row = row_of(
        prompt=(2, 70), output=(1 << 30,), repetition_penalty=4.0, temperature=0, frequency_penalty=1.0
    )
    assert draw([logits], [row]) == ([1], [2.0])


def test_zero_draws_the_first_token_that_has_a_weight(draw):
    logits = torch.tensor([-math.inf, -1e4, -1.0, 0.0])
    for mask, expected in ((None, 2), (np.array([0b1011], np.int32), 3)):
        rows = [row_of(0.0, mask=mask)]
        assert draw([logits], rows) == draw_rows([logits], rows) == ([expected], [0.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_allowed", [True, False])
def test_what_is_no_number_is_told_by_the_largest(draws, value, is_allowed):
    logits = torch.zeros(40)
    logits[7] = value
    mask = np.array([-1, 255] if is_allowed else [~(1 << 7), 255], np.int32)
    nothing = np.zeros(2, np.int32)
    rows = [row_of(**settings, mask=mask) for settings in SETTINGS]
    rows += [row_of(mask=nothing), row_of(mask=nothing, temperature=0)]
    assert_drawn(draws, [logits] * len(rows), rows)


def test_exact_borders_fall_as_in_the_plain_rule(draw):
    """Powers of two add up without rounding in both."""
    logits = torch.zeros(8)
    for share in (1.0, 0.5, 0.25):
        rows = [row_of(i / 8, top_p=share) for i in range(8)]
        drawn = draw([logits] * 8, rows)
        assert drawn == draw_rows([logits] * 8, rows)
        assert max(drawn[0]) == 8 * share - 1


def test_top_p_next_to_1_after_top_k_that_drops_next_to_nothing(draw):
    """All weights together may be less, by rounding, than the share that is asked for."""
    rng = np.random.default_rng(0)
    rows, logits = [], []
    for _ in range(1000):
        values = rng.standard_normal(41).astype(np.float32) * 2
        values[rng.integers(41)] = values.max() - 36 - rng.random() * 4
        for top_p, uniform in itertools.product((1 - 2**-53, 1 - 2**-52), (0.1, 0.5, 0.9)):
            rows.append(row_of(uniform, top_k=40, top_p=top_p))
            logits.append(torch.from_numpy(values))
    assert draw(logits, rows) == draw_rows(logits, rows)


def test_few_weights_are_found_among_many_that_are_next_to_nothing(draws):
    """Cold draws, and masks that allow fewer than top_k."""
    logits = logits_of("normal", 5000, 0)
    few = mask_of(0.002, 5000, 0)
    rows = [
        row_of(uniform, mask=mask, temperature=temperature, top_k=top_k, top_p=top_p)
        for mask in (None, few)
        for temperature in (0.01, 0.03, 0.1, 1.0)
        for top_k in (40, 4000)
        for top_p in (1.0, 0.95, 0.999999)
        for uniform in (0.1, 0.7)
    ]
    assert_drawn(draws, [logits] * len(rows), rows)


def test_rows_do_not_see_one_another(draw):
    logits = [logits_of("normal", 513, seed) for seed in range(len(SETTINGS))]
    rows = [
        row_of(0.4, mask=mask_of(0.5, 513, seed) if seed % 2 else None, **settings)
        for seed, settings in enumerate(SETTINGS)
    ]
    alone = [draw([values], [row]) for values, row in zip(logits, rows, strict=True)]
    assert draw(logits, rows) == tuple([one[part][0] for one in alone] for part in (0, 1))


def test_frequencies_follow_the_probabilities(draw):
    logits = torch.tensor([0.0, math.log(2.0), math.log(5.0)])
    rows = [row_of((i + 0.5) / 8000) for i in range(8000)]
    drawn, _ = draw([logits] * len(rows), rows)
    assert [drawn.count(token_id) for token_id in range(3)] == [1000, 2000, 5000]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"at": 1}, r"at must be a row in \[0, 1\), got 1"),
        ({"at": -1}, "at must be a row in"),
        ({"likeliest": (40, 0.0)}, r"likeliest must be a token in \[0, 40\), got 40"),
        ({"mask": np.ones(1, np.int32)}, r"a mask must be \[2\] int32"),
        ({"token_ids": array("q", (1, 2))}, "token_ids must be 'i' and begin with 1 of the prompt, got"),
        ({"num_prompt_tokens": 3}, "begin with 3 of the prompt"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"temperature": math.inf}, "temperature must be finite"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\] and min_p in \[0, 1\], got 0.0"),
        ({"top_p": math.nan}, "top_p must be in"),
        ({"min_p": 1.5}, r"min_p in \[0, 1\], got 1.0 and 1.5"),
        ({"min_p": math.nan}, "min_p in"),
        ({"top_k": -1}, "top_k >= 0"),
        ({"uniform": 1.0}, r"uniform in \[0, 1\)"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(tmp_path, changed, message):
    native, logits = build(tiny_model("llama", tmp_path / "tiny")).native, torch.zeros(1, 40)
    assert native.draw(logits, [], num_token_ids=40) == ([], [])
    with pytest.raises(ValueError, match=message):
        native.draw(logits, [PLAIN_ROW, PLAIN_ROW._replace(**changed)], num_token_ids=40)


PLAIN_ROW = cpu.DrawRow(0, None, {}, (), array("i", (1, 2)), 1, 1.0, 0.0, 0.0, 1.0, 0, 1.0, 0.0, uniform=0.5)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(1, 40, dtype=torch.float64), "logits must be rows of float32 on the CPU"),
        (torch.zeros(40), "logits must be rows of float32"),
        (torch.zeros(40, 1).T.expand(1, 40)[:, ::2], "logits must be rows of float32"),
        (torch.zeros(1, 39), r"num_token_ids must be in \[1, 39\], got 40"),
    ],
)
def test_logits_that_cannot_be_read_are_refused(tmp_path, logits, message):
    native = build(tiny_model("llama", tmp_path / "tiny")).native
    with pytest.raises(ValueError, match=message):
        native.draw(logits, [PLAIN_ROW], num_token_ids=40)


def test_rows_of_logits_may_lie_apart_and_be_drawn_from_in_any_order(tmp_path):
    logits = torch.stack([logits_of("normal", 203, seed) for seed in range(6)])
    rows = [DrawnRow(at, row_of(0.4, temperature=2.0)) for at in (2, 0, 2, 1)]
    native = NativeDraw(build(tiny_model("llama", tmp_path / "tiny")).native)
    for view in (logits[::2], logits[::2, :200]):
        assert native(view, rows) == plain_rule(view, rows)
