"""The arrays of a step for the device equal those that the plain runner builds."""

import random

import numpy as np
import pytest
import torch

from radixrt.exec.batch import build_inputs
from radixrt.exec.device_sampling import DrawNumbers, draw_arrays
from radixrt.exec.device_step import PageTables, build_step, join_tokens
from radixrt.exec.packing import PackedLayout
from radixrt.exec.randomness import uniform
from radixrt.kv.cache import PageLease
from radixrt.model.device_kernels import AttentionPlanner
from radixrt.model.spec import ModelSpec
from radixrt.sched.plan import StepPlan, make_chunk
from tests.support.models import tiny_model
from tests.support.simulation import Simulation


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    spec = ModelSpec.load(tiny_model("mistral", tmp_path_factory.mktemp("m"), head_dim=64))
    return AttentionPlanner(spec, 4, torch.float32)


def test_page_tables_equal_the_leases_whatever_changed():
    rng = random.Random(0)
    tables, leases = PageTables(), []
    for _ in range(500):
        if len(leases) < 6 and rng.random() < 0.4:
            leases.insert(rng.randrange(len(leases) + 1), PageLease([], None, num_shared_tokens=0))
        for lease in leases:
            if rng.random() < 0.5 or not lease.pages:
                lease.pages += [rng.randrange(1, 1000) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.3 and leases:
            leases.pop(rng.randrange(len(leases)))
        chosen = [lease for lease in leases if rng.random() < 0.8]
        if not chosen:
            continue
        counts = [rng.randrange(max(len(lease.pages) - 2, 1), len(lease.pages) + 1) for lease in chosen]
        table = tables.update(chosen, counts)
        for row, lease, count in zip(table, chosen, counts, strict=True):
            assert row.tolist() == lease.pages[:count] + [0] * (len(row) - count)


@pytest.mark.parametrize("overlap", [False, True])
def test_arrays_equal_those_of_the_plain_runner(planner, overlap):
    """Over a run with prefills in chunks, decodes, copies, scores and tokens that the host has not seen."""
    simulation = Simulation(num_pages=200, page_size=4, max_step_tokens=9, overlap=overlap)
    rng, tables, numbers, compared = random.Random(1), PageTables(), DrawNumbers(), []
    real = simulation.run

    def run(plan, before):
        rows = (
            {}
            if before is None
            else {
                chunk.sequence: row for row, chunk in enumerate(c for c in before[0].chunks if c.wants_sample)
            }
        )
        step = build_step(plan, planner, tables=tables, numbers=numbers, sampled_rows=rows)
        sampled = torch.tensor([before[1][sequence] for sequence in rows] if rows else [0])
        compared.append((step, compare(plan, step, sampled)))
        return real(plan, before)

    def compare(plan, step, sampled):
        layout = PackedLayout.fitting(step.arrays)
        buffer = np.zeros(layout.num_words, np.int32)
        layout.write(buffer, step.arrays)
        views = layout.views(torch.from_numpy(buffer))
        token_ids = join_tokens(views, sampled).tolist()
        for chunk in plan.chunks:  # what the host does not know yet is left out
            known = chunk.sequence.token_ids[chunk.start : chunk.stop].tolist()
            got, token_ids = token_ids[: chunk.num_tokens], token_ids[chunk.num_tokens :]
            assert got[: len(known)] == known
        assert step.has_unseen_tokens == any(c.stop > c.sequence.num_total for c in plan.chunks)
        if not step.has_unseen_tokens:
            expected = build_inputs(plan, page_size=4).to(torch.device("cpu"))
            for name in ("token_ids", "positions", "slots", "sample_rows"):
                assert torch.equal(views[name], getattr(expected, name)), name
            assert torch.equal(views["page_table"], expected.page_table)
        return views

    simulation.run = run
    for index in range(6):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        simulation.add(
            prompt, max_tokens=8, seed=-index, logprobs=0, prompt_logprobs=0 if index % 2 else None
        )
    simulation.finish_all()
    assert any(step.has_unseen_tokens for step, _ in compared) == overlap
    assert {step.is_decode for step, _ in compared} == {False, True}
    for step, views in compared:
        assert step.num_logit_rows == len(views["sample_rows"])
        assert views["draw_rows"].tolist() == list(step.draw_rows)
        for chunk, key in zip(step.draws, views["keys"].tolist(), strict=True):
            assert uniform(*key) == uniform(chunk.sequence.seed, chunk.sequence.sample_index, chunk.stop)


def test_seeds_keep_all_their_bits(planner):
    simulation = Simulation(num_pages=50, page_size=4)
    seeds = (-(1 << 63), (1 << 64) - 1, 1 << 63)
    sequences = [simulation.add([at, 0], seed=seed, max_tokens=4) for at, seed in enumerate(seeds)]
    plan = simulation.scheduler.plan(0.0)
    keys = build_step(plan, planner, tables=PageTables(), numbers=DrawNumbers(), sampled_rows={}).arrays[
        "keys"
    ]
    for sequence, key in zip(sequences, keys.tolist(), strict=True):
        assert uniform(*key) == uniform(sequence.seed, 0, 2)


def test_numbers_of_draws_equal_those_made_anew_whatever_changed():
    rng, numbers, num_kept = random.Random(2), DrawNumbers(), 0
    params = [
        {},
        {"temperature": 0.0, "logit_bias": {3: 1.0}},
        {"min_tokens": 3, "max_tokens": 9, "ignore_eos": False, "stop_token_ids": (1,)},
        {"presence_penalty": 0.5, "top_k": 7},
    ]
    simulation = Simulation(num_pages=50)
    sequences = [simulation.add([1] * 4, seed=-seed, **rng.choice(params)) for seed in range(6)]
    chosen, before = sequences[:3], None
    for _ in range(300):
        if rng.random() < 0.3:
            chosen = rng.sample(sequences, rng.randrange(len(sequences) + 1))
        if rng.random() < 0.1:
            rng.choice(sequences).seed = rng.getrandbits(64)
        draws = [
            make_chunk(sequence, stop - 1, 1, num_total=stop)
            for sequence, stop in ((sequence, rng.randrange(4, 9)) for sequence in chosen)
        ]
        got, expected = numbers.update(draws), draw_arrays(draws)
        assert list(got) == list(expected)
        for name, array in expected.items():
            assert got[name].dtype == array.dtype
            assert np.array_equal(got[name], array), name
        num_kept += got["numbers"] is before
        before = got["numbers"]
    assert num_kept > 100


def test_a_chunk_is_wanted_for_its_end_and_its_scores():
    simulation = Simulation(num_pages=50)
    sequence = simulation.add([1] * 8, logprobs=0, prompt_logprobs=0, max_tokens=4)
    first = make_chunk(sequence, 0, 5, num_total=8)
    assert not first.wants_sample
    assert first.scored == range(1, 6)
    last = make_chunk(sequence, 5, 3, num_total=8)
    assert last.wants_sample
    assert last.scored == range(6, 8)
    unseen = make_chunk(sequence, 8, 1, num_total=9)
    assert unseen.wants_sample
    assert not unseen.scored
    assert StepPlan((first, last)).num_tokens == 8
