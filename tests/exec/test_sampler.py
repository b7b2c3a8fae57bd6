import math
from array import array

import numpy as np
import pytest
import torch

from radixrt.errors import DeviceError, GrammarDeadEnd
from radixrt.exec import draw as draw_module
from radixrt.exec import sampler
from radixrt.exec.batch import SampleRow, refusals, unpack_masks
from radixrt.exec.randomness import uniform
from radixrt.exec.sampler import sample, token_logprobs
from radixrt.model.outputs import likeliest
from radixrt.sched.sequence import Sequence
from radixrt.types import GenerateRequest, SamplingParams

V = 40


@pytest.fixture(autouse=True, params=[1, 3, 256])
def first_sorted(request, monkeypatch):
    """How many of the likeliest tokens are sorted at first: fewer than are needed, or all."""
    monkeypatch.setattr(draw_module, "FIRST_SORTED", request.param)


def row(draw=0.5, *, mask=None, banned=(), prompt=(1,), output=(), **sampling):
    sequence = Sequence(GenerateRequest(tuple(prompt), SamplingParams(**sampling)), arrival=0, seed=0)
    sequence.token_ids.extend(array("i", output))
    return SampleRow(sequence, draw, mask, tuple(banned))


def logits_of(count, seed=0):
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed)) * 3


def naive(logits, row):
    """The sampling rule in plain Python floats, one row."""
    sampling, sequence = row.sampling, row.sequence
    values = [float(value) for value in logits]
    for token_id, bias in sampling.logit_bias.items():
        values[token_id] += bias
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    for token_id in set(sequence.token_ids):
        value = values[token_id]
        values[token_id] = (
            value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        )
    for token_id in set(output):
        values[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token_id)
    for token_id in range(V):
        hidden = row.mask is not None and not int(row.mask[token_id // 32]) >> token_id % 32 & 1
        if hidden or token_id in row.banned_ids:
            values[token_id] = -math.inf
    if sampling.temperature == 0:
        return max(range(V), key=lambda token_id: values[token_id])
    top = max(values)
    weights = [math.exp((value - top) / sampling.temperature) for value in values]
    total = sum(weights)
    weights = [weight / total for weight in weights]
    ranked = sorted(range(V), key=lambda token_id: (-weights[token_id], token_id))
    kept = ranked[: sampling.top_k or V]
    mass = sum(weights[token_id] for token_id in kept)
    nucleus, before = [], 0.0
    for token_id in kept:
        if nucleus and before >= sampling.top_p * mass and sampling.top_p < 1:
            break
        nucleus.append(token_id)
        before += weights[token_id]
    best = max(weights[token_id] for token_id in nucleus)
    final = {t: weights[t] for t in nucleus if weights[t] >= sampling.min_p * best and weights[t] > 0}
    target, reached = row.uniform * sum(final.values()), 0.0
    for token_id in sorted(final):
        reached += final[token_id]
        if reached > target:
            return token_id
    return max(final)


MASK = np.array([0x0F0F0F0F, 0x0F], dtype=np.int32)
SETTINGS = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-6},
    {"temperature": 5.0, "top_k": 5},
    {"temperature": 5.0, "top_k": 1},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 1e-9},
    {"temperature": 100.0, "top_p": 5e-324, "top_k": 2},
    {"temperature": 2.0, "top_k": 10, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.3},
    {"temperature": 2.0, "min_p": 0.1, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": -0.7},
    {"temperature": 0, "logit_bias": {3: 100.0}},
    {"temperature": 1.0, "logit_bias": {0: -100.0, 5: 2.0}},
]


def rows_of_all_settings(draw):
    rows = []
    for settings in SETTINGS:
        for mask in (None, MASK):
            rows.append(row(draw, mask=mask, prompt=(1, 2, 3), output=(4, 4, 9), banned=(7,), **settings))
    return rows


@pytest.mark.parametrize("draw", [0.0, 0.13, 0.5, 0.77, 0.999999])
def test_every_setting_equals_the_rule_in_plain_python(draw):
    rows = rows_of_all_settings(draw)
    logits = logits_of(len(rows), seed=int(draw * 100))
    assert sample(logits, rows) == [naive(logits[index], item) for index, item in enumerate(rows)]


def test_rows_do_not_see_one_another():
    rows = rows_of_all_settings(0.4)
    logits = logits_of(len(rows))
    batch = sample(logits, rows)
    assert batch == [sample(logits[index : index + 1], [item])[0] for index, item in enumerate(rows)]


def test_logits_are_not_changed():
    rows = rows_of_all_settings(0.4)
    logits = logits_of(len(rows))
    before = logits.clone()
    sample(logits, rows)
    assert torch.equal(logits, before)


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]])
    draws = [sample(logits, [row(uniform(11, 0, position))])[0] for position in range(4000)]
    shares = [draws.count(token_id) / len(draws) for token_id in range(3)]
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)  # 4 standard errors


def test_nothing_allowed_is_a_dead_end_of_that_row_only():
    rows = [row(temperature=0, mask=np.zeros(2, dtype=np.int32)), row(temperature=0)]
    dead, alive = sample(logits_of(2), rows)
    assert isinstance(dead, GrammarDeadEnd)
    assert isinstance(alive, int)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_fail_that_row_only(value):
    logits = logits_of(2)
    logits[0, 5] = value
    bad, good = sample(logits, [row(temperature=1.0), row(temperature=1.0)])
    assert isinstance(bad, DeviceError)
    assert isinstance(good, int)


def test_logprobs_are_those_of_the_raw_logits():
    logits = logits_of(2)
    reference = logits.double().log_softmax(-1)
    first, second = token_logprobs(logits, [3, 8], [0, 4])
    assert first.logprob == pytest.approx(float(reference[0, 3]), abs=1e-5)
    assert first.top == ()
    values, ids = reference[1].topk(4)
    assert [token_id for token_id, _ in second.top] == ids.tolist()
    assert [value for _, value in second.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_padding_columns_count_in_the_sum_and_are_never_named():
    logits = logits_of(1)
    logits[0, V - 1] = 20.0
    [found] = token_logprobs(logits, [3], [5], num_token_ids=V - 4)
    assert found.logprob == pytest.approx(float(logits[0].double().log_softmax(-1)[3]), abs=1e-5)
    assert all(token_id < V - 4 for token_id, _ in found.top)


def test_uniform_numbers_depend_on_every_part_of_their_key():
    keys = [(seed, index, at) for seed in (0, 1, -1, 2**64 - 2) for index in (0, 1) for at in (0, 1, 7)]
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert all(0 <= number < 1 for number in numbers)
    many = [uniform(0, 0, at) for at in range(10_000)]
    assert sum(many) / len(many) == pytest.approx(0.5, abs=0.015)


@pytest.mark.parametrize(
    "sampling", [{"top_k": 7}, {"top_p": 0.6}, {"top_p": 0.99, "top_k": 30}, {"top_p": 0.9, "min_p": 0.1}]
)
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
def test_ties_and_masks_are_ranked_as_by_a_sort(sampling, spread):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, V, generator=generator) * spread).round(decimals=1)  # many are equal
    masks = [
        None,
        *(np.array([word, 255], dtype=np.int32) for word in (-1, 0x0F0F0F0F, 1 << 9, 0x70000001, -2)),
    ]
    for draw in (0.0, 0.3, 0.999999):
        rows = [row(draw, mask=mask, **sampling) for mask in masks]
        assert sample(logits, rows) == [naive(logits[i], item) for i, item in enumerate(rows)]


def test_a_mask_as_numbers_refuses_what_its_bits_refuse():
    mask = np.random.default_rng(0).integers(-(2**31), 2**31, 3, dtype=np.int64).astype(np.int32)
    added = refusals(mask, 90)
    allowed = unpack_masks([mask], 90)[0]
    assert (added[allowed] == 0).all()
    assert (added[~allowed] == -math.inf).all()
    assert 0 < allowed.sum() < 90


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0}, False),
        ({"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, False),
        ({"temperature": 1}, True),
        ({"temperature": 0, "logit_bias": {1: 1.0}}, True),
        ({"temperature": 0, "repetition_penalty": 1.1}, True),
        ({"temperature": 0, "presence_penalty": 0.1}, True),
        ({"temperature": 0, "frequency_penalty": 0.1}, True),
        ({"temperature": 0, "logprobs": 0}, True),
        ({"temperature": 0, "min_tokens": 2}, True),
        ({"temperature": 0, "min_tokens": 2, "output": (3, 3)}, False),
    ],
)
def test_logits_are_wanted_where_more_than_the_likeliest_token_counts(options, expected):
    assert sampler.wants_logits(row(**options).sequence) is expected


def test_under_a_mask_logits_are_wanted_where_its_probability_is_measured():
    """The first samples, and then one in sixteen; forced tokens are no samples."""
    sequence = row(temperature=0).sequence
    sequence.constraint = object()
    wanted = []
    for _ in range(40):
        wanted.append(sampler.wants_logits(sequence))
        sequence.token_ids.append(1)
    assert [index for index, is_wanted in enumerate(wanted) if is_wanted] == [0, 1, 2, 3, 16, 32]
    sequence.origin.num_forced = 8
    assert sampler.wants_logits(sequence)
    sequence.origin.num_forced = 7
    assert not sampler.wants_logits(sequence)


def test_the_likeliest_tokens_are_judged_as_drawn_ones():
    rows = [row(temperature=0), row(temperature=0)]
    logits = logits_of(2)
    logits[1, 3] = float("nan")
    found = likeliest(logits)
    drawn, taken = sampler.sample(logits, rows), sampler.take_likeliest(rows, found)
    assert drawn[0] == taken[0] == found[0][0]
    assert isinstance(taken[1], DeviceError)
    assert str(drawn[1]) == str(taken[1])


def test_draws_are_told_the_likeliest_where_nothing_changes_it():
    """By a mask that allows it, it stays; who is greedy then is not drawn for at all."""
    logits = logits_of(8)
    found = likeliest(logits)
    only = [refusing(token_id, is_refused=False) for token_id in found[0]]
    rows = [
        row(),
        row(mask=only[1]),
        row(mask=refusing(found[0][2], is_refused=True)),
        row(banned=(found[0][3],)),
        row(logit_bias={found[0][4]: -50.0}),
        row(output=(found[0][5],), presence_penalty=2.0),
        row(temperature=0, mask=only[6]),
        row(temperature=0, mask=refusing(found[0][7], is_refused=True)),
    ]
    told = {}

    def draw(values, drawn):
        told.update({at: known for at, _, known in drawn})
        return draw_module.draw_rows(values, drawn)

    assert sample(logits, rows, found=found, draw=draw) == sample(logits, rows)
    pairs = list(zip(*found, strict=True))
    assert told == {0: pairs[0], 1: pairs[1], 2: None, 3: None, 4: None, 5: None, 7: None}


def refusing(token_id, *, is_refused):
    """Give a mask of all tokens but one, or of that one only."""
    mask = np.full(-(-V // 32), -1 if is_refused else 0, np.int32)
    mask.view(np.uint32)[token_id // 32] ^= np.uint32(1 << token_id % 32)
    return mask
