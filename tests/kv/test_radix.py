import random

import pytest

from radixrt.errors import InvariantViolation
from radixrt.kv.eviction import POLICIES, Eviction
from radixrt.kv.history import EvictionLog
from radixrt.kv.packed import TOKEN_BYTES, num_common_tokens, pack, unpack
from radixrt.kv.pool import PagePool
from radixrt.kv.radix import RadixTree
from radixrt.sched.prompts import SortedPrompts
from radixrt.types import DEFAULT_NAMESPACE, Namespace

NS = DEFAULT_NAMESPACE


class Shelf:
    """A tree, its pool, and the pages of what was inserted."""

    def __init__(self, num_pages=64, *, page_size=4, policy="lru"):
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.pool, page_size=page_size, eviction_key=POLICIES[policy])

    def insert(self, token_ids, *, namespace=NS, keep=False, priority=0):
        pages = self.pool.allocate(-(-len(token_ids) // self.tree.page_size))
        self.tree.insert(namespace, pack(token_ids), pages, priority=priority)
        if not keep:
            self.pool.release(pages)
        self.tree.check()
        self.pool.check()
        return pages

    def evict(self, num_pages):
        return sum(eviction.num_pages for eviction in self.tree.evict(num_pages))

    def match(self, token_ids, *, namespace=NS):
        return self.tree.lookup(namespace, pack(token_ids), max_tokens=len(token_ids))


def test_packing_keeps_tokens():
    token_ids = [0, 1, 49151, 2**31 - 1]
    assert unpack(pack(token_ids)) == token_ids


@pytest.mark.parametrize("length", [0, 1, 2, 3, 17, 32, 33, 200])
@pytest.mark.parametrize("difference", [0, 1, 2, 16, 31, 32, 99, 199])
def test_num_common_tokens_counts_up_to_the_first_difference(length, difference):
    left = list(range(1000, 1000 + length))
    right = left.copy()
    if difference < length:
        right[difference] = 7
    assert num_common_tokens(pack(left), pack([*right, 5])) == min(length, difference)


def test_match_ends_at_the_exact_token_inside_a_page():
    shelf = Shelf(page_size=4)
    pages = shelf.insert([1, 2, 3, 4, 5, 6, 7, 8])
    match = shelf.match([1, 2, 3, 4, 5, 6, 9, 9, 9])
    assert (match.num_tokens, match.pages, match.partial_page) == (6, (pages[0],), pages[1])
    assert match.num_partial_tokens == 2


def test_partly_filled_tail_is_found():
    shelf = Shelf(page_size=4)
    pages = shelf.insert([1, 2, 3, 4, 5])
    match = shelf.match([1, 2, 3, 4, 5, 6])
    assert (match.num_tokens, match.partial_page) == (5, pages[1])


def test_longer_prompt_replaces_the_partly_filled_tail():
    shelf = Shelf(page_size=4)
    first = shelf.insert([1, 2, 3, 4, 5])
    second = shelf.insert([1, 2, 3, 4, 5, 6, 7])
    assert shelf.match([1, 2, 3, 4, 5, 6, 7, 8]).partial_page == second[1]
    assert shelf.tree.num_pages == 2
    assert shelf.pool.refs[first[1]] == 0


def test_equal_pages_are_kept_once():
    shelf = Shelf(page_size=4)
    first = shelf.insert(list(range(8)))
    second = shelf.insert(list(range(8)))
    assert shelf.match(list(range(9))).pages == tuple(first)
    assert all(shelf.pool.refs[page] == 0 for page in second)


def test_best_partial_match_among_many_siblings_is_found():
    shelf = Shelf(num_pages=400, page_size=8)
    rng = random.Random(5)
    stored = [[1, 2, 3] + [rng.randrange(3) for _ in range(5)] for _ in range(150)]
    for token_ids in stored:
        shelf.insert(token_ids)
    for _ in range(200):
        wanted = [1, 2, 3] + [rng.randrange(3) for _ in range(5)]
        best = max(num_common_tokens(pack(wanted), pack(other)) for other in stored)
        assert shelf.match(wanted).num_tokens == best


def test_namespaces_share_nothing():
    shelf = Shelf()
    shelf.insert([1, 2, 3, 4], namespace=Namespace(salt="a"))
    assert shelf.match([1, 2, 3, 4, 5], namespace=Namespace(salt="b")).num_tokens == 0
    assert shelf.match([1, 2, 3, 4, 5], namespace=Namespace(adapter="a")).num_tokens == 0
    assert shelf.match([1, 2, 3, 4, 5], namespace=Namespace(salt="a")).num_tokens == 4


def test_lookup_changes_nothing():
    shelf = Shelf(num_pages=3, page_size=4)
    shelf.insert([1, 2, 3, 4])
    shelf.insert([5, 6, 7, 8])
    shelf.match([1, 2, 3, 4, 5])  # not a use: the older leaf still goes first
    assert shelf.evict(1) == 1
    assert shelf.match([1, 2, 3, 4, 5]).num_tokens == 0


def test_eviction_takes_tail_pages_first():
    shelf = Shelf(page_size=4)
    shelf.insert(list(range(16)))
    assert shelf.evict(1) == 1
    assert shelf.match(list(range(17))).num_tokens == 12
    shelf.tree.check()


def test_eviction_takes_the_least_recently_used_leaf():
    shelf = Shelf(page_size=2)
    shelf.insert([1, 1])
    shelf.insert([2, 2])
    shelf.tree.touch(NS, pack([1, 1, 3]))
    shelf.tree.evict(1)
    assert shelf.match([1, 1, 3]).num_tokens == 2
    assert shelf.match([2, 2, 3]).num_tokens == 0


def test_parent_goes_only_after_its_children():
    shelf = Shelf(page_size=2)
    shelf.insert([1, 1, 2, 2])
    shelf.insert([1, 1, 3, 3])
    assert shelf.evict(2) == 2
    assert shelf.match([1, 1, 2, 2]).num_tokens == 2
    assert shelf.evict(5) == 1
    assert shelf.tree.num_pages == 0
    shelf.tree.check()


def test_pages_held_by_a_lease_are_not_evicted():
    shelf = Shelf(page_size=2)
    shelf.insert([1, 1, 2, 2], keep=True)
    shelf.insert([3, 3])
    assert shelf.evict(9) == 1
    assert shelf.match([1, 1, 2, 2, 5]).num_tokens == 4
    shelf.tree.check()


def evicted_first(policy):
    shelf = Shelf(page_size=1, policy=policy)
    shelf.insert([1], priority=2)
    shelf.insert([2], priority=1)
    shelf.insert([3], priority=1)
    for token_id in (1, 1, 3, 2):
        shelf.tree.touch(NS, pack([token_id, 9]))
    shelf.tree.evict(1)
    [gone] = [token_id for token_id in (1, 2, 3) if shelf.match([token_id, 9]).num_tokens == 0]
    return gone


@pytest.mark.parametrize(("policy", "gone"), [("lru", 1), ("lfu", 3), ("fifo", 1), ("priority", 3)])
def test_policies_choose_different_leaves(policy, gone):
    assert evicted_first(policy) == gone


def test_continuation_names_what_stands_in_the_prompts_place():
    shelf = Shelf(page_size=4)
    shelf.insert([1, 2, 3, 4, 5, 6, 7])
    assert shelf.tree.continuation(NS, pack([1, 2, 9])) == [3, 4, 5, 6, 7]
    assert shelf.tree.continuation(NS, pack([9])) == []


def test_emptied_namespace_is_forgotten():
    shelf = Shelf()
    for index in range(10):
        shelf.insert([1, 2, 3], namespace=Namespace(salt=str(index)))
    shelf.evict(10)
    assert not shelf.tree._roots
    assert not shelf.tree._namespaces


def test_split_keeps_recency_hits_and_priority():
    for policy in ("lru", "lfu", "priority"):
        shelf = Shelf(page_size=2, policy=policy)
        shelf.insert([5, 5])
        shelf.insert([1, 1, 2, 2], priority=3)
        shelf.tree.touch(NS, pack([1, 1, 2, 2, 9]))
        shelf.insert([1, 1, 3, 3], priority=3)
        shelf.tree.touch(NS, pack([1, 1, 3, 3, 9]))
        shelf.evict(1)
        assert shelf.match([5, 5, 9]).num_tokens == 0, policy
        shelf.evict(2)  # both branches; what is left is the split's upper part
        shelf.insert([6, 6])
        shelf.evict(1)
        gone = 1 if policy == "lru" else 6
        assert shelf.match([gone, gone, 9]).num_tokens == 0, policy


def test_insertion_counts_as_a_use():
    shelf = Shelf(page_size=2)
    shelf.insert([1, 1])
    shelf.insert([2, 2])
    shelf.insert([1, 1])
    shelf.evict(1)
    assert shelf.match([2, 2, 9]).num_tokens == 0


def test_demoted_leaf_goes_first():
    shelf = Shelf(page_size=2)
    shelf.insert([1, 1])
    shelf.insert([2, 2])
    shelf.tree.demote(NS, pack([2, 2]))
    shelf.tree.check()
    shelf.evict(1)
    assert shelf.match([2, 2, 9]).num_tokens == 0


def test_check_finds_a_lost_reference():
    shelf = Shelf(page_size=4)
    [page] = shelf.insert([1, 2, 3])
    shelf.pool.release([page])
    with pytest.raises(InvariantViolation, match="free page"):
        shelf.tree.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_match_that_still_holds_is_what_a_lookup_gives(page_size):
    num_held = num_renewed = num_outdated = 0
    for seed in range(10):
        rng = random.Random(seed)
        shelf, known = Shelf(200, page_size=page_size), []
        for _ in range(60):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * page_size + 3))]
            if rng.random() < 0.7 and shelf.pool.num_free > 20:
                shelf.insert(tokens, keep=rng.random() < 0.2)
            else:
                shelf.evict(rng.randrange(1, 4))
            known.append((tokens, shelf.match(tokens)))
            for place, (tokens, match) in enumerate(known):
                now = shelf.match(tokens)
                renewed = shelf.tree.renewed(match)
                if renewed is not None:
                    assert now == renewed, f"seed {seed}"
                    num_held += 1
                    num_renewed += renewed is not match
                    known[place] = (tokens, renewed)
                else:
                    num_outdated += 1
                    known[place] = (tokens, now)
    assert num_held > 1000
    assert num_renewed > 100
    assert num_outdated > 1000


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_known_to_be_wanted_of_a_leaf_holds_after_its_cuts(page_size):
    num_known = num_cuts = 0
    for seed in range(20):
        rng = random.Random(seed)
        shelf, view, prompts = Shelf(200, page_size=page_size), SortedPrompts(), []
        for number in range(80):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 6 * page_size + 3))]
            draw = rng.random()
            if draw < 0.4 and shelf.pool.num_free > 60:
                shelf.insert(tokens)
            elif draw < 0.5:
                prompts.append((pack(tokens), number))
                view.add(NS, *prompts[-1], number)
            elif draw < 0.55 and prompts:
                view.remove(NS, *prompts.pop(rng.randrange(len(prompts))))
            else:
                num_cuts += len(shelf.tree.evict(rng.randrange(1, 3), wanted=view))
            for leaf in shelf.tree.leaves():
                if leaf.wanted is not None and leaf.wanted[0].is_open and leaf.wanted[1] is leaf.tokens:
                    namespace, runs = shelf.tree._path(leaf)
                    num_before = sum(map(len, runs[:-1])) // TOKEN_BYTES
                    path = b"".join(runs)
                    num_wanted = view.gap(namespace, path).num_wanted(path, num_before=num_before)
                    assert leaf.wanted[2] == -(-num_wanted // page_size), f"seed {seed}"
                    num_known += 1
    assert num_known > 100
    assert num_cuts > 100


def test_a_match_in_an_emptied_namespace_is_not_renewed():
    shelf = Shelf(page_size=4)
    shelf.insert([1, 2, 3, 4])
    match = shelf.match([5, 6, 7, 8])
    shelf.evict(1)
    shelf.insert([5, 6, 7, 8])
    assert shelf.tree.renewed(match) is None
    assert shelf.match([5, 6, 7, 8]).num_tokens == 4


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_eviction_names_what_was_cached_before_it(page_size):
    num_again = 0
    for seed in range(10):
        rng = random.Random(seed)
        shelf = Shelf(200, page_size=page_size)
        for _ in range(100):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 6 * page_size + 3))]
            if rng.random() < 0.4 and shelf.pool.num_free > 60:
                shelf.insert(tokens)
                continue
            before = {shelf.tree._path(leaf) for leaf in shelf.tree.leaves()}
            paths = {(namespace, b"".join(runs)) for namespace, runs in before}
            found = shelf.tree.evict(1)
            after = {shelf.tree._path(leaf) for leaf in shelf.tree.leaves()}
            for eviction in found:
                path = b"".join(eviction.runs)
                assert (eviction.namespace, path[: eviction.num_tokens * TOKEN_BYTES]) in paths
                kept = path[: eviction.num_kept_tokens * TOKEN_BYTES]
                assert not kept or any(b"".join(runs).startswith(kept) for _, runs in after)
                assert eviction.num_kept_tokens < eviction.num_tokens
                num_again += len(path) > eviction.num_tokens * TOKEN_BYTES
    assert num_again > 50


def test_what_was_cut_off_before_does_not_count_for_a_later_eviction():
    shelf, log = Shelf(page_size=1), EvictionLog()
    shelf.insert([1, 2, 3, 4])
    for _ in range(2):
        [eviction] = shelf.tree.evict(1)
    log.add(eviction, at_s=0.0, reason="room", label="")  # the first one is forgotten
    assert log.longest(NS, pack([1, 2, 3, 4, 5]), min_tokens=0)[0] == 3


def test_pieces_of_a_record_are_compared_as_one_run():
    rng = random.Random(0)
    for _ in range(500):
        log, records = EvictionLog(), []
        for _ in range(4):
            runs = tuple(
                pack(rng.choices(range(2), k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))
            )
            path = unpack(b"".join(runs))
            num_tokens = rng.randrange(1, len(path) + 1)
            num_kept = rng.randrange(num_tokens)
            log.add(Eviction(NS, runs, num_tokens, num_kept, 1), at_s=0.0, reason="room", label="")
            records.append((path[:num_tokens], num_kept))
        tokens = rng.choices(range(2), k=8)
        commons = [num_common(path, tokens) for path, _ in records]
        counting = [n for n, (_, num_kept) in zip(commons, records, strict=True) if n > max(1, num_kept)]
        assert log.longest(NS, pack(tokens), min_tokens=1)[0] == max(counting, default=1)


def num_common(a, b):
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
