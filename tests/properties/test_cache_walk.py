"""Random walks over the prefix cache with a shadow of every slot's content."""

import random
from array import array

import pytest

from radixrt.kv.cache import PrefixCache
from radixrt.types import DEFAULT_NAMESPACE as NS


class Walk:
    """Random operations; `content` says which token's KV each slot holds."""

    def __init__(self, seed, page_size):
        self.rng = random.Random(seed)
        self.page_size = page_size
        self.cache = PrefixCache(self.rng.choice([12, 40]), page_size=page_size)
        self.content = {}
        self.live = []  # (lease, tokens)
        self.published = []
        self.num_scopes = 0
        self.used = []  # (scope, user): scopes that a sequence under way names
        self.num_users = 0

    def tokens(self, low, high):
        return array("i", [self.rng.randrange(2) for _ in range(self.rng.randrange(low, high))])

    def slot(self, lease, position):
        return (lease.pages[position // self.page_size], position % self.page_size)

    def write(self, lease, tokens, start):
        for position in range(start, len(tokens)):
            self.content[self.slot(lease, position)] = tokens[position]

    def begin(self, lease, tokens):
        if lease is None:
            return
        if (copy := lease.pending_copy) is not None:
            for offset in range(copy.num_tokens):
                self.content[(copy.target, offset)] = self.content[(copy.source, offset)]
        self.cache.copied(lease)
        self.write(lease, tokens, lease.num_shared_tokens)
        self.live.append((lease, tokens))

    def admit(self):
        tokens = self.tokens(1, 3 * self.page_size + 6)
        match = self.cache.lookup(NS, tokens)
        held = [self.content[(page, offset)] for page in match.pages for offset in range(self.page_size)]
        held += [self.content[(match.partial_page, offset)] for offset in range(match.num_partial_tokens)]
        assert held == tokens[: match.num_tokens].tolist(), "the tree names pages that hold something else"
        if self.cache.counters.num_evicted_pages.total() == 0:
            self.assert_longest(tokens, match.num_tokens)
        self.begin(self.cache.admit(match, num_tokens=len(tokens)), tokens)

    def assert_longest(self, tokens, num_found):
        longest = 0
        for other in self.published:
            num_common = 0
            while num_common < min(len(other), len(tokens) - 1) and other[num_common] == tokens[num_common]:
                num_common += 1
            longest = max(longest, num_common)
        assert num_found == longest, "the longest cached prefix was missed"

    def grow(self):
        if self.live:
            index = self.rng.randrange(len(self.live))
            lease, tokens = self.live[index]
            longer = tokens + self.tokens(1, self.page_size + 2)
            num_pages = self.cache.num_pages_for(len(longer)) - len(lease.pages)
            if self.cache.grow(lease, num_pages):
                self.write(lease, longer, len(tokens))
                self.live[index] = (lease, longer)

    def fork(self):
        if self.live:
            lease, tokens = self.rng.choice(self.live)
            num_shared = self.rng.randrange(len(tokens) + 1)
            branch = tokens[:num_shared] + self.tokens(1, 4)
            child = self.cache.fork(lease, num_shared_tokens=num_shared, num_tokens=len(branch))
            self.begin(child, branch)

    def publish(self):
        if self.live:
            lease, tokens = self.rng.choice(self.live)
            self.cache.publish(lease, NS, tokens)
            self.published.append(tokens)

    def scope(self):
        """Open, use, expire and close scopes."""
        draw, scopes = self.rng.random(), self.cache.scopes
        self.cache.now_s += self.rng.random()
        if draw < 0.2 and self.num_scopes < 1000:
            scopes.open(self.num_scopes, ttl_s=self.rng.choice([1, 30]), now_s=self.cache.now_s)
            self.num_scopes += 1
        elif draw < 0.3:
            closed = self.rng.randrange(self.num_scopes + 1)
            scopes.close(closed)
            self.used = [item for item in self.used if item[0] != closed]
        elif draw < 0.4:
            scopes.expire(self.cache.now_s)
            assert all(scope_id in scopes for scope_id, _ in self.used), "a scope in use ran out"
        elif draw < 0.5:
            if self.num_scopes and (last := self.num_scopes - 1) in scopes:
                self.num_users += 1
                scopes.begin_use(last, self.num_users)
                self.used.append((last, self.num_users))
        elif draw < 0.6 and self.used:
            scopes.end_use(*self.used.pop(), now_s=self.cache.now_s)
        elif self.published:
            recent = range(max(self.num_scopes - 4, 0), self.num_scopes + 1)
            self.cache.hold(self.rng.choice(recent), NS, self.rng.choice(self.published))

    def end(self, publish_probability):
        if self.live:
            lease, tokens = self.live.pop(self.rng.randrange(len(self.live)))
            if self.rng.random() < publish_probability:  # finish or preempt; else abort or fault
                self.cache.publish(lease, NS, tokens)
                self.published.append(tokens)
            self.cache.release(lease)

    def step(self):
        operation = self.rng.choices(
            [
                self.admit,
                self.grow,
                self.fork,
                self.publish,
                lambda: self.end(0.7),
                lambda: self.cache._evict(self.rng.randrange(3), reason="room", label=""),
                self.cache.clear,
                self.scope,
            ],
            weights=[30, 12, 8, 15, 20, 3, 0.3, 8],
        )[0]
        operation()
        self.cache.check()
        for lease, tokens in self.live:
            held = [self.content[self.slot(lease, position)] for position in range(len(tokens))]
            assert held == tokens.tolist(), "a leased page was overwritten"


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_always_hold_what_the_tree_says(page_size, num_walk_operations):
    num_walks = 60
    for seed in range(num_walks):
        walk = Walk(seed, page_size)
        try:
            for _ in range(num_walk_operations // 3 // num_walks + 1):
                walk.step()
        except BaseException as error:
            error.add_note(f"seed {seed}, page size {page_size}")
            raise
        for lease, _ in walk.live:
            walk.cache.release(lease)
        for used in walk.used:
            walk.cache.scopes.end_use(*used, now_s=walk.cache.now_s)
        walk.cache.scopes.expire(float("inf"))
        walk.cache.clear()
        walk.cache.check()
        assert walk.cache.pool.num_free == walk.cache.pool.capacity
