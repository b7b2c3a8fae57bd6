"""The waiting list keeps the exact order that matching everybody in every step would give."""

import itertools
import random

import pytest

from radixrt.sched import waiting
from radixrt.sched.latency import load_of
from radixrt.sched.policy import HEAD_START
from radixrt.sched.sequence import SequenceStatus
from radixrt.types import FinishReason
from tests.support.simulation import Simulation, output_of


def best_by_hand(simulation):
    """The candidate that a full scan prefers, among those that wait for nobody."""
    those = simulation.scheduler.waiting
    free = [item for item in those._candidates.values() if item.computed_by is None]
    if urgent := [item for item in free if item.is_urgent]:
        return min(urgent, key=lambda item: item.sequence.arrival).sequence
    if not free:
        return None
    for item in free:
        item.num_cached_pages = len(those.match(item).pages)
    return min(free, key=those._key).sequence


def test_eviction_spares_what_somebody_waits_for():
    simulation = Simulation(num_pages=30, page_size=4, max_running=1)
    old, young = [0, 1] * 16, [1, 1, 0, 0] * 8
    for prompt in (old, young):
        simulation.add(prompt, max_tokens=1)
        simulation.finish_all()
    blocking = simulation.add([0, 0, 1] * 18, max_tokens=3)  # needs room: the older prefix would go first
    late = simulation.add([*old, 1, 1], max_tokens=1)
    simulation.scheduler.waiting.make_urgent(blocking)
    simulation.finish_all()
    assert late.num_cached == len(old)
    assert simulation.cache.explain(late.namespace, young).num_cached_tokens < len(young) - 1


@pytest.mark.parametrize("max_single_moves", [0, 64])
@pytest.mark.parametrize("seed", range(12))
def test_first_candidate_is_the_one_a_full_scan_finds(seed, max_single_moves, monkeypatch):
    monkeypatch.setattr(waiting, "MAX_SINGLE_MOVES", max_single_moves)
    rng = random.Random(seed)
    page_size = rng.choice([1, 4])
    s_per_token = rng.choice([1e-5, 1e-3, 1.0])
    simulation = Simulation(num_pages=rng.choice([30, 400]), page_size=page_size, max_running=3, max_skips=8)
    stems = [[rng.randrange(2) for _ in range(40)] for _ in range(3)]
    num_checked = 0
    for _ in range(250):
        if rng.random() < 0.5:
            prompt = rng.choice(stems)[: rng.randrange(1, 40)] + [rng.randrange(2) for _ in range(3)]
            if simulation.cache.fits_ever(len(prompt) + 3):
                simulation.add(prompt, max_tokens=rng.randrange(1, 4))
        if rng.random() < 0.05:
            simulation.cache.clear()
        if rng.random() < 0.05:
            s_per_token *= rng.choice([0.5, 1.1, 2.0])
            simulation.scheduler.waiting.set_prefill_time(s_per_token)
        simulation.now_s += rng.random()
        wanted = best_by_hand(simulation)
        order = [item.sequence for item in itertools.islice(simulation.scheduler.waiting.in_order(), 1)]
        if wanted is not None:
            assert order[0] is wanted
            num_checked += 1
        simulation.step()
        simulation.scheduler.check()
    assert num_checked > 50


@pytest.mark.parametrize(("age_s", "comes_first"), [(0.9, "warm"), (1.1, "cold")])
def test_a_cached_prefix_is_worth_a_bounded_time_of_waiting(age_s, comes_first):
    simulation = Simulation(num_pages=400, page_size=4, max_running=1)
    stem = [0, 1, 1, 0] * 10
    simulation.add(stem, max_tokens=1)
    simulation.finish_all()
    simulation.scheduler.waiting.set_prefill_time(1.0 / (HEAD_START * len(stem)))  # its head start: a second
    cold = simulation.add([1] * 41, max_tokens=1)
    simulation.now_s += age_s
    warm = simulation.add([*stem, 1], max_tokens=1)
    plan = simulation.scheduler.plan(simulation.now_s)
    assert plan.chunks[0].sequence is {"warm": warm, "cold": cold}[comes_first]


def test_the_cost_of_a_token_is_learned_from_the_steps():
    simulation = Simulation(num_pages=400, page_size=4, max_running=1)
    simulation.add([0, 1] * 20, max_tokens=20)
    simulation.add([1, 1] * 30, max_tokens=20)
    while not simulation.scheduler.is_idle:
        simulation.step()
        plan = simulation.plans[-1]
        simulation.scheduler.observe(
            *load_of(plan.chunks), 0.01 + 0.002 * sum(chunk.num_tokens for chunk in plan.chunks)
        )
    assert simulation.scheduler.step_times.prefill_s_per_token == pytest.approx(0.002, rel=0.05)


def test_waiting_for_a_prefix_ends_with_the_one_who_computes_it():
    simulation = Simulation(num_pages=400, page_size=4, max_step_tokens=8, max_running=4)
    stem = [0, 1, 1, 0] * 10
    first = simulation.add([*stem, 0, 0], max_tokens=2)
    second = simulation.add([*stem, 1, 1], max_tokens=2)
    simulation.step()
    assert (first.status, second.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    simulation.scheduler.finish(first, FinishReason.ABORT)
    simulation.scheduler.check()
    simulation.finish_all()
    assert output_of(second) == simulation.expected(second)
    assert second.num_cached == 8  # what the aborted one had computed


def test_urgent_request_does_not_wait_for_a_prefix():
    simulation = Simulation(num_pages=400, page_size=4, max_step_tokens=8, max_skips=0)
    stem = [0, 1, 1, 0] * 4
    simulation.add([*stem, 0], max_tokens=1)
    second = simulation.add([*stem, 1], max_tokens=1)
    simulation.finish_all()
    assert second.num_skips == 0
    assert output_of(second) == simulation.expected(second)


@pytest.mark.parametrize("policy", ["random", "dfs", "longest_prefix"])
def test_ablation_arms_finish_everything(policy):
    simulation = Simulation(policy=policy, num_pages=100, page_size=4, max_running=2, max_skips=4)
    rng = random.Random(2)
    sequences = [
        simulation.add([rng.randrange(2) for _ in range(rng.randrange(2, 30))], max_tokens=3)
        for _ in range(30)
    ]
    simulation.finish_all()
    assert [output_of(item) for item in sequences] == [simulation.expected(item) for item in sequences]


def test_preempted_pages_are_evicted_before_older_prefixes():
    simulation = Simulation(num_pages=20, page_size=4)
    old = [0, 0, 1, 1, 0, 1, 0, 1]
    simulation.add(old, max_tokens=1)
    simulation.finish_all()
    young = simulation.add([1] * 16, max_tokens=20)
    simulation.step()
    simulation.scheduler._preempt(young)
    simulation.cache.tree.evict(2)
    assert simulation.cache.explain(young.namespace, old).num_cached_tokens == len(old) - 1


def test_cheapest_to_bring_back_is_preempted():
    simulation = Simulation(num_pages=100, page_size=4)
    shared = [0, 1] * 16
    simulation.add(shared, max_tokens=1)
    simulation.finish_all()
    oldest = simulation.add([1, 1, 0], max_tokens=30)
    cheap = simulation.add([*shared, 1], max_tokens=30)  # all but a page of it stays in the tree
    costly = simulation.add([1, 0] * 12, max_tokens=30)
    simulation.step()
    assert {oldest, cheap, costly} == set(simulation.scheduler.running)
    assert simulation.scheduler._victim(oldest) is cheap


def in_order_by_hand(those):
    """All candidates in order of admission, as sorting everybody anew would give it."""
    urgent = sorted((item for item in those._candidates.values() if item.is_urgent), key=arrival_of)
    free = [item for item in those._candidates.values() if item.computed_by is None and not item.is_urgent]
    for item in free:
        item.num_cached_pages = len(those.match(item).pages)
    return urgent + sorted(free, key=those._key)


def arrival_of(candidate):
    return candidate.sequence.arrival


@pytest.mark.parametrize("seed", range(8))
def test_leaving_while_the_order_is_given_moves_nobody_else(seed):
    rng = random.Random(seed)
    simulation = Simulation(num_pages=60, page_size=4, max_running=3, max_skips=rng.choice([3, 64]))
    num_left = 0
    for _ in range(120):
        if len(simulation.scheduler.waiting) < 20:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            simulation.add(prompt, max_tokens=rng.randrange(1, 6))
        those = simulation.scheduler.waiting
        expected, given = in_order_by_hand(those), []
        for item in those.in_order():
            given.append(item)
            leaving = [candidate for candidate in given[-2:] if rng.random() < 0.1]
            for candidate in leaving:
                simulation.scheduler.finish(candidate.sequence, FinishReason.ABORT)
            num_left += len(leaving)
        assert given == expected
        if rng.random() < 0.5:
            simulation.step()
        simulation.scheduler.check()
    assert num_left > 20


@pytest.mark.parametrize("is_fair", [True, False])
def test_all_that_arrived_before_are_counted_as_passed_over(is_fair):
    rng = random.Random(5)
    policy = "cache_aware" if is_fair else "longest_prefix"
    simulation = Simulation(policy=policy, num_pages=400, page_size=4, max_running=3, max_skips=4)
    expected = dict.fromkeys((simulation.add([1, index % 2, 1], max_tokens=9) for index in range(12)), 0)
    simulation.step()
    for _ in range(40):
        if simulation.scheduler.running and rng.random() < 0.3:
            simulation.scheduler._preempt(rng.choice(simulation.scheduler.running))  # comes back late
        expected = {item: item.num_skips for item in simulation.scheduler.waiting}
        youngest = rng.randrange(12)
        simulation.scheduler.waiting.count_skips(youngest)
        for item, num_skips in expected.items():
            assert item.num_skips == num_skips + (item.arrival < youngest)
            is_urgent = simulation.scheduler.waiting._candidates[item].is_urgent
            assert is_urgent == (is_fair and item.num_skips >= 4)
        simulation.scheduler.waiting.check()
        simulation.scheduler._admit([], max_tokens=simulation.scheduler.config.max_step_tokens)
