import random
from collections import Counter

import pytest

from radixrt.errors import InvariantViolation
from radixrt.kv.pool import PagePool


def test_padding_page_is_never_given_out():
    pool = PagePool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    pool.check()


def test_allocation_is_all_or_nothing():
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []


def test_page_is_free_when_its_last_owner_releases_it():
    pool = PagePool(3)
    [page] = pool.allocate(1)
    pool.retain([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2
    pool.check()


@pytest.mark.parametrize("verb", ["retain", "release"])
def test_free_page_cannot_be_retained_or_released(verb):
    pool = PagePool(3)
    with pytest.raises(InvariantViolation, match="page 1"):
        getattr(pool, verb)([1])


def test_check_finds_a_page_twice_in_the_free_list():
    pool = PagePool(3)
    pool._free.append(1)
    with pytest.raises(InvariantViolation):
        pool.check()


def test_a_watched_page_is_told_of_once_when_one_owner_is_left():
    pool = PagePool(4)
    [watched, other] = pool.allocate(2)
    pool.retain([watched, watched, other])
    pool.watch(watched)
    pool.release([watched, other])
    assert pool.take_single() == []
    pool.release([watched])
    assert pool.is_watched(watched)
    assert pool.take_single() == [watched]
    pool.retain([watched])
    pool.release([watched])
    assert pool.take_single() == []


def test_leased_pages_are_counted_once_however_many_hold_them():
    rng, pool, held, others = random.Random(0), PagePool(12), [], []
    for _ in range(2000):
        draw = rng.random()
        if draw < 0.3 and (pages := pool.lease_free(rng.randrange(1, 4))):
            held.append(pages)
        elif draw < 0.5 and held:
            pages = rng.choice(held)[: rng.randrange(4)]
            pool.lease(pages)
            held.append(pages)
        elif draw < 0.65 and held:
            others.append(list(rng.choice(held)))
            pool.retain(others[-1])
        elif draw < 0.8 and others:
            pool.release(others.pop(rng.randrange(len(others))))
        elif held:
            pool.end_lease(held.pop(rng.randrange(len(held))))
        leases = Counter(page for pages in held for page in pages)
        owners = leases + Counter(page for pages in others for page in pages)
        assert pool.leases == [leases[page] for page in range(12)]
        assert pool.refs == [owners[page] for page in range(12)]
        assert pool.num_leased == len(leases)
        assert pool.num_unleased(range(1, 12)) == 11 - len(leases)
        pool.check()


def test_a_lease_of_a_free_page_or_an_end_too_many_is_refused():
    pool = PagePool(3)
    with pytest.raises(InvariantViolation, match="page 1"):
        pool.lease([1])
    [page] = pool.allocate(1)
    with pytest.raises(InvariantViolation, match=f"page {page}"):
        pool.end_lease([page])


def test_the_end_of_a_lease_tells_of_a_watched_page_as_a_release_does():
    pool = PagePool(3)
    [page] = pool.lease_free(1)
    pool.retain([page])
    pool.watch(page)
    pool.end_lease([page])
    assert pool.take_single() == [page]
