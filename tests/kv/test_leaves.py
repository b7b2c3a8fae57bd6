import heapq
import random

import pytest

from radixrt.kv.eviction import POLICIES
from radixrt.kv.leaves import LeafQueue
from radixrt.kv.packed import num_common_tokens, pack
from radixrt.kv.pool import PagePool
from radixrt.kv.radix import RadixTree
from radixrt.types import DEFAULT_NAMESPACE as NS


class PlainQueue(LeafQueue):
    """One heap; passes over every leaf that others hold, and queues it again, in every eviction."""

    def __init__(self, pool, key):
        super().__init__(pool, key)
        self.passed = []
        self.num_looks = 0

    def add(self, leaf):
        key = self._key(leaf)
        if leaf.queued_key is None or key < leaf.queued_key:
            self._num_queued += 1
            leaf.queued_key = key
            heapq.heappush(self._heap, (key, self._num_queued, leaf))

    def set_aside(self):
        self.num_looks += 1
        self.passed.append(self._last[2])

    def take_turns(self):
        for leaf in self.passed:
            self.add(leaf)
        self.passed = []

    def check(self, leaves):
        pass


class CountingQueue(LeafQueue):
    num_looks = 0

    def set_aside(self):
        self.num_looks += 1
        super().set_aside()


class Waiting:
    """Who waits, by hand: every answer is good for one question."""

    is_open = False

    def __init__(self):
        self.prompts = []

    def gap(self, namespace, tokens):
        return self

    def num_wanted(self, tokens, *, num_before=0):
        longest = max((num_common_tokens(prompt, tokens) for prompt in self.prompts), default=0)
        return max(longest - num_before, 0)


class Side:
    """A tree with one kind of queue; `held` are pages of running sequences."""

    def __init__(self, queue, policy, page_size):
        self.pool = PagePool(400)
        self.tree = RadixTree(self.pool, page_size=page_size, eviction_key=POLICIES[policy])
        self.tree._leaves = queue(self.pool, POLICIES[policy])
        self.held = []

    def do(self, operation, *args):
        return getattr(self, operation)(*args)

    def publish(self, tokens, num_held, priority):
        pages = self.pool.allocate(-(-len(tokens) // self.tree.page_size))
        assert pages is not None
        self.tree.insert(NS, pack(tokens), pages, priority=priority)
        self.pool.release(pages[num_held:])
        self.held.append(pages[:num_held])

    def share(self, tokens):
        match = self.tree.lookup(NS, pack(tokens), max_tokens=len(tokens))
        pages = [*match.pages, *([match.partial_page] if match.partial_page else [])]
        self.pool.retain(pages)
        self.held.append(pages)

    def release(self, index):
        self.pool.release(self.held.pop(index))

    def touch(self, tokens):
        self.tree.touch(NS, pack(tokens))

    def demote(self, tokens):
        self.tree.demote(NS, pack(tokens))

    def evict(self, num_pages, waiting):
        return self.tree.evict(num_pages, wanted=waiting)


def random_operation(rng, sides, waiting, page_size):
    draw, held = rng.random(), sides[0].held
    tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 5 * page_size + 3))]
    if draw < 0.3 and len(held) < 20:
        num_pages = -(-len(tokens) // page_size)
        return "publish", tokens, rng.choice([0, rng.randrange(num_pages + 1), num_pages]), rng.randrange(3)
    if draw < 0.4:
        return "share", tokens
    if draw < 0.6 and held:
        return "release", rng.randrange(len(held))
    if draw < 0.7:
        return "touch", tokens
    if draw < 0.75:
        return "demote", tokens
    if draw < 0.85:
        waiting.prompts = [pack(tokens), *waiting.prompts][: rng.randrange(4)]
    return "evict", rng.randrange(1, 6), rng.choice([None, waiting])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_leaves_that_are_set_aside_keep_their_place_in_the_order(policy, page_size):
    num_evictions = 0
    looks = [0, 0]
    for seed in range(15):
        rng, waiting = random.Random(seed), Waiting()
        sides = [Side(queue, policy, page_size) for queue in (CountingQueue, PlainQueue)]
        for number in range(150):
            operation = random_operation(rng, sides, waiting, page_size)
            one, other = [side.do(*operation) for side in sides]
            assert one == other, f"seed {seed}, operation {number}: {operation}"
            num_evictions += operation[0] == "evict" and bool(one)
            assert sides[0].pool.refs == sides[1].pool.refs
            sides[0].tree.check()
            sides[0].pool.check()
        looks = [before + side.tree._leaves.num_looks for before, side in zip(looks, sides, strict=True)]
    assert num_evictions > 150
    assert looks[0] < looks[1] / 2


def test_a_leaf_that_others_hold_is_looked_at_once():
    pool = PagePool(200)
    tree = RadixTree(pool, page_size=1)
    tree._leaves = queue = CountingQueue(pool, POLICIES["lru"])
    for token_id in range(50):
        pages = pool.allocate(1)
        tree.insert(NS, pack([token_id]), pages)  # all held
    for token_id in range(100, 120):
        pages = pool.allocate(1)
        tree.insert(NS, pack([token_id]), pages)
        pool.release(pages)
        assert [eviction.num_pages for eviction in tree.evict(1)] == [1]
    assert queue.num_looks == 50


class Calls(Side):
    """Frees pages in several calls, with or without a word on those to come."""

    def __init__(self, *args, tells):
        super().__init__(*args)
        self.tells = tells
        self.num_ahead = 0

    def evict(self, num_calls, waiting):
        amounts = [1 + place % 2 for place in range(num_calls)]
        num_free = 0
        for place, num_pages in enumerate(amounts):
            if num_free < num_pages:
                num_ahead = sum(amounts[place + 1 :]) if self.tells else 0
                evictions = self.tree.evict(num_pages - num_free, wanted=waiting, num_ahead=num_ahead)
                num_free += sum(eviction.num_pages for eviction in evictions)
            num_free = max(num_free - num_pages, 0)
            self.num_ahead += num_free
        assert num_free == 0

    def cached(self):
        return sorted((*self.tree._path(node), len(node.pages), node.last_used) for node in self.tree.nodes())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_goes_ahead_is_what_the_calls_to_come_would_take(policy, page_size):
    num_ahead = 0
    for seed in range(20):
        rng, waiting = random.Random(seed), Waiting()
        sides = [Calls(LeafQueue, policy, page_size, tells=tells) for tells in (True, False)]
        for number in range(150):
            operation = random_operation(rng, sides, waiting, page_size)
            for side in sides:
                side.do(*operation)
            assert sides[0].cached() == sides[1].cached(), f"seed {seed}, operation {number}: {operation}"
            sides[0].tree.check()
            sides[0].pool.check()
        num_ahead += sides[0].num_ahead
        assert sides[1].num_ahead == 0
    assert num_ahead > 20
