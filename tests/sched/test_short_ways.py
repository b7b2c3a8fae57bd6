"""What is done in short for nearly every chunk is what the general way does."""

import itertools
import random

import pytest

from radixrt.errors import InvariantViolation
from radixrt.kv.cache import PrefixCache
from radixrt.sched.budget import split_tokens
from radixrt.sched.in_flight import InFlight
from radixrt.sched.latency import load_of, pairs_of
from radixrt.sched.plan import Chunk, ChunkResult, StepPlan, StepResult, sampled
from radixrt.sched.scheduler import Scheduler
from radixrt.sched.sequence import NO_POSITIONS
from radixrt.types import FinishReason
from tests.support.simulation import EOS, Simulation, output_of


class GeneralScheduler(Scheduler):
    """Sends every chunk the general way."""

    num_chunks = 0

    def take_in(self, plan, result):
        errors = {}
        counting, results = self._in_flight.take(plan.chunks, result.chunks)
        for chunk, chunk_result in zip(counting, results, strict=True):
            chunk.sequence.num_computed = chunk.stop
            self.num_chunks += 1
            if (error := self._advance(chunk, chunk_result)) is not None:
                errors[chunk.sequence] = error
        return counting, errors


class ShortScheduler(Scheduler):
    num_general = 0

    def _advance(self, chunk, result):
        self.num_general += 1
        return super()._advance(chunk, result)


def state(simulation):
    """All that a step may change, without the identity of sequences."""
    everybody = [*simulation.scheduler.running, *simulation.scheduler.waiting]
    return [
        (
            item.arrival,
            item.status,
            item.num_computed,
            item.num_forwarded,
            item.num_cached,
            item.num_delivered,
            item.token_ids.tolist(),
            item.lease and (list(item.lease.pages), item.lease.pending_copy),
            dict(item.token_logprobs),
        )
        for item in everybody
    ], list(simulation.cache.pool.refs)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_short_way_of_a_chunk_is_the_general_one(seed, overlap):
    rng = random.Random(seed)
    options = {
        "num_pages": rng.choice([30, 90]),
        "page_size": rng.choice([1, 4]),
        "max_step_tokens": rng.choice([5, 40]),
        "max_running": rng.choice([2, 6]),
        "end_every": rng.choice([0, 7]),
        "overlap": overlap,
    }
    short, general = Simulation(**options), Simulation(**options)
    short.scheduler.__class__, general.scheduler.__class__ = ShortScheduler, GeneralScheduler
    pairs = []
    for _ in range(150):
        draw = rng.random()
        if draw < 0.3 and len(short.scheduler.waiting) < 8:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            sampling = {"max_tokens": rng.randrange(1, 14), "min_tokens": rng.choice([0, 0, 1])}
            sampling |= rng.choice(
                [{}, {}, {}, {"logprobs": 0}, {"stop_token_ids": (1,)}, {"ignore_eos": True}]
            )
            if rng.random() < 0.1:
                sampling["prompt_logprobs"] = 0
            pairs.append(tuple(side.add(prompt, seed=seed, **sampling) for side in (short, general)))
        elif draw < 0.33 and pairs:
            for side, sequence in zip((short, general), rng.choice(pairs), strict=True):
                side.scheduler.finish(sequence, FinishReason.ABORT)
        elif draw < 0.4 and short.scheduler.running:
            place = rng.randrange(len(short.scheduler.running))
            for side in (short, general):
                side.scheduler._preempt(side.scheduler.running[place])
        else:
            given = [
                [
                    (item.sequence.arrival, item.token_ids, item.logprobs, item.finish_reason, item.error)
                    for item in side.step()
                ]
                for side in (short, general)
            ]
            assert given[0] == given[1]
        assert state(short) == state(general)
        short.scheduler.check()
    for one, other in pairs:
        assert one.finish_reason is other.finish_reason
        assert output_of(one) == output_of(other)
    assert short.scheduler.num_general < 0.8 * general.scheduler.num_chunks  # there is a short way


def decoding(**sampling):
    """A sequence that decodes, and the plan of its next step."""
    simulation = Simulation(num_pages=40)
    sequence = simulation.add([0, 1, 1], max_tokens=9, **sampling)
    simulation.step()
    return simulation.scheduler, sequence, simulation.scheduler.plan(0.0)


def test_a_plain_token_is_appended_and_an_end_is_not():
    for token_id, num_more in ((1, 1), (EOS, 0)):
        scheduler, sequence, plan = decoding()
        num_before = sequence.num_total
        scheduler.take_in(plan, StepResult((sampled(token_id),)))
        assert sequence.num_total == num_before + num_more
        assert sequence.finish_reason is (FinishReason.STOP if token_id == EOS else None)


def test_what_comes_with_a_token_is_kept():
    scheduler, sequence, plan = decoding()
    place = sequence.num_output_tokens
    scheduler.take_in(plan, StepResult((ChunkResult(1, removed_probability=0.25),)))
    assert sequence.origin.removed == [(place, 0.25)]


@pytest.mark.parametrize("num_results", [0, 1, 3])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_result_for_each_chunk_or_nothing_changes(num_results, is_whole):
    simulation = Simulation(num_pages=40)
    sequences = [simulation.add([0, 1, token_id], max_tokens=9) for token_id in (0, 1)]
    simulation.step()
    plan = simulation.scheduler.plan(0.0)
    if not is_whole:
        simulation.scheduler.finish(sequences[0], FinishReason.ABORT)
    before = [(sequence.num_computed, list(sequence.token_ids)) for sequence in sequences]
    with pytest.raises(InvariantViolation, match=f"a step of 2 chunks gave {num_results} results"):
        simulation.scheduler.take_in(plan, StepResult((sampled(1),) * num_results))
    assert [(sequence.num_computed, list(sequence.token_ids)) for sequence in sequences] == before
    simulation.scheduler.take_in(plan, StepResult((sampled(1), sampled(1))))
    assert sequences[1].num_total == len(before[1][1]) + 1


def test_a_sampled_result_has_nothing_but_its_token():
    assert sampled(5) == ChunkResult(5)
    assert type(sampled(5)) is ChunkResult


def test_a_step_without_readers_delivers_nothing():
    scheduler, sequence, plan = decoding()
    num_delivered = sequence.num_delivered
    scheduler.take_in(plan, StepResult((sampled(1),)))
    assert sequence.num_delivered == num_delivered
    [update] = scheduler.commit(scheduler.plan(0.0), StepResult((sampled(0),)))
    assert update.token_ids == (1, 0)


def test_load_of_chunks_is_the_sum_of_each():
    rng = random.Random(0)
    for _ in range(300):
        chunks = [
            Chunk(None, rng.randrange(5000), rng.choice([1, 1, rng.randrange(1, 900)]), True, NO_POSITIONS)
            for _ in range(rng.randrange(6))
        ]
        num_pairs = sum((pairs_of(chunk.start, chunk.num_tokens) for chunk in chunks), 0.0)
        assert load_of(chunks) == (StepPlan(tuple(chunks)).num_tokens, num_pairs)


def test_shares_without_steps_under_way_are_all_that_is_pending():
    rng = random.Random(0)
    simulation = Simulation(num_pages=200, max_running=8, max_step_tokens=30)
    for _ in range(30):
        if len(simulation.scheduler.waiting) < 4:
            simulation.add([rng.randrange(2) for _ in range(rng.randrange(1, 60))], max_tokens=9)
        simulation.step()
        running = simulation.scheduler.running
        for sequence, start, stop, num_tokens in split_tokens(running, 1000, InFlight()):
            assert range(start, stop) == InFlight().pending(sequence)
            assert num_tokens == sequence.num_pending
        shares = split_tokens(running, 10, InFlight())
        assert sum(share[3] for share in shares) == min(sum(item.num_pending for item in running), 10)


def shared_out(sequences, max_tokens):
    """Tokens for decodes first, then for prefills, one sequence after the other."""
    news = {}
    for is_prefill in (False, True):
        for item in sequences:
            if item.is_prefilling == is_prefill:
                news[item] = min(item.num_pending, max_tokens - sum(news.values()))
    return [(item, news[item]) for item in sequences]


def test_a_full_step_serves_decodes_first():
    rng = random.Random(1)
    num_cut = 0
    for _ in range(300):
        sequences = [decoding()[1] for _ in range(rng.randrange(1, 6))]
        for item in sequences:
            item.num_computed = rng.choice([item.num_total - 1, rng.randrange(item.num_total)])
        max_tokens = rng.randrange(1, 14)
        found = [(share[0], share[3]) for share in split_tokens(sequences, max_tokens, InFlight())]
        assert found == shared_out(sequences, max_tokens)
        num_cut += sum(item.num_pending for item in sequences) > max_tokens
    assert num_cut > 50


class CountingScheduler(Scheduler):
    num_looks = 0

    def _lease(self, candidate):
        self.num_looks += 1
        return super()._lease(candidate)


@pytest.mark.parametrize("seed", range(12))
def test_who_is_refused_by_a_count_would_be_refused_anyway(seed):
    rng = random.Random(seed)
    page_size = rng.choice([1, 4])
    options = {
        "num_pages": rng.choice([24, 34]) // page_size + 2,
        "page_size": page_size,
        "prefix_cache": rng.random() < 0.7,
        "max_step_tokens": rng.choice([8, 40]),
        "max_skips": rng.choice([2, 64]),
        "policy": rng.choice(["cache_aware", "fcfs", "longest_prefix"]),
        "overlap": rng.random() < 0.5,
    }
    short, general = Simulation(**options), Simulation(**options)
    for side in (short, general):
        side.scheduler.__class__ = CountingScheduler
    for _ in range(200):
        if rng.random() < 0.4 and len(short.scheduler.waiting) < 12:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 13))]
            sampling = {"max_tokens": rng.randrange(1, 10)}
            leaders = [None, None]
            for sample_index in range(rng.choice([1, 1, 1, 2])):
                for place, side in enumerate((short, general)):
                    leader = leaders[place]
                    added = side.add(prompt, leader=leader, sample_index=sample_index, **sampling)
                    leaders[place] = leader or added
        else:
            for candidate in general.scheduler.waiting._candidates.values():
                candidate.num_pages = 0  # never refused by a count
            for side in (short, general):
                side.step()
            chunks = [
                [(item.sequence.arrival, *item[1:]) for item in side.plans[-1].chunks]
                for side in (short, general)
            ]
            assert chunks[0] == chunks[1]
            assert state(short) == state(general)
        short.scheduler.check()
    assert short.scheduler.num_looks < general.scheduler.num_looks


class OneByOneCache(PrefixCache):
    def grow(self, lease, num_pages, *, label="", num_ahead=0):
        return super().grow(lease, num_pages, label=label)


class AheadCache(PrefixCache):
    num_ahead = 0

    def grow(self, lease, num_pages, *, label="", num_ahead=0):
        is_grown = super().grow(lease, num_pages, label=label, num_ahead=num_ahead)
        self.num_ahead += min(num_ahead, self.pool.num_free)
        return is_grown


def test_leases_that_grow_in_one_step_get_what_they_would_one_after_the_other():
    num_ahead = num_preemptions = 0
    for seed in range(20):
        rng = random.Random(seed)
        page_size = rng.choice([1, 2, 4])
        options = {
            "num_pages": rng.choice([24, 40, 60]) // page_size + 2,
            "page_size": page_size,
            "max_step_tokens": rng.choice([8, 40]),
            "overlap": rng.random() < 0.5,
        }
        sides = Simulation(**options), Simulation(**options)
        for side, kind in zip(sides, (AheadCache, OneByOneCache), strict=True):
            side.cache.__class__ = kind
        for _ in range(150):
            if rng.random() < 0.3 and len(sides[0].scheduler.waiting) < 8:
                prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 13))]
                max_tokens = rng.randrange(1, 20)
                for side in sides:
                    side.add(prompt, max_tokens=max_tokens)
                continue
            for side in sides:
                side.step()
            planned = [
                (
                    [(item.sequence.arrival, *item[1:]) for item in side.plans[-1].chunks],
                    [item.arrival for item in side.plans[-1].preempted],
                    side.cache.counters.num_evicted_pages,
                )
                for side in sides
            ]
            assert planned[0] == planned[1], f"seed {seed}"
            sides[0].scheduler.check()
        num_ahead += sides[0].cache.num_ahead
        num_preemptions += sides[0].scheduler.num_preemptions
    assert num_ahead > 50
    assert num_preemptions > 50


def test_no_room_is_made_ahead_for_one_that_was_preempted():
    """What it computed a second time is free at once, so that a leaf that nobody waits for has more than is missing."""
    num_preempted = num_evicted = 0
    for num_pages, num_known in itertools.product(range(20, 40), range(1, 6)):
        sides = [Simulation(num_pages=num_pages, page_size=1, max_step_tokens=40) for _ in range(2)]
        for side, kind in zip(sides, (AheadCache, OneByOneCache), strict=True):
            side.cache.__class__ = kind
            for _ in range(10):
                side.scheduler.room.output_lengths.observe("", 1)  # so that all are admitted
            side.add([1, 1, 1, 0, 0], max_tokens=1)  # nobody waits for it
            side.step()
            said = side.add([0, 1], max_tokens=6)
            side.finish_all()
            side.add(said.token_ids, max_tokens=12)  # holds what was said
            growing = side.add([1, 0], max_tokens=12)
            side.add([0, 1], max_tokens=12)  # says the same again
            for _ in range(5):
                side.step()
            num_outputs = growing.num_output_tokens
            growing.token_ids.extend(side.expected(growing)[num_outputs : num_outputs + num_known])
            num_before = side.cache.counters.num_evicted_pages["room"]
            side.step()
            side.scheduler.check()
        assert sides[0].cache.counters.num_evicted_pages == sides[1].cache.counters.num_evicted_pages
        num_preempted += len(sides[0].plans[-1].preempted)
        num_evicted += sides[0].cache.counters.num_evicted_pages["room"] - num_before
    assert num_preempted > 3
    assert num_evicted > 3


@pytest.mark.parametrize("seed", range(5))
def test_forwarded_positions_are_those_of_all_steps(seed):
    rng, sequences = random.Random(seed), []
    simulation = Simulation(num_pages=20, page_size=4, max_step_tokens=9)
    for _ in range(120):
        draw = rng.random()
        if draw < 0.3 and len(simulation.scheduler.waiting) < 5:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            sequences.append(simulation.add(prompt, max_tokens=rng.randrange(1, 12)))
        elif draw < 0.4 and simulation.scheduler.running:
            simulation.scheduler._preempt(rng.choice(simulation.scheduler.running))
        else:
            simulation.step()
        assert sum(item.num_forwarded for item in sequences) == simulation.num_computed_tokens
    assert simulation.scheduler.num_preemptions > 2
