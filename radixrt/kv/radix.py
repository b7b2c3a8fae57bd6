"""RadixTree: computed prefixes as a tree of page runs. Integers only.

Edges are exact token ids, compared as tokens. Inside the tree they are packed, four bytes a token, so that a
comparison is one memcmp and the longest common prefix of two children is found by bisection: in sorted order
the best partial match stands next to the place where the wanted key would be inserted.

             root of a namespace
               | [t0 .. t31] pages 4 9        whole pages only: it has children
         ______|______
        |             |
   [t32 .. t47]   [t32' .. t40']              a leaf; its last page may be partly filled
    page 7         page 2 (9 of 16 slots)

Sources: RadixAttention (arXiv:2312.07104) for the tree over KV; TGI's radix trie for the counter in place of a
clock and the truncation of tails.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from radixrt.errors import InvariantViolation
from radixrt.kv.eviction import Eviction, EvictionFacts, EvictionKey, lru
from radixrt.kv.leaves import LeafQueue
from radixrt.kv.node import LastCut, RadixNode, Wanted
from radixrt.kv.packed import TOKEN_BYTES, num_common_tokens, unpack
from radixrt.kv.pool import PagePool
from radixrt.types import DEFAULT_NAMESPACE, Namespace

MAX_SPARED = 64  # wanted leaves that one eviction looks at before it takes what comes


class PrefixMatch(NamedTuple):
    """The cached prefix of a prompt. A named tuple, since waiting sequences are matched in every step.

    Attributes:
        namespace: where it was found.
        pages: whole pages, in order.
        partial_page: a page whose first `num_partial_tokens` slots also match, or None; to be copied from.
        num_tokens: all matching tokens; less than the prompt's length.
        end, end_version, num_links, key: the nodes where the search ended, their versions, and what was looked for
            among the children of the first one, which had changed so often; see `RadixTree.renewed`.
    """

    namespace: Namespace
    pages: tuple[int, ...] = ()
    partial_page: int | None = None
    num_partial_tokens: int = 0
    num_tokens: int = 0
    end: tuple[()] | tuple[RadixNode] | tuple[RadixNode, RadixNode] = ()
    end_version: int = 0
    num_links: int = 0
    key: bytes = b""


class RadixTree:
    """Own which pages hold which prefixes; holds one pool reference per page it names.

    Invariants: no child's key is a prefix of a sibling's; every leaf is in the queue of leaves; no page is named twice.
    """

    def __init__(
        self, pool: PagePool, *, page_size: int, eviction_key: Callable[[EvictionFacts], EvictionKey] = lru
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.num_pages = 0
        self.version = 0  # grows whenever a lookup may give something else
        self._page_bytes = page_size * TOKEN_BYTES
        self._counter = 0
        self._roots: dict[Namespace, RadixNode] = {}
        self._namespaces: dict[RadixNode, Namespace] = {}  # of the roots
        self._leaves = LeafQueue(pool, eviction_key)
        self._last_cut: LastCut = (None, b"", DEFAULT_NAMESPACE, (), 0)

    # -- reading ----------------------------------------------------------------------------------------

    def lookup(self, namespace: Namespace, tokens: bytes, *, max_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix of packed `tokens`, at most max_tokens long. Changes: nothing."""
        node = self._roots.get(namespace)
        pages: list[int] = []
        start = 0  # bytes of `tokens` matched so far, whole nodes only
        limit = max_tokens * TOKEN_BYTES
        end: tuple[()] | tuple[RadixNode] | tuple[RadixNode, RadixNode] = ()
        num_links, key = 0, b""
        while node is not None:
            num_links, key = node.num_links, tokens[start : start + self._page_bytes]
            child, num_common = self._best_child(node, key)
            if child is None:
                end = (node,)
                break
            is_whole = tokens.startswith(child.tokens, start)
            if is_whole:
                pages += child.pages
                start += len(child.tokens)
            else:
                if num_common == self.page_size:
                    num_common = num_common_tokens(child.tokens, tokens[start : start + len(child.tokens)])
                pages += child.pages[: -(-num_common // self.page_size)]
                start += num_common * TOKEN_BYTES
            if not is_whole or start >= limit:
                end = (node, child)
                break
            node = child
        num_tokens = min(start, limit) // TOKEN_BYTES
        num_whole, num_partial = divmod(num_tokens, self.page_size)
        return PrefixMatch(
            namespace,
            tuple(pages[:num_whole]),
            pages[num_whole] if num_partial else None,
            num_partial,
            num_tokens,
            end,
            sum(node.version for node in end),
            num_links,
            key,
        )

    def renewed(self, match: PrefixMatch) -> PrefixMatch | None:
        """Give a match that a lookup would give again, with what is known of it now; None if that is not known.

        Above the nodes where it ended, the path can be split, and nothing else: they have children. Where children of
        the first one came or went, the match holds if the best of them is still the same.
        """
        end = match.end
        if not end:
            return None
        node, child = end[0], end[1] if len(end) == 2 else None
        if node.version + (child.version if child is not None else 0) != match.end_version:
            return None
        if node.num_links == match.num_links:
            return match
        is_there = node.parent is not None or self._roots.get(match.namespace) is node
        if not is_there or self._best_child(node, match.key)[0] is not child:
            return None
        return tuple.__new__(PrefixMatch, (*match[:-2], node.num_links, match.key))

    def _best_child(self, node: RadixNode, key: bytes) -> tuple[RadixNode | None, int]:
        """Give the child that shares most leading tokens with `key` (at most a page), and how many."""
        exact = node.children.get(key)
        if exact is not None:
            return exact, len(key) // TOKEN_BYTES
        place = bisect_left(node.child_keys, key)
        best, most = None, 0
        for neighbour in node.child_keys[max(place - 1, 0) : place + 1]:
            num_common = num_common_tokens(neighbour, key)
            if num_common > most:
                best, most = node.children[neighbour], num_common
        return best, most

    def continuation(self, namespace: Namespace, tokens: bytes) -> list[int]:
        """Give the tokens that the tree holds after the longest match of `tokens`, at most one node's. Pure."""
        node, start = self._roots.get(namespace), 0
        while node is not None:
            child, _ = self._best_child(node, tokens[start : start + self._page_bytes])
            if child is None:
                break
            num_common = num_common_tokens(child.tokens, tokens[start : start + len(child.tokens)])
            if num_common < child.num_tokens:
                return unpack(child.tokens[num_common * TOKEN_BYTES :])
            node, start = child, start + len(child.tokens)
        return []

    # -- writing ----------------------------------------------------------------------------------------

    def touch(self, namespace: Namespace, tokens: bytes) -> None:
        """Count a use of every node on the path of `tokens`.

        Changes: recency and hit counts only.
        """
        self._counter += 1
        node, start = self._roots.get(namespace), 0
        while node is not None:
            child, num_common = self._best_child(node, tokens[start : start + self._page_bytes])
            if child is None or num_common == 0:
                return
            self._use(child)
            child.num_hits += 1
            start += len(child.tokens)
            if start >= len(tokens) or not tokens.startswith(child.tokens, start - len(child.tokens)):
                return
            node = child

    def _use(self, node: RadixNode) -> None:
        node.last_used = self._counter
        if node.queued_key is None and not node.children:
            self._leaves.recall(node.pages[-1])

    def insert(self, namespace: Namespace, tokens: bytes, pages: list[int], *, priority: int = 0) -> None:
        """Name `pages` as holding `tokens` where the tree has no pages for them yet.

        Args:
            tokens: packed; their KV is computed.
            pages: ceil(num_tokens / page_size) pages or more, the first ones count; each newly named one gets a
                reference.
            priority: every node on the path has at least this one; only the `priority` policy reads it.
        Changes: tree and references. Pages for tokens that the tree holds already are left alone.
        """
        self._counter += 1
        self.version += 1
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = RadixNode(None, b"", [], created=self._counter)
            self._namespaces[node] = namespace
        start = 0
        while start < len(tokens):
            num_left = (len(tokens) - start) // TOKEN_BYTES
            child, num_common = self._best_child(node, tokens[start : start + self._page_bytes])
            if child is None or not self._shares_key(child, num_left, num_common):
                rest = pages[start // self._page_bytes : -(-len(tokens) // self._page_bytes)]
                self._add_leaf(node, tokens[start:], rest, priority=priority)
                return
            self._use(child)
            child.priority = max(child.priority, priority)
            if tokens.startswith(child.tokens, start):
                num_common = child.num_tokens
            else:
                num_common = num_common_tokens(child.tokens, tokens[start : start + len(child.tokens)])
            is_inner = child.children or num_left == child.num_tokens
            if num_common == child.num_tokens and num_common % self.page_size == 0 and is_inner:
                node, start = child, start + len(child.tokens)
                continue
            if num_common == child.num_tokens:
                num_before = (start + len(child.tokens)) // self._page_bytes
                added = pages[num_before : -(-len(tokens) // self._page_bytes)]
                self._extend_leaf(child, tokens[start:], added)
                return
            if num_common == num_left:
                return  # the tree already holds all of it
            # Divergence inside the child: whole pages stay above, both continuations go below.
            node = self._split(child, num_common // self.page_size)
            start += len(node.tokens)

    def _shares_key(self, child: RadixNode, num_left: int, num_common: int) -> bool:
        """Tell whether a run of num_left tokens belongs on the child's path.

        They share the first page, or one of them is a prefix of the other.
        """
        return num_common in (min(child.num_tokens, self.page_size), num_left)

    def demote(self, namespace: Namespace, tokens: bytes) -> None:
        """Make the leaf at the end of `tokens`, if there is one, the first to go under lru."""
        node, start = self._roots.get(namespace), 0
        while node is not None and start < len(tokens):
            child, _ = self._best_child(node, tokens[start : start + self._page_bytes])
            if child is None or not tokens.startswith(child.tokens, start):
                return
            node, start = child, start + len(child.tokens)
        if node is not None and node.parent is not None and not node.children:
            node.last_used = 0
            self._leaves.add(node)

    def _add_leaf(self, parent: RadixNode, tokens: bytes, pages: list[int], *, priority: int) -> None:
        leaf = RadixNode(parent, tokens, pages, created=self._counter)
        leaf.priority = priority
        self._link(parent, leaf)
        self.pool.retain(pages)
        self.num_pages += len(pages)
        self._leaves.add(leaf)

    def _extend_leaf(self, leaf: RadixNode, tokens: bytes, added: list[int]) -> None:
        """Replace a leaf's partly filled last page, if any, and go on with the pages `added`."""
        if len(tokens) <= len(leaf.tokens):
            return
        num_kept = leaf.num_tokens // self.page_size
        self.pool.retain(added)
        dropped = leaf.pages[num_kept:]
        parent, has_same_key = leaf.parent, num_kept > 0
        assert parent is not None
        if not has_same_key:
            self._unlink(parent, leaf)
        leaf.tokens = tokens
        leaf.pages[num_kept:] = added
        leaf.version += 1
        if not has_same_key:
            self._link(parent, leaf)
        self.pool.release(dropped)
        self.num_pages += len(added) - len(dropped)
        self._leaves.add(leaf)

    def _split(self, lower: RadixNode, num_pages: int) -> RadixNode:
        """Cut a node after num_pages whole pages; give the new upper node (the parent when that is 0)."""
        parent = lower.parent
        assert parent is not None
        if num_pages == 0:
            return parent
        cut = num_pages * self._page_bytes
        self._unlink(parent, lower)
        upper = RadixNode(parent, lower.tokens[:cut], lower.pages[:num_pages], created=lower.created)
        upper.last_used, upper.num_hits, upper.priority = lower.last_used, lower.num_hits, lower.priority
        lower.parent, lower.tokens, lower.pages = upper, lower.tokens[cut:], lower.pages[num_pages:]
        lower.version += 1
        self._link(parent, upper)
        self._link(upper, lower)
        return upper

    def _key(self, node: RadixNode) -> bytes:
        return node.tokens[: self._page_bytes]

    def _link(self, parent: RadixNode, child: RadixNode) -> None:
        key = self._key(child)
        parent.children[key] = child
        insort(parent.child_keys, key)
        parent.num_links += 1

    def _unlink(self, parent: RadixNode, child: RadixNode) -> None:
        key = self._key(child)
        del parent.children[key]
        del parent.child_keys[bisect_left(parent.child_keys, key)]
        parent.num_links += 1

    # -- evicting ---------------------------------------------------------------------------------------

    def evict(self, num_pages: int, *, wanted: Wanted | None = None, num_ahead: int = 0) -> list[Eviction]:
        """Free up to num_pages pages that only the tree holds, from the tails of leaves in policy order.

        Args:
            wanted: who waits for what; that goes last.
            num_ahead: pages that calls to follow at once will ask for; they go now if one leaf gives all.
        Returns: what was taken from whom; the pages add up to num_pages, also with num_ahead, or to all there were.
        Cost: O(num_pages * log leaves), as much for up to MAX_SPARED wanted leaves, and the length of the leaves
        that are cut. Leaves that others hold cost nothing but when they come up first, and when they are let go.
        """
        self._leaves.recall_single()
        evictions: list[Eviction] = []
        spared: list[RadixNode] = []
        num_left = self._evict(num_pages, wanted, evictions, spared, num_ahead) if num_pages > 0 else 0
        if num_left and len(spared) == MAX_SPARED:  # enough was looked at: the others as they come
            num_left = self._evict(num_left, None, evictions, [])
        for leaf in spared:
            leaf.last_used = self._counter  # being waited for counts as a use: others come up first next time
        self._leaves.add_all(spared)
        if spared and num_left:
            self._evict(num_left, None, evictions, [])
        return evictions

    def _evict(
        self,
        num_pages: int,
        wanted: Wanted | None,
        evictions: list[Eviction],
        spared: list[RadixNode],
        num_ahead: int = 0,
    ) -> int:
        """Evict in policy order; give how many pages are still to go.

        Leaves of which nothing may go while others are there are put into `spared`.
        """
        shortened = None
        for leaf in self._leaves.coming_up():
            num_kept = 0
            if wanted is not None:
                known = leaf.wanted
                if known is not None and known[0].is_open and known[1] is leaf.tokens:
                    num_kept = known[2]  # nothing has changed since
                else:
                    num_kept = self._num_wanted_pages(leaf, wanted)
                if num_kept == len(leaf.pages):
                    spared.append(leaf)
                    if len(spared) == MAX_SPARED:
                        break
                    continue
            num_taken = min(num_pages, len(leaf.pages) - num_kept)
            if num_ahead and not spared and self._leaves.gives(num_pages + num_ahead, num_kept=num_kept):
                num_taken = num_pages + num_ahead
            eviction = self._truncate(leaf, num_taken)
            evictions.append(eviction)
            num_pages -= eviction.num_pages
            if not leaf.pages:
                self._remove(leaf)
            elif num_kept == len(leaf.pages):
                spared.append(leaf)
            elif num_pages > 0:
                self._leaves.set_aside()  # others hold what is left of it
            else:
                shortened = leaf
            if num_pages <= 0 or len(spared) == MAX_SPARED:
                break
        self._leaves.take_turns()
        if shortened is not None:
            self._leaves.add(shortened)
        return max(num_pages, 0)

    def _num_wanted_pages(self, leaf: RadixNode, wanted: Wanted) -> int:
        """Give how many leading pages of a leaf someone waits for, and keep the answer."""
        namespace, runs = self._path(leaf)
        path = b"".join(runs)
        num_before = (len(path) - len(leaf.tokens)) // TOKEN_BYTES
        gap = wanted.gap(namespace, path)
        num_pages = -(-gap.num_wanted(path, num_before=num_before) // self.page_size)
        leaf.wanted = (gap, leaf.tokens, num_pages)
        return num_pages

    def _truncate(self, leaf: RadixNode, max_pages: int) -> Eviction:
        """Drop pages that only the tree holds from a leaf's tail: the last one, which is such a page, and more."""
        tokens, pages = leaf.tokens, leaf.pages
        num_dropped = 1
        if max_pages > 1:
            owners = list(map(self.pool.refs.__getitem__, pages[: -max_pages - 1 : -1]))
            num_dropped = len(owners)
            if owners.count(1) < num_dropped:
                num_dropped = next(place for place, num_owners in enumerate(owners) if num_owners > 1)
        num_kept = len(pages) - num_dropped
        last, last_tokens, namespace, runs, num_tokens = self._last_cut
        if last is not leaf or last_tokens is not tokens:
            namespace, runs = self._path(leaf)
            num_tokens = sum(map(len, runs)) // TOKEN_BYTES
        if num_kept == 0:
            assert leaf.parent is not None
            self._unlink(leaf.parent, leaf)
        num_kept_bytes = num_kept * self._page_bytes
        leaf.version += 1
        dropped = pages[num_kept:]
        del pages[num_kept:]  # the list is the leaf's own; a copy would touch every page that stays
        leaf.tokens = tokens[:num_kept_bytes]
        wanted = leaf.wanted
        if wanted is not None and wanted[1] is tokens and wanted[2] <= num_kept:
            leaf.wanted = (wanted[0], leaf.tokens, wanted[2])  # nobody waits for what was cut off
        self.pool.free(dropped)
        self.num_pages -= num_dropped
        self.version += 1
        num_kept_tokens = num_tokens - (len(tokens) - num_kept_bytes) // TOKEN_BYTES
        self._last_cut = (leaf, leaf.tokens, namespace, runs, num_kept_tokens)
        return tuple.__new__(Eviction, (namespace, runs, num_tokens, num_kept_tokens, num_dropped))

    def _path(self, node: RadixNode) -> tuple[Namespace, tuple[bytes, ...]]:
        """Give a node's namespace and its packed tokens from the root on, a run for every node."""
        runs: list[bytes] = []
        while node.parent is not None:
            runs.append(node.tokens)
            node = node.parent
        return self._namespaces[node], tuple(runs[::-1])

    def _remove(self, leaf: RadixNode) -> None:
        """Forget an emptied leaf; its parent may become a leaf, an empty root goes."""
        parent, leaf.parent = leaf.parent, None
        assert parent is not None
        if parent.children:
            return
        if parent.parent is not None:
            self._leaves.add(parent)
        else:
            del self._roots[self._namespaces.pop(parent)]

    # -- checking ---------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[RadixNode]:
        """Give every node but the roots, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def leaves(self) -> list[RadixNode]:
        """Give the nodes that have no children."""
        inner = list(self._roots.values())
        leaves: list[RadixNode] = []
        while inner:
            for node in inner.pop().children.values():
                (inner if node.children else leaves).append(node)
        return leaves

    def pages(self) -> Iterator[int]:
        """Give every page that the tree names, once per naming."""
        for node in self.nodes():
            yield from node.pages

    def check(self) -> None:
        """Raise InvariantViolation unless the invariants hold. Cost: O(nodes + pages)."""
        named = list(self.pages())
        for node in self.nodes():
            where = f"node of {node.num_tokens} tokens, pages {node.pages[:4]}"
            if not node.tokens or len(node.pages) != -(-node.num_tokens // self.page_size):
                raise InvariantViolation(f"{where}: tokens and pages disagree")
            if node.children and node.num_tokens % self.page_size:
                raise InvariantViolation(f"{where}: an inner node ends inside a page")
            if any(self.pool.refs[page] < 1 for page in node.pages):
                raise InvariantViolation(f"{where}: names a free page")
            self._check_children(node)
        for root in self._roots.values():
            self._check_children(root)
        if len(named) != self.num_pages or len(set(named)) != len(named):
            raise InvariantViolation(
                f"tree counts {self.num_pages} pages, names {len(named)}, {len(set(named))} distinct"
            )
        self._leaves.check(node for node in self.nodes() if node.is_leaf)

    def _check_children(self, node: RadixNode) -> None:
        if sorted(node.children) != node.child_keys:
            raise InvariantViolation("children and their sorted keys disagree")
        for key, child in node.children.items():
            if child.parent is not node or self._key(child) != key:
                raise InvariantViolation("a child's key or parent is wrong")
        for left, right in zip(node.child_keys, node.child_keys[1:], strict=False):
            if right.startswith(left):
                raise InvariantViolation("a child's key is a prefix of its sibling's")
