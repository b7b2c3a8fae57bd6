import random

from radixrt.sched.prediction import (
    NUM_KEPT_LABELS,
    QUANTILE,
    Demand,
    OutputLengths,
    Peak,
    demands_of,
    expected_length,
)
from tests.support.simulation import Simulation


def predict(lengths, label, *, num_so_far=0, max_tokens=200):
    return expected_length(lengths.like(label), num_so_far, max_tokens)


def test_without_observations_nothing_short_is_promised():
    assert predict(OutputLengths(), "call") == 200


def test_lengths_are_learned_per_label_and_fall_back_to_all():
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe("short", 5)
        lengths.observe("long", 80)
    assert predict(lengths, "short") == 5
    assert predict(lengths, "long") == 80
    assert predict(lengths, "new") == 80  # nine of ten of all


def test_prediction_is_conditional_on_what_is_there_already():
    lengths = OutputLengths()
    for length in [3] * 20 + [50] * 5:
        lengths.observe("call", length)
    assert predict(lengths, "call", num_so_far=4) == 50
    assert predict(lengths, "call", num_so_far=60) == 120
    assert predict(lengths, "call", num_so_far=60, max_tokens=61) == 61


def test_prediction_is_the_quantile_of_those_that_were_longer():
    rng = random.Random(3)
    lengths, seen = OutputLengths(), []
    for _ in range(120):
        seen.append(rng.randrange(60))
        lengths.observe("call", seen[-1])
        num_so_far, max_tokens = rng.randrange(70), rng.randrange(70, 90)
        longer = sorted(length for length in seen if length > num_so_far)
        expected = longer[int(QUANTILE * (len(longer) - 1))] if longer else 2 * num_so_far
        if len(seen) < 8:
            expected = max_tokens
        expected = max(min(expected, max_tokens), num_so_far + 1)
        assert predict(lengths, "call", num_so_far=num_so_far, max_tokens=max_tokens) == expected


def test_demands_are_pages_at_the_predicted_end_less_those_there():
    simulation = Simulation(num_pages=300, page_size=4, max_running=6)
    rng = random.Random(1)
    for length in range(20):
        simulation.scheduler.room.output_lengths.observe("", length)
    for _ in range(12):
        simulation.add(
            [rng.randrange(2) for _ in range(rng.randrange(1, 20))], max_tokens=rng.randrange(1, 25)
        )
    while not simulation.scheduler.is_idle:
        scheduler, cache = simulation.scheduler, simulation.cache
        everybody = [*scheduler.running, *scheduler.waiting]
        found = demands_of(everybody, scheduler.room.output_lengths, page_size=4, num_own_pages=7)
        for sequence, demand in zip(everybody, found, strict=True):
            num_outputs = predict(
                scheduler.room.output_lengths,
                "",
                num_so_far=sequence.num_output_tokens,
                max_tokens=sequence.sampling.max_tokens,
            )
            num_last = cache.num_pages_for(sequence.num_prompt_tokens + num_outputs)
            num_own = 7
            if sequence.lease is not None:
                num_own = len(sequence.lease.pages) - sequence.lease.num_shared_tokens // 4
            assert demand == Demand(num_last - cache.num_pages_for(sequence.num_total), num_own)
        simulation.step()


def test_old_lengths_and_labels_are_forgotten():
    lengths = OutputLengths()
    for length in [100] * 200 + [4] * 128:
        lengths.observe("call", length)
    assert predict(lengths, "call") == 4
    for index in range(NUM_KEPT_LABELS + 10):
        lengths.observe(f"label {index}", 9)
    assert len(lengths._by_label) == NUM_KEPT_LABELS


def simulated_peak(demands, num_held):
    """Grow everybody by a page at a time and end those that are done."""
    running = [[demand.num_own_pages, demand.num_more_pages] for demand in demands]
    held = peak = num_held
    while running:
        for item in [item for item in running if item[1] == 0]:
            running.remove(item)
            held -= item[0]
        for item in running:
            item[0] += 1
            item[1] -= 1
            held += 1
        peak = max(peak, held)
    return peak


def test_one_more_fits_as_a_simulation_of_growing_and_ending_says():
    rng = random.Random(0)
    answers = set()
    for _ in range(2000):
        demands = [Demand(rng.randrange(9), rng.randrange(9)) for _ in range(rng.randrange(7))]
        own = Demand(rng.randrange(9), rng.randrange(9))
        held = sum(demand.num_own_pages for demand in (*demands, own)) + rng.randrange(4)
        num_late = rng.randrange(len(demands) + 1)
        peak = Peak(demands[num_late:])
        for demand in demands[:num_late]:
            peak.fits(own, rng.randrange(20))  # what is known of fewer must not be taken for more
            peak.add(demand)
        needed = max(simulated_peak([*demands, own], held) - held, own.num_more_pages)
        for num_free in (*range(max(needed - 2, 0), needed + 3), needed):
            answers.add(peak.fits(own, num_free))
            assert peak.fits(own, num_free) == (num_free >= needed)
    assert answers == {True, False}
