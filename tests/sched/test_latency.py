import random

import pytest

from radixrt.sched.latency import MIN_CHUNK_TOKENS, StepTimeModel, load_of
from tests.support.simulation import Simulation


def truth(num_tokens, num_pairs):
    return 0.004 + 2e-5 * num_tokens + 3e-9 * num_pairs


def fitted(num_steps=200, noise=0.0, seed=0):
    rng = random.Random(seed)
    model = StepTimeModel()
    for _ in range(num_steps):
        num_tokens = rng.randrange(1, 2000)
        num_pairs = num_tokens * rng.randrange(1, 4000)
        model.observe(num_tokens, num_pairs, truth(num_tokens, num_pairs) * (1 + noise * rng.gauss(0, 1)))
    return model


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_fit_finds_the_costs(noise):
    model = fitted(noise=noise)
    for num_tokens, num_pairs in [(1, 500), (64, 64_000), (2000, 2_000_000)]:
        assert model.predict(num_tokens, num_pairs) == pytest.approx(truth(num_tokens, num_pairs), rel=0.1)


def test_chunk_fills_the_target_and_no_more():
    model = fitted()
    num_tokens = model.max_chunk_tokens(0.020, num_tokens=8, num_pairs=8 * 500, start=1000)
    pairs = 8 * 500 + num_tokens * (1000 + (num_tokens + 1) / 2)
    assert model.predict(8 + num_tokens, pairs) == pytest.approx(0.020, rel=0.02)


def test_prefill_goes_on_when_the_target_cannot_be_met():
    assert fitted().max_chunk_tokens(0.001, num_tokens=8, num_pairs=0, start=0) == MIN_CHUNK_TOKENS


def test_costs_follow_a_machine_that_changes():
    model = fitted()
    rng = random.Random(1)
    for _ in range(300):
        num_tokens = rng.randrange(1, 2000)
        model.observe(num_tokens, num_tokens * 1000.0, 0.004 + 6e-5 * num_tokens)
    assert model.predict(1000, 1e6) == pytest.approx(0.064, rel=0.1)


def test_steady_load_keeps_the_model_finite():
    model = StepTimeModel()
    for _ in range(20_000):
        model.observe(32, 32_000.0, 0.01)
    assert model.predict(32, 32_000.0) == pytest.approx(0.01, rel=0.05)


def timed(simulation, max_steps=3000):
    """Run with the clock of `truth`; give the seconds of each step."""
    seconds = []
    while not simulation.scheduler.is_idle and len(seconds) < max_steps:
        simulation.step()
        plan = simulation.plans[-1]
        pairs = sum(c.num_tokens * (c.start + (c.num_tokens + 1) / 2) for c in plan.chunks)
        seconds.append(truth(plan.num_tokens, pairs))
        simulation.scheduler.observe(*load_of(plan.chunks), seconds[-1])
        simulation.now_s += seconds[-1]
    return seconds


def decode_beside_a_long_prompt(latency_class="latency", **options):
    simulation = Simulation(num_pages=3000, page_size=16, **options)
    rng = random.Random(3)
    for _ in range(6):  # let the model see some loads
        simulation.add([rng.randrange(2) for _ in range(rng.randrange(5, 900))], max_tokens=6)
        timed(simulation)
    simulation.add([0, 1, 1], max_tokens=60, request={"latency_class": latency_class})
    simulation.step()
    simulation.add([rng.randrange(2) for _ in range(4000)], max_tokens=1)
    return max(timed(simulation))


def test_chunks_shrink_to_keep_the_time_per_output_token():
    assert decode_beside_a_long_prompt() > 0.03
    assert decode_beside_a_long_prompt(tpot_ms=10) < 0.0105


def test_throughput_class_sets_no_limit():
    assert decode_beside_a_long_prompt("throughput", tpot_ms=10) > 0.03


def test_request_at_risk_of_missing_its_first_token_goes_first():
    def first_admitted(**options):
        simulation = Simulation(num_pages=400, page_size=4, max_running=1, **options)
        simulation.add([1] * 40, max_tokens=1)
        simulation.finish_all()
        simulation.scheduler.waiting.set_prefill_time(1.0)  # what is cached is worth a long time
        late = simulation.add([0] * 8, max_tokens=1)
        simulation.now_s = 5.0
        simulation.add([1] * 41, max_tokens=1)  # better cached
        simulation.step()
        return simulation.plans[-1].chunks[0].sequence is late

    assert not first_admitted()
    assert first_admitted(ttft_ms=4000)
    assert not first_admitted(ttft_ms=60_000)


def test_separate_mode_never_mixes_and_starves_neither():
    simulation = Simulation(num_pages=600, page_size=4, prefill_mode="separate", max_step_tokens=16)
    sequences = [simulation.add([index % 2] * 40, max_tokens=10, seed=index) for index in range(4)]
    kinds = []
    while not simulation.scheduler.is_idle:
        was_prefilling = {item: item.is_prefilling for item in sequences}
        simulation.step()
        simulation.scheduler.check()
        kinds.append({was_prefilling[chunk.sequence] for chunk in simulation.plans[-1].chunks})
    assert all(len(kind) == 1 for kind in kinds)
    assert [simulation.expected(item) for item in sequences] == [
        list(item.token_ids[item.num_prompt_tokens :]) for item in sequences
    ]
    first_decode = kinds.index({False})
    assert {True} in kinds[first_decode:]  # prefills went on in turn with decodes
