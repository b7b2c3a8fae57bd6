"""Random schedules: aborts, faults, deadlines, scopes, preemption storms. Nothing leaks and no answer changes."""

import random

import pytest

from radixrt.sched.latency import load_of
from radixrt.sched.sequence import SequenceStatus
from radixrt.types import FinishReason, Namespace
from tests.support.simulation import Simulation, output_of


def random_prompt(rng, page_size):
    stem = [1, 0, 1, 1, 0, 0, 1, 0] * 6
    shared = stem[: rng.randrange(0, 3 * page_size + 4)]
    return [*shared, *(rng.randrange(2) for _ in range(rng.randrange(1, page_size + 4)))]


def add_request(simulation, rng, page_size):
    sampling = {"max_tokens": rng.randrange(1, 2 * page_size + 6), "seed": rng.randrange(3)}
    if rng.random() < 0.2:
        sampling["logprobs"] = 0
    prompt = random_prompt(rng, page_size)
    if not simulation.cache.fits_ever(len(prompt) + sampling["max_tokens"] - 1):
        return []
    request = {
        "priority": rng.randrange(3),
        "label": rng.choice(["", "a", "b"]),
        "latency_class": rng.choice(["latency", "throughput"]),
        "scope_id": rng.choice([None, None, 0, 1, 2]),
        "timeout_s": rng.choice([None, None, 1.0, 20.0]),
        "namespace": rng.choice([Namespace(), Namespace(salt="x"), Namespace(adapter="x")]),
    }
    if sampling.get("logprobs") is not None and rng.random() < 0.5:
        sampling["prompt_logprobs"] = 0
        request["logprob_start"] = rng.randrange(len(prompt))
    group = [simulation.add(prompt, request=request, **sampling)]
    for index in range(1, rng.choice([1, 1, 1, 2, 4])):
        group.append(simulation.add(prompt, request=request, leader=group[0], sample_index=index, **sampling))
    return group


def use_scopes(simulation, rng):
    scopes, scope_id = simulation.cache.scopes, rng.randrange(3)
    if scope_id in scopes:
        scopes.close(scope_id)
    else:
        scopes.open(scope_id, ttl_s=rng.choice([2.0, 50.0]), now_s=simulation.now_s)


def pass_time(simulation, rng):
    """Let time pass and end those whose deadline is over."""
    simulation.now_s += rng.random()
    for update in simulation.scheduler.expire(simulation.now_s):
        simulation.errors[update.sequence] = update.error
    if simulation.plans and simulation.plans[-1].chunks:
        simulation.scheduler.observe(*load_of(simulation.plans[-1].chunks), rng.uniform(0.001, 0.02))


def walk(seed, page_size, num_operations, *, overlap):
    rng = random.Random(seed)
    simulation = Simulation(
        num_pages=rng.choice([80 // page_size + 4, 300 // page_size + 4]),
        page_size=page_size,
        prefix_cache=rng.random() < 0.8,
        max_step_tokens=rng.choice([3, 16, 200]),
        max_running=rng.choice([2, 8]),
        max_skips=rng.choice([0, 3, 64]),
        policy=rng.choice(["cache_aware", "fcfs", "priority", "dfs", "random", "longest_prefix"]),
        eviction=rng.choice(["lru", "lfu", "fifo", "priority"]),
        prefill_mode=rng.choice(["mixed", "separate"]),
        ttft_ms=rng.choice([None, 500]),
        tpot_ms=rng.choice([None, 5]),
        end_every=rng.choice([0, 9]),
        overlap=overlap,
    )
    sequences = []
    for _ in range(num_operations):
        draw = rng.random()
        open_ones = [item for item in sequences if item.status is not SequenceStatus.FINISHED]
        if draw < 0.25 and len(open_ones) < 20:
            sequences += add_request(simulation, rng, page_size)
        elif draw < 0.29 and open_ones:
            simulation.scheduler.finish(rng.choice(open_ones), FinishReason.ABORT)
        elif draw < 0.31 and simulation.scheduler.running:
            victim = rng.choice(simulation.scheduler.running)
            simulation.scheduler._preempt(victim)
        elif draw < 0.33:
            for update in simulation.step(fails=True):
                simulation.errors[update.sequence] = update.error
        elif draw < 0.34:
            simulation.cache.clear()
        elif draw < 0.37:
            use_scopes(simulation, rng)
        elif draw < 0.45:
            pass_time(simulation, rng)
        else:
            simulation.step()
        simulation.scheduler.check()
    simulation.finish_all()
    assert len(simulation.scheduler.waiting) == 0
    for sequence in sequences:
        assert sequence.status is SequenceStatus.FINISHED
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert output_of(sequence) == simulation.expected(sequence)
        else:
            assert sequence.finish_reason is FinishReason.ABORT or sequence in simulation.errors
    simulation.cache.scopes.expire(float("inf"))
    simulation.cache.clear()
    assert simulation.cache.pool.num_free == simulation.cache.pool.capacity
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_long_random_schedules_lose_nothing_and_change_no_answer(page_size, overlap):
    for seed in range(1000, 1250):
        try:
            walk(seed, page_size, 100, overlap=overlap)
        except BaseException as error:
            error.add_note(f"seed {seed}, page size {page_size}")
            raise


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_schedules_lose_nothing_and_change_no_answer(page_size, overlap, num_walk_operations):
    num_walks = 40
    num_preemptions = num_surplus = 0
    for seed in range(num_walks):
        try:
            num_operations = num_walk_operations // 6 // num_walks + 1
            simulation = walk(seed, page_size, num_operations, overlap=overlap)
            num_preemptions += simulation.scheduler.num_preemptions
            num_surplus += simulation.num_surplus
        except BaseException as error:
            error.add_note(f"seed {seed}, page size {page_size}")
            raise
    assert num_preemptions > 20  # the walk does reach what it is for
    assert (num_surplus > 100) == overlap
