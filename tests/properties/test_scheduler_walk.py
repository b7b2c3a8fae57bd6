"""Random schedules: aborts, faults, preemption storms. Nothing leaks and no answer changes."""

import random

import pytest

from radixrt.sched.sequence import SequenceStatus
from radixrt.types import FinishReason
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
    group = [simulation.add(prompt, priority=rng.randrange(3), **sampling)]
    if rng.random() < 0.2:
        group += [simulation.add(prompt, leader=group[0], sample_index=1, **sampling)]
    return group


def walk(seed, page_size, num_operations):
    rng = random.Random(seed)
    simulation = Simulation(
        num_pages=rng.choice([80 // page_size + 4, 300 // page_size + 4]),
        page_size=page_size,
        prefix_cache=rng.random() < 0.8,
        max_step_tokens=rng.choice([3, 16, 200]),
        max_running=rng.choice([2, 8]),
        max_skips=rng.choice([0, 3, 64]),
        policy=rng.choice(["cache_aware", "fcfs", "priority"]),
        end_every=rng.choice([0, 9]),
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
        elif draw < 0.35:
            simulation.cache.clear()
        else:
            simulation.step()
        simulation.scheduler.check()
    simulation.finish_all()
    for sequence in sequences:
        assert sequence.status is SequenceStatus.FINISHED
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert output_of(sequence) == simulation.expected(sequence)
        else:
            assert sequence.finish_reason is FinishReason.ABORT or sequence in simulation.errors
    simulation.cache.clear()
    assert simulation.cache.pool.num_free == simulation.cache.pool.capacity
    return simulation


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_schedules_lose_nothing_and_change_no_answer(page_size, num_walk_operations):
    num_walks = 40
    num_preemptions = 0
    for seed in range(num_walks):
        try:
            num_preemptions += walk(
                seed, page_size, num_walk_operations // 3 // num_walks + 1
            ).scheduler.num_preemptions
        except BaseException as error:
            error.add_note(f"seed {seed}, page size {page_size}")
            raise
    assert num_preemptions > 20  # the walk does reach what it is for
