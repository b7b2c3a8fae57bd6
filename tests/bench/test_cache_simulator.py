import random
from array import array
from dataclasses import replace

import pytest

from radixrt.bench.machines import MACHINES, Machine
from radixrt.bench.simulator import Simulation, count_slots
from radixrt.bench.workloads import SimRequest, few_shot, multi_turn, no_sharing, tree_of_thought, zipf
from radixrt.config import SchedConfig
from radixrt.errors import InvariantViolation
from radixrt.kv.cache import PrefixCache
from radixrt.metrics import kv_waste

MACHINE = MACHINES["h200-8b"]
SMALL = {
    "few_shot": few_shot(num_tasks=5, num_questions=6, num_shared_tokens=200),
    "tree": tree_of_thought(num_trees=3, branching=3, depth=2, num_root_tokens=150),
    "multi_turn": multi_turn(num_chats=8, num_turns=4),
    "zipf": zipf(num_groups=6, num_requests=60),
    "no_sharing": no_sharing(num_requests=30),
}


def simulate(workload, *, num_pages=300, page_size=16, prefix_cache=True, merges_steps=True, **options):
    simulation = Simulation(
        workload.fitting(num_pages * page_size).requests,
        cache=PrefixCache(num_pages + 1, page_size=page_size, is_enabled=prefix_cache),
        config=SchedConfig(**options),
        machine=MACHINE,
        merges_steps=merges_steps,
    )
    return simulation, simulation.run()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", SMALL)
def test_every_request_ends_once_and_every_page_comes_back(name, page_size):
    simulation, replay = simulate(SMALL[name], num_pages=4800 // page_size, page_size=page_size)
    assert len(replay.records) == len(SMALL[name].requests)
    for record in replay.records:
        assert record.arrived_s <= record.admitted_s < record.first_token_s <= record.ended_s
        assert 0 <= record.num_cached < record.num_prompt_tokens
    cache = simulation.scheduler.cache
    simulation.scheduler.check()
    assert cache.num_leased_pages == 0
    cache.clear()
    assert cache.pool.num_free == cache.pool.capacity
    cache.check()


@pytest.mark.parametrize("name", SMALL)
def test_computed_tokens_are_those_not_cached(name):
    workload = SMALL[name]
    _, replay = simulate(workload, num_pages=10_000)
    assert replay.num_preemptions == 0
    num_tokens = sum(len(item.prompt_ids) + len(item.output_ids) for item in workload.requests)
    assert replay.num_computed_tokens + replay.num_cached_tokens == num_tokens


@pytest.mark.parametrize("name", SMALL)
def test_merged_steps_give_the_same_times(name):
    _, merged = simulate(SMALL[name], num_pages=10_000)
    _, single = simulate(SMALL[name], num_pages=10_000, merges_steps=False)
    assert merged.num_steps == single.num_steps
    assert merged.num_plans < single.num_plans
    for left, right in zip(merged.records, single.records, strict=True):
        assert left.first_token_s == pytest.approx(right.first_token_s)
        assert left.ended_s == pytest.approx(right.ended_s)
        assert left.num_cached == right.num_cached


class BesidePrefills(Simulation):
    """Merges no steps in which all decode."""

    def _merge_decodes(self, plan):
        return 1


def crowded(rng):
    """Requests whose prompts take many steps and begin alike, some after others."""
    num_ids, longest_gap_s = rng.choice([2, 50_000]), rng.choice([0.0, 0.005, 0.02, 0.1])
    shared = [rng.randrange(num_ids) for _ in range(200)]
    requests, now_s = [], 0.0
    for index in range(rng.randrange(10, 40)):
        now_s += rng.random() * longest_gap_s
        parent = rng.randrange(index) if index and rng.random() < 0.2 else None
        own = [rng.randrange(num_ids) for _ in range(rng.randrange(1, rng.choice([20, 300])))]
        prompt = array("i", shared[: rng.randrange(200)] + own)
        output = array(
            "i", [rng.randrange(num_ids) for _ in range(rng.choice([5, 5, rng.randrange(40), 90]))]
        )
        requests.append(SimRequest(now_s if parent is None else 0.01, prompt, output, parent=parent))
    return requests


@pytest.mark.parametrize("is_tight", [False, True])
def test_steps_beside_a_long_prefill_are_merged_without_a_trace(is_tight):
    """Under fifo, where recency does not tell when a prefill's pages were published; a started page may."""
    num_merged = num_preemptions = num_evicted = 0
    for seed in range(50):
        rng = random.Random(seed)
        requests, page_size = crowded(rng), rng.choice([1, 4, 16])
        num_tokens = max(request.num_max_total for request in requests) + rng.choice([0, 40, 160, 800])
        num_pages = (num_tokens if is_tight else 30_000) // page_size + 2
        is_enabled = rng.random() < 0.8
        config = SchedConfig(
            max_step_tokens=rng.choice([4, 8, 16, 64]),
            max_running=rng.choice([2, 4, 16]),
            policy=rng.choice(["fcfs", "cache_aware", "dfs", "longest_prefix"]),
        )
        replays, num_observed = [], set()
        for kind, merges_steps in ((BesidePrefills, True), (Simulation, False)):
            cache = PrefixCache(num_pages, page_size=page_size, is_enabled=is_enabled, eviction="fifo")
            simulation = kind(
                requests, cache=cache, config=config, machine=MACHINE, merges_steps=merges_steps
            )
            replays.append(simulation.run())
            num_observed.add(simulation.scheduler.step_times.num_steps)
            simulation.scheduler.check()
        merged, single = replays
        num_merged += single.num_plans - merged.num_plans
        num_evicted += single.num_evicted_pages
        num_preemptions += single.num_preemptions
        kv_waste = merged.kv_waste if is_tight else single.kv_waste
        assert merged == replace(single, num_plans=merged.num_plans, kv_waste=kv_waste), f"seed {seed}"
        assert len(num_observed) == 1
    assert num_merged > 1000
    assert (num_evicted > 1000, num_preemptions > 0) == (is_tight, is_tight)


@pytest.mark.parametrize(
    "options", [{"prefill_mode": "separate"}, {"tpot_ms": 5.0}, {"ttft_ms": 5.0}], ids=str
)
def test_steps_beside_a_prefill_are_not_merged_where_time_counts(options):
    requests = [SimRequest(0.0, array("i", range(at, at + 400)), array("i", [1] * 30)) for at in range(3)]
    for more, is_merged in ((options, False), ({}, True)):
        config = SchedConfig(max_step_tokens=16, **more)
        simulation = BesidePrefills(
            requests, cache=PrefixCache(300, page_size=16), config=config, machine=MACHINE
        )
        replay = simulation.run()
        assert (replay.num_plans < replay.num_steps) == is_merged


@pytest.mark.parametrize(
    "options", [{"prefill_mode": "separate"}, {"tpot_ms": 5.0, "max_step_tokens": 64}], ids=str
)
@pytest.mark.parametrize("name", SMALL)
def test_steps_that_leave_out_some_who_run_are_merged_rightly(name, options):
    """One may end while another, which had no chunk, goes on."""
    simulation, replay = simulate(SMALL[name], **options)
    assert len(replay.records) == len(SMALL[name].requests)
    assert replay.num_plans < replay.num_steps
    simulation.scheduler.check()


def test_a_lone_request_takes_the_time_of_its_steps():
    machine = Machine("made", fixed_s=1.0, per_token_s=0.1, per_pair_s=0.001, pool_tokens=100, text="")
    request = SimRequest(2.0, array("i", range(10)), array("i", [20, 21]))
    replay = Simulation(
        [request], cache=PrefixCache(10, page_size=16), config=SchedConfig(), machine=machine
    ).run()
    (record,) = replay.records
    assert record.admitted_s == 2.0
    # 10 tokens attend to 55 positions; the two output tokens to 11 and 12.
    assert record.first_token_s == pytest.approx(2 + 1 + 1.0 + 0.055)
    assert record.ended_s == pytest.approx(2 + 3 + 1.2 + 0.055 + 0.023)
    assert (replay.num_steps, replay.num_computed_tokens) == (3, 12)


def test_a_child_comes_when_its_parent_has_ended():
    requests = [
        SimRequest(1.0, array("i", [1, 2]), array("i", [3])),
        SimRequest(0.5, array("i", [1, 2, 3, 4]), array("i"), parent=0),
    ]
    replay = Simulation(
        requests, cache=PrefixCache(40, page_size=1), config=SchedConfig(), machine=MACHINE
    ).run()
    assert replay.records[1].arrived_s == replay.records[0].ended_s + 0.5
    assert replay.records[1].num_cached == 3  # the output too


def test_what_never_fits_is_refused():
    request = SimRequest(0.0, array("i", range(100)), array("i"))
    with pytest.raises(InvariantViolation, match="never fits"):
        Simulation([request], cache=PrefixCache(4, page_size=16), config=SchedConfig(), machine=MACHINE)


@pytest.mark.parametrize("name", SMALL)
def test_unused_slots_are_counted_as_the_engine_counts_them(name):
    cache = PrefixCache(300, page_size=16)
    simulation = Simulation(
        SMALL[name].requests, cache=cache, config=SchedConfig(max_step_tokens=300), machine=MACHINE
    )
    num_compared = 0
    while simulation.advance():
        if cache.pool.num_free < cache.pool.capacity:
            num_slots, num_unused = count_slots(cache, simulation.scheduler.running)
            assert num_unused / num_slots == pytest.approx(kv_waste(simulation.scheduler, cache))
            num_compared += 1
    assert num_compared > 10
