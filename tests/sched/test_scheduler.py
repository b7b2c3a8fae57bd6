import random

import pytest

from radixrt.errors import DeviceError
from radixrt.sched.sequence import SequenceStatus
from radixrt.types import FinishReason, Namespace
from tests.support.simulation import Simulation, output_of


def learn_short_outputs(simulation):
    """Let the scheduler expect short outputs, so that it admits more than will fit."""
    for _ in range(8):
        simulation.scheduler.room.output_lengths.observe("", 1)


PROMPT = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]


def test_answers_equal_the_undisturbed_run():
    simulation = Simulation()
    sequences = [simulation.add([*PROMPT, index % 2], max_tokens=9) for index in range(5)]
    simulation.finish_all()
    for sequence in sequences:
        assert output_of(sequence) == simulation.expected(sequence)
        assert sequence.finish_reason is FinishReason.LENGTH


def test_end_of_sequence_is_not_part_of_the_output():
    simulation = Simulation(end_every=3)
    sequence = simulation.add(PROMPT, max_tokens=50)
    simulation.finish_all()
    assert sequence.finish_reason is FinishReason.STOP
    assert output_of(sequence) == simulation.expected(sequence)
    assert 2 not in output_of(sequence)


@pytest.mark.parametrize("max_step_tokens", [1, 3, 7])
def test_prefill_goes_in_chunks_within_the_token_budget(max_step_tokens):
    simulation = Simulation(max_step_tokens=max_step_tokens)
    sequences = [simulation.add([index % 2, *PROMPT], max_tokens=4, seed=index) for index in range(3)]
    simulation.finish_all()
    assert max(plan.num_tokens for plan in simulation.plans) <= max_step_tokens
    assert [output_of(item) for item in sequences] == [simulation.expected(item) for item in sequences]


def test_long_prefill_does_not_stop_a_running_decode():
    simulation = Simulation(max_step_tokens=4, max_running=4, num_pages=200)
    decoding = simulation.add([0, 1], max_tokens=30)
    simulation.step()
    simulation.add([1] * 100, max_tokens=2)
    for _ in range(20):
        before = decoding.num_total
        simulation.step()
        assert decoding.num_total == before + 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_with_one_new_prefix_compute_it_once(page_size):
    simulation = Simulation(page_size=page_size, num_pages=4000 // page_size, max_step_tokens=64)
    rng = random.Random(1)
    prefix = [rng.randrange(2) for _ in range(150)]
    own = [[rng.randrange(2) for _ in range(10)] for _ in range(20)]
    sequences = [simulation.add(prefix + tail, max_tokens=3) for tail in own]
    simulation.finish_all()
    num_outputs = sum(len(output_of(item)) for item in sequences)
    assert simulation.num_computed_tokens <= 150 + 20 * 10 + num_outputs + 64


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_of_one_request_compute_the_prompt_once(prefix_cache):
    simulation = Simulation(prefix_cache=prefix_cache, max_step_tokens=8)
    leader = simulation.add(PROMPT, max_tokens=6)
    samples = [leader] + [
        simulation.add(PROMPT, max_tokens=6, leader=leader, sample_index=index) for index in (1, 2, 3)
    ]
    simulation.finish_all()
    # The prompt, one recomputed token per further sample, and the outputs but their last tokens.
    assert simulation.num_computed_tokens == len(PROMPT) + 3 + 4 * 5
    assert [output_of(item) for item in samples] == [simulation.expected(item) for item in samples]


def test_full_hit_computes_one_prompt_token():
    simulation = Simulation()
    simulation.add(PROMPT, max_tokens=1)
    simulation.finish_all()
    again = simulation.add(PROMPT, max_tokens=1)
    simulation.finish_all()
    assert (again.num_cached, again.num_forwarded) == (len(PROMPT) - 1, 1)


def test_youngest_is_preempted_and_its_answer_does_not_change():
    simulation = Simulation(num_pages=10, page_size=4)
    learn_short_outputs(simulation)
    sequences = [simulation.add([index, 1, 0, 1, index], max_tokens=20, seed=index) for index in (0, 1)]
    simulation.finish_all()
    assert simulation.scheduler.num_preemptions >= 1
    preempted = {sequence for plan in simulation.plans for sequence in plan.preempted}
    assert preempted == {sequences[1]}
    assert [output_of(item) for item in sequences] == [simulation.expected(item) for item in sequences]


def test_abort_of_waiting_and_running_returns_every_page():
    simulation = Simulation(max_running=1)
    running, waiting = simulation.add(PROMPT, max_tokens=9), simulation.add([1, 0], max_tokens=9)
    simulation.step()
    for sequence in (running, waiting):
        simulation.scheduler.finish(sequence, FinishReason.ABORT)
        simulation.scheduler.check()
    assert simulation.scheduler.is_idle
    simulation.cache.clear()
    assert simulation.cache.pool.num_free == simulation.cache.pool.capacity


def test_failed_step_ends_its_sequences_only():
    simulation = Simulation(max_running=1)
    failing, waiting = simulation.add(PROMPT, max_tokens=3), simulation.add([1, 0], max_tokens=3)
    [update] = simulation.step(fails=True)
    assert update.sequence is failing
    assert isinstance(update.error, DeviceError)
    simulation.scheduler.check()
    simulation.finish_all()
    assert output_of(waiting) == simulation.expected(waiting)


def admission_order(policy, *, max_skips=64, priorities=(0, 0, 0)):
    simulation = Simulation(policy=policy, max_running=1, max_skips=max_skips, num_pages=200)
    simulation.add([1] * 12, max_tokens=1)
    simulation.finish_all()
    prompts = [[0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [1] * 12 + [0]]
    for prompt, priority in zip(prompts, priorities, strict=True):
        simulation.add(prompt, max_tokens=2, request={"priority": priority})
    first = len(simulation.plans)
    simulation.finish_all()
    order = [chunk.sequence.arrival - 1 for plan in simulation.plans[first:] for chunk in plan.chunks]
    return list(dict.fromkeys(order))


def test_cache_aware_admits_the_longest_cached_prefix_first():
    assert admission_order("cache_aware") == [2, 0, 1]


def test_fcfs_keeps_the_order_of_arrival():
    assert admission_order("fcfs") == [0, 1, 2]


def test_priority_admits_the_most_urgent_first():
    assert admission_order("priority", priorities=(0, 5, 1)) == [1, 2, 0]


def test_without_skips_every_policy_is_fcfs():
    assert admission_order("cache_aware", max_skips=0) == [0, 1, 2]


def test_no_request_is_passed_over_more_than_max_skips_times():
    simulation = Simulation(policy="cache_aware", max_running=1, max_skips=3, num_pages=400)
    simulation.add([1] * 8, max_tokens=1)
    simulation.finish_all()
    unlucky = simulation.add([0] * 8, max_tokens=1)
    num_passed = 0
    while unlucky.status is not SequenceStatus.FINISHED:
        simulation.add([1] * 8 + [0, 1, 0], max_tokens=1)  # always better cached than the unlucky one
        simulation.step()
        simulation.scheduler.check()
        num_passed += 1
    assert num_passed <= 4


def test_smaller_request_passes_one_that_does_not_fit_now():
    simulation = Simulation(num_pages=11, page_size=4, max_skips=5)
    simulation.add([0] * 20, max_tokens=12)
    simulation.step()
    large = simulation.add([1] * 24, max_tokens=2)
    small = simulation.add([1, 0], max_tokens=1)
    simulation.step()
    assert large.status is SequenceStatus.WAITING
    assert small.status is SequenceStatus.FINISHED
    simulation.finish_all()
    assert output_of(large) == simulation.expected(large)


def test_logprobs_come_for_prompt_and_output_in_order():
    simulation = Simulation(max_step_tokens=3)
    simulation.add(PROMPT, max_tokens=2)
    simulation.finish_all()
    sequence = simulation.add(PROMPT, max_tokens=4, logprobs=0, prompt_logprobs=0)
    simulation.finish_all()
    assert sorted(sequence.token_logprobs) == list(range(1, len(PROMPT) + 4))
    # The simulation gives the token at position p the logprob -p.
    assert all(item.logprob == -position for position, item in sequence.token_logprobs.items())
    assert all(item.token_id == sequence.token_ids[p] for p, item in sequence.token_logprobs.items())
    assert sequence.num_cached == 0  # every prompt row had to be computed


def test_samples_whose_prompt_is_scored_do_not_fork_what_must_be_computed():
    simulation = Simulation(max_step_tokens=4)
    sampling = {"max_tokens": 3, "prompt_logprobs": 0}
    request = {"logprob_start": 4}
    leader = simulation.add(PROMPT, request=request, **sampling)
    sample = simulation.add(PROMPT, request=request, leader=leader, sample_index=1, **sampling)
    simulation.finish_all()
    for sequence in (leader, sample):
        assert sorted(sequence.token_logprobs) == list(range(4, len(PROMPT)))
    assert sample.num_cached == 3


def test_sample_waits_for_a_prompt_of_its_own_namespace_only():
    simulation = Simulation(max_step_tokens=4, max_running=4)
    simulation.add(PROMPT * 2, max_tokens=1, request={"namespace": Namespace(salt="a")})
    other = simulation.add(PROMPT * 2, max_tokens=1, request={"namespace": Namespace(salt="b")})
    assert other in simulation.scheduler.waiting
    simulation.step()
    assert not simulation.scheduler.waiting._candidates[other].computed_by
    simulation.finish_all()
    assert (other.num_cached, other.num_forwarded) == (0, len(PROMPT) * 2)


def test_nothing_is_admitted_in_a_step_that_preempts():
    simulation = Simulation(num_pages=10, page_size=4)
    learn_short_outputs(simulation)
    sequences = [simulation.add([index, 1, 0, 1, index], max_tokens=20, seed=index) for index in (0, 1)]
    while simulation.scheduler.num_preemptions == 0:
        simulation.step()
        simulation.scheduler.check()
    assert [chunk.sequence for chunk in simulation.plans[-1].chunks] == [sequences[0]]


def test_nothing_of_waiting_and_ended_sequences_is_remembered():
    simulation = Simulation()
    for index in range(20):
        simulation.add([*PROMPT, index % 2], max_tokens=2, request={"timeout_s": 1e6})
    simulation.finish_all()
    waiting = simulation.scheduler.waiting
    assert not waiting._candidates
    assert not waiting._sorted
    assert not waiting._urgent
    assert not waiting._waiters
    assert len(simulation.scheduler._deadlines) <= 20


@pytest.mark.parametrize("policy", ["random", "cache_aware", "fcfs", "dfs", "longest_prefix", "priority"])
def test_many_samples_never_stand_in_their_leaders_way(policy):
    for start in range(4):
        simulation = Simulation(policy=policy, num_pages=600, page_size=4)
        simulation.arrival = start
        leader = simulation.add(PROMPT, max_tokens=2)
        samples = [
            simulation.add(PROMPT, max_tokens=2, leader=leader, sample_index=index) for index in range(1, 80)
        ]
        simulation.finish_all()
        assert all(output_of(item) == simulation.expected(item) for item in samples)


def test_leader_that_was_preempted_is_found_behind_many_better_cached():
    simulation = Simulation(num_pages=600, page_size=4, max_skips=2)
    leader = simulation.add(PROMPT, max_tokens=8)
    sample = simulation.add(PROMPT, max_tokens=8, leader=leader, sample_index=1)
    simulation.scheduler.waiting.make_urgent(sample)
    simulation.step()
    if sample.status is SequenceStatus.RUNNING:
        simulation.scheduler._preempt(sample)
    simulation.scheduler._preempt(leader)
    simulation.scheduler.waiting.make_urgent(sample)
    better = [1, 1, 1, 0] * 20
    other = simulation.add(better, max_tokens=1)
    simulation.scheduler.waiting.make_urgent(other)
    for index in range(60):
        simulation.add([*better, index % 2, 1], max_tokens=1)
    simulation.finish_all()
    assert output_of(leader) == simulation.expected(leader)
    assert output_of(sample) == simulation.expected(sample)
