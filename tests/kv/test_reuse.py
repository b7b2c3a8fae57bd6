import random

import pytest

from radixrt.kv import reuse
from radixrt.kv.packed import pack
from radixrt.kv.reuse import ReuseDistances
from radixrt.types import DEFAULT_NAMESPACE as NS
from radixrt.types import Namespace


@pytest.fixture
def every_page(monkeypatch):
    monkeypatch.setattr(reuse, "SAMPLE_EVERY", 1)


def lru_hits(uses, num_pages):
    """Hits of an lru pool, by hand."""
    stack, hits = [], 0
    for key in uses:
        if key in stack:
            hits += stack.index(key) < num_pages
            stack.remove(key)
        stack.insert(0, key)
    return hits


@pytest.mark.usefixtures("every_page")
def test_hit_rate_equals_an_lru_pool_of_that_size():
    rng = random.Random(0)
    uses = [min(int(rng.expovariate(0.05)), 199) for _ in range(3000)]
    distances = ReuseDistances(page_bytes=4)
    for key in uses:
        distances.observe(NS, pack([key]))
    for num_pages in (1, 2, 4, 8, 16, 32, 64, 128):  # whole buckets
        assert distances.hit_rate(num_pages) == pytest.approx(lru_hits(uses, num_pages) / len(uses))


@pytest.mark.usefixtures("every_page")
def test_memory_is_bounded_and_recent_uses_survive(monkeypatch):
    monkeypatch.setattr(reuse, "MAX_TRACKED", 64)
    distances = ReuseDistances(page_bytes=4)
    for key in range(1000):
        distances.observe(NS, pack([key]))
    assert distances.num_first == 1000
    assert len(distances._last_used) <= 128
    distances.observe(NS, pack([999]))
    assert distances.counts[0] == 1


@pytest.mark.usefixtures("every_page")
def test_a_page_is_its_whole_prefix_and_namespace():
    distances = ReuseDistances(page_bytes=8)
    distances.observe(NS, pack([1, 2, 3, 4]))
    distances.observe(NS, pack([5, 6, 3, 4]))  # the same tokens after another prefix
    distances.observe(Namespace(salt="a"), pack([1, 2]))
    assert (distances.num_first, sum(distances.counts)) == (5, 0)
    distances.observe(NS, pack([1, 2, 9]))
    assert sum(distances.counts) == 1


def test_sampled_rate_is_near_the_full_one():
    rng = random.Random(1)
    uses = [min(int(rng.expovariate(0.002)), 4999) for _ in range(20_000)]
    distances = ReuseDistances(page_bytes=4)
    for key in uses:
        distances.observe(NS, pack([key]))
    assert distances.hit_rate(1024) == pytest.approx(lru_hits(uses, 1024) / len(uses), abs=0.05)


@pytest.mark.usefixtures("every_page")
@pytest.mark.parametrize("max_tracked", [8, 1 << 13])
def test_pages_of_whole_prompts_count_as_if_they_came_one_by_one(monkeypatch, max_tracked):
    monkeypatch.setattr(reuse, "MAX_TRACKED", max_tracked)
    rng = random.Random(2)
    distances, uses, expected = ReuseDistances(page_bytes=8), [], [0] * reuse.NUM_BUCKETS
    num_first = 0
    for _ in range(1000):
        prompt = [rng.choice([0, 0, 1]) for _ in range(rng.randrange(16))]
        distances.observe(NS, pack(prompt))
        if rng.random() < 0.5:
            distances._take_in()
        assert list(distances._last_used.values()) == distances._places  # in order of last use
        for stop in range(2, len(prompt) + 1, 2):
            page = tuple(prompt[:stop])
            if page in uses:
                expected[len(uses[uses.index(page) + 1 :]).bit_length()] += 1
                uses.remove(page)
            else:
                num_first += 1
            uses.append(page)
    if max_tracked > len(uses):
        assert (distances.counts, distances.num_first) == (expected, num_first)
    assert sum(distances.counts) + distances.num_first == sum(expected) + num_first
