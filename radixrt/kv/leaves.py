"""LeafQueue: which leaf of the radix tree comes up for eviction next."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from radixrt.errors import InvariantViolation
from radixrt.kv.eviction import EvictionFacts, EvictionKey
from radixrt.kv.node import RadixNode
from radixrt.kv.pool import PagePool

Row = tuple[EvictionKey, int, RadixNode]  # key, place among equals, leaf


class LeafQueue:
    """Own the order of the leaves.

    A leaf whose last page has another owner can lose nothing. When it comes up it is set aside, until it is used or
    the pool tells that the page has one owner left: running sequences hold many leaves, and no eviction has to pass
    over all of them again. It keeps its place in the order.

    Invariant: every leaf is queued under a key that is not too large, or set aside.
    """

    def __init__(self, pool: PagePool, key: Callable[[EvictionFacts], EvictionKey]) -> None:
        self._pool = pool
        self._key = key
        # Both may hold rows that are out of date. Under lru nearly all come in order and need no heap.
        self._run: deque[Row] = deque()  # sorted: those that came behind all others in it
        self._heap: list[Row] = []
        self._num_queued = 0
        self._last: Row | None = None  # that came up
        self._furthest: Row | None = None  # that came up since `take_turns`
        self._aside: dict[int, Row] = {}  # by the leaf's last page
        self._equals: dict[EvictionKey, list[int]] = {}  # key -> pages of leaves set aside

    def add(self, leaf: RadixNode) -> None:
        """Queue a leaf behind its equals, unless it is queued under a key that is not too large.

        Cost: O(log leaves).
        """
        if leaf.queued_key is None or self._key(leaf) < leaf.queued_key:
            self.add_all((leaf,))

    def add_all(self, leaves: Iterable[RadixNode]) -> None:
        """Queue leaves behind their equals, in this order, whether they are queued or not."""
        run, key_of, num_queued = self._run, self._key, self._num_queued
        last = run[-1][0] if run else None
        for leaf in leaves:
            leaf.queued_key = key = key_of(leaf)
            num_queued += 1
            if last is None or last <= key:
                run.append((key, num_queued, leaf))
                last = key
            else:
                heapq.heappush(self._heap, (key, num_queued, leaf))
        self._num_queued = num_queued

    def coming_up(self) -> Iterator[RadixNode]:
        """Take out one leaf after the other whose last page only the tree holds, in order, up to the last one wanted.

        Cost: O(log leaves), and as much for each row out of date and each leaf that is set aside, once.
        """
        run, heap, refs, key_of = self._run, self._heap, self._pool.refs, self._key
        while run or heap:
            row = run.popleft() if run and not (heap and heap[0] < run[0]) else heapq.heappop(heap)
            key, _, leaf = row
            if key is not leaf.queued_key and key != leaf.queued_key:
                continue  # it was queued again under a smaller key
            leaf.queued_key = None
            if leaf.children or leaf.parent is None:
                continue  # no longer a leaf: it comes back when its last child goes
            if key != key_of(leaf):
                self.add(leaf)
                continue
            self._last, furthest = row, self._furthest
            if furthest is None or row > furthest:
                self._furthest = row
            if refs[leaf.pages[-1]] == 1:
                yield leaf
            else:
                self.set_aside()

    def gives(self, num_pages: int, *, num_kept: int) -> bool:
        """Tell whether so many pages behind its first num_kept come from the leaf that came up last, however few at a time.

        Not if it would stand behind an equal one after the first of them.
        """
        assert self._last is not None
        key, _, leaf = self._last
        if any(rows and rows[0][0] == key for rows in (self._run, self._heap)):
            return False
        first = max(len(leaf.pages) - num_pages, num_kept)
        return list(map(self._pool.refs.__getitem__, leaf.pages[first:])).count(1) == num_pages

    def set_aside(self) -> None:
        """Keep the leaf that came up last out of the queue for as long as others hold its last page."""
        assert self._last is not None
        key, _, leaf = self._last
        page = leaf.pages[-1]
        self._take(page)  # of a leaf that ended in this page once
        self._aside[page] = self._last
        self._equals.setdefault(key, []).append(page)
        self._pool.watch(page)

    def take_turns(self) -> None:
        """Let leaves that were passed over stand behind their equals that did not come up."""
        furthest, self._furthest = self._furthest, None
        if furthest is not None and furthest[0] in self._equals:
            key, last_place, _ = furthest
            for place, page in sorted((self._aside[page][1], page) for page in self._equals[key]):
                if place <= last_place:
                    self._num_queued += 1
                    self._aside[page] = (key, self._num_queued, self._aside[page][2])

    def recall(self, page: int) -> None:
        """Queue the leaf that was set aside under a page, if any, where it stood: its key is corrected as any other's."""
        row = self._take(page)
        if row is not None:
            key, _, leaf = row
            if leaf.queued_key is None and leaf.is_leaf and leaf.pages[-1] == page:
                leaf.queued_key = key
                heapq.heappush(self._heap, row)

    def _take(self, page: int) -> Row | None:
        row = self._aside.pop(page, None)
        if row is not None:
            equals = self._equals[row[0]]
            equals.remove(page)
            if not equals:
                del self._equals[row[0]]
        return row

    def recall_single(self) -> None:
        """Queue the leaves that were set aside and can lose pages now. Cost: O(log leaves) each."""
        for page in self._pool.take_single():
            self.recall(page)

    def check(self, leaves: Iterable[RadixNode]) -> None:
        """Raise InvariantViolation unless all leaves of the tree are queued or set aside. Cost: O(leaves)."""
        queued = {id(node) for key, _, node in (*self._run, *self._heap) if key is node.queued_key}
        if list(self._run) != sorted(self._run, key=lambda row: row[:2]):
            raise InvariantViolation("the run of leaves is not in order")
        for leaf in leaves:
            page = leaf.pages[-1]
            is_aside = page in self._aside and self._aside[page][2] is leaf and self._pool.is_watched(page)
            if id(leaf) not in queued and not is_aside:
                raise InvariantViolation(f"the leaf that ends in page {page} is neither queued nor set aside")
