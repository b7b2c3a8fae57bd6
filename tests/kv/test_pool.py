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
    assert pool.release([page]) == 0
    assert pool.release([page]) == 1
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
