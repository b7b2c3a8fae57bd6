from array import array

import pytest

from radixrt.errors import InvariantViolation
from radixrt.kv.cache import PrefixCache
from radixrt.types import DEFAULT_NAMESPACE as NS


def ids(*token_ids):
    return array("i", token_ids)


def computed(cache, token_ids):
    """Lease, compute and publish a prompt; give its lease."""
    lease = cache.admit(cache.lookup(NS, token_ids), num_tokens=len(token_ids))
    cache.copied(lease)
    cache.publish(lease, NS, token_ids)
    return lease


@pytest.fixture(params=[1, 4, 16])
def cache(request):
    cache = PrefixCache(64, page_size=request.param)
    yield cache
    cache.check()


def test_full_hit_computes_exactly_one_token(cache):
    prompt = array("i", range(20))
    cache.release(computed(cache, prompt))
    assert cache.lookup(NS, prompt).num_tokens == 19


def test_shared_pages_are_retained_by_both(cache):
    prompt = array("i", range(33))
    first = computed(cache, prompt)
    second = cache.admit(cache.lookup(NS, prompt), num_tokens=40)
    num_shared = 32 // cache.page_size
    assert second.pages[:num_shared] == first.pages[:num_shared]
    cache.release(first)
    cache.check()
    cache.release(second)


def test_started_page_is_copied_and_its_source_held_until_then():
    cache = PrefixCache(8, page_size=4)
    cache.release(computed(cache, ids(1, 2, 3, 4, 5, 6)))
    lease = cache.admit(cache.lookup(NS, ids(1, 2, 3, 4, 5, 9)), num_tokens=6)
    copy = lease.pending_copy
    assert (copy.target, copy.num_tokens) == (lease.pages[1], 1)
    assert cache.pool.refs[copy.source] == 2
    cache.copied(lease)
    assert cache.pool.refs[copy.source] == 1
    cache.check()


def test_refused_admission_changes_nothing():
    cache = PrefixCache(5, page_size=4)
    holder = computed(cache, array("i", range(8)))
    match = cache.lookup(NS, array("i", [0, 1, 2, 3, 9]))
    assert cache.admit(match, num_tokens=24) is None
    cache.check()
    assert cache.lookup(NS, array("i", range(9))).num_tokens == 8
    cache.release(holder)


def test_a_request_as_large_as_the_pool_gives_up_the_page_to_copy_from():
    cache = PrefixCache(5, page_size=4)
    cache.release(computed(cache, ids(1, 2, 3)))
    lease = cache.admit(cache.lookup(NS, ids(1, 2, 9)), num_tokens=16)
    assert lease.num_shared_tokens == 0
    assert len(lease.pages) == 4
    cache.check()


def test_growing_evicts_and_fails_without_change():
    cache = PrefixCache(5, page_size=4)
    cache.release(computed(cache, array("i", range(8))))
    lease = computed(cache, array("i", range(100, 104)))
    assert cache.grow(lease, 3)
    assert cache.counters.num_evicted_pages["room"] == 2
    assert not cache.grow(lease, 1)
    assert len(lease.pages) == 4
    cache.check()


def test_fork_shares_whole_pages_and_copies_the_started_one():
    cache = PrefixCache(10, page_size=4)
    parent = computed(cache, array("i", range(10)))
    child = cache.fork(parent, num_shared_tokens=9, num_tokens=10)
    assert child.pages[:2] == parent.pages[:2]
    assert child.pages[2] != parent.pages[2]
    assert child.pending_copy.source == parent.pages[2]
    assert child.pending_copy.num_tokens == 1
    cache.release(parent)
    cache.check()
    cache.release(child)


def test_release_happens_once():
    cache = PrefixCache(5, page_size=4)
    lease = computed(cache, ids(1))
    cache.release(lease)
    with pytest.raises(InvariantViolation, match="twice"):
        cache.release(lease)


def test_disabled_cache_finds_nothing():
    cache = PrefixCache(5, page_size=4, is_enabled=False)
    cache.release(computed(cache, array("i", range(8))))
    assert cache.lookup(NS, array("i", range(9))).num_tokens == 0
    assert cache.pool.num_free == 4


def test_explanation_names_the_first_differing_token():
    cache = PrefixCache(8, page_size=4)
    cache.release(computed(cache, ids(1, 2, 3, 4, 5)))
    found = cache.explain(NS, [1, 2, 9])
    assert (found.num_cached_tokens, found.next_token_id, found.cached_token_ids) == (2, 9, (3, 4, 5))
    whole = cache.explain(NS, [1, 2, 3])
    assert (whole.num_cached_tokens, whole.next_token_id) == (2, None)


def test_check_finds_a_page_without_owner():
    cache = PrefixCache(5, page_size=4)
    cache.pool.allocate(1)
    with pytest.raises(InvariantViolation, match="references"):
        cache.check()
