"""PrefixCache: the scheduler's only door to pages and prefixes. Integers only."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from radixrt.errors import InvariantViolation
from radixrt.kv.eviction import POLICIES
from radixrt.kv.history import EvictionLog, EvictionRecord
from radixrt.kv.node import Wanted
from radixrt.kv.packed import TOKEN_BYTES, pack, pack_first
from radixrt.kv.pool import PageCopy, PagePool
from radixrt.kv.radix import PrefixMatch, RadixTree
from radixrt.kv.reuse import ReuseDistances
from radixrt.kv.scopes import Scopes
from radixrt.types import Namespace, TokenIds

MAX_SCOPE_SHARE = 0.5  # of the pool


class PageLease:
    """The pages one sequence holds, in order; append-only.

    Attributes:
        num_shared_tokens: leading tokens whose KV was there when the lease began, the copied ones included.

    Invariants: one pool reference per page, and one for the source of `pending_copy`, while live.
    Slots whose tokens are published are never written again.
    """

    __slots__ = ("is_live", "num_shared_tokens", "pages", "pending_copy")

    def __init__(self, pages: list[int], pending_copy: PageCopy | None, *, num_shared_tokens: int) -> None:
        self.pages = pages
        self.pending_copy = pending_copy
        self.num_shared_tokens = num_shared_tokens
        self.is_live = True

    @property
    def held_pages(self) -> list[int]:
        """All pages with a reference of this lease."""
        return self.pages + ([self.pending_copy.source] if self.pending_copy else [])


@dataclass(frozen=True, slots=True)
class PrefixExplanation:
    """Why a prompt hits as far as it does, in token ids.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: tokens that a request with this prompt would take from the cache now.
        next_token_id: the prompt's first token after the longest match, None when all of it is cached.
        cached_token_ids: what the cache holds after the match in place of it (the nearest continuation).
        num_pages, partial_page: where the match lies: whole pages, and a page to copy a start from or None.
        num_unbounded_tokens: what would be cached if nothing had been evicted lately.
        eviction: what took the difference, or None.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    next_token_id: int | None
    cached_token_ids: tuple[int, ...]
    num_pages: int
    partial_page: int | None
    num_unbounded_tokens: int
    eviction: EvictionRecord | None


class CacheCounters:
    """What the cache has done since its start.

    Attributes:
        num_lookup_tokens: prompt tokens of all admissions.
        num_shared_tokens: of these, found in whole pages of the tree.
        num_copied_tokens: found in a started page, which was copied.
        num_forked_tokens: taken from another sample's lease.
        num_evicted_pages: by reason, "room" or "cleared".
    """

    def __init__(self) -> None:
        self.num_lookup_tokens = 0
        self.num_shared_tokens = 0
        self.num_copied_tokens = 0
        self.num_forked_tokens = 0
        self.num_evicted_pages: Counter[str] = Counter()


class PrefixCache:
    """Own the pool, the tree, the live leases and the scopes.

    Invariants: for every page, refs == live leases that hold it + scopes that hold it + times the tree names it.

    Args:
        num_pages: pages of the pool, padding included.
        is_enabled: False keeps nothing and finds nothing; leases work the same.
        eviction: name of a policy in `radixrt.kv.eviction`.
    """

    def __init__(
        self, num_pages: int, *, page_size: int, is_enabled: bool = True, eviction: str = "lru"
    ) -> None:
        self.page_size = page_size
        self.is_enabled = is_enabled
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.pool, page_size=page_size, eviction_key=POLICIES[eviction])
        self.scopes = Scopes(self.pool, max_pages=int(self.pool.capacity * MAX_SCOPE_SHARE))
        self.counters = CacheCounters()
        self.reuse = ReuseDistances(page_size * TOKEN_BYTES)
        self.wanted: Wanted | None = None  # set by the scheduler: what its waiting list needs goes last
        self.now_s = 0.0  # told by the scheduler, for scopes and the log
        self._log = EvictionLog()
        self._leases: set[PageLease] = set()

    # -- questions --------------------------------------------------------------------------------------

    def num_pages_for(self, num_tokens: int) -> int:
        """Give how many pages hold num_tokens. Pure."""
        return -(-num_tokens // self.page_size)

    def fits_ever(self, num_tokens: int) -> bool:
        """Tell whether an empty pool could hold a sequence this long. Pure."""
        return self.num_pages_for(num_tokens) <= self.pool.capacity

    @property
    def num_leased_pages(self) -> int:
        """Distinct pages that live leases hold."""
        return self.pool.num_leased

    def num_unleased(self, pages: Collection[int]) -> int:
        """Count the pages that no lease holds: admission would turn them from evictable into leased."""
        return self.pool.num_unleased(pages)

    @property
    def num_obtainable_pages(self) -> int:
        """Pages that are free or that only the tree holds."""
        return self.pool.capacity - self.pool.num_leased

    def lookup(
        self, namespace: Namespace, token_ids: array[int], *, max_tokens: int | None = None
    ) -> PrefixMatch:
        """Find the longest cached prefix; at most len(token_ids) - 1, so that one token is computed.

        Changes: nothing.
        """
        limit = len(token_ids) - 1 if max_tokens is None else min(max_tokens, len(token_ids) - 1)
        if not self.is_enabled or limit <= 0:
            return PrefixMatch(namespace)
        return self.tree.lookup(namespace, token_ids.tobytes(), max_tokens=limit)

    def explain(self, namespace: Namespace, token_ids: TokenIds) -> PrefixExplanation:
        """Say how far a prompt would hit, what differs there and what was evicted. Changes: nothing."""
        tokens = pack(token_ids)
        match = self.tree.lookup(namespace, tokens, max_tokens=len(token_ids))
        longest = match.num_tokens
        limit = len(token_ids) - 1 if self.is_enabled else 0
        unbounded, eviction = self._log.longest(namespace, tokens, min_tokens=longest)
        return PrefixExplanation(
            num_prompt_tokens=len(token_ids),
            num_cached_tokens=min(longest, limit),
            next_token_id=token_ids[longest] if longest < len(token_ids) else None,
            cached_token_ids=tuple(self.tree.continuation(namespace, tokens)),
            num_pages=len(match.pages),
            partial_page=match.partial_page,
            num_unbounded_tokens=min(unbounded, limit),
            eviction=eviction,
        )

    # -- leases -----------------------------------------------------------------------------------------

    def admit(self, match: PrefixMatch, *, num_tokens: int, label: str = "") -> PageLease | None:
        """Lease pages for num_tokens, the matched ones shared; None = not now, and nothing changed.

        A partial match becomes `lease.pending_copy`, to be carried out before the step writes; it is given up
        when the pool cannot hold the page to copy from beside the sequence's own.
        Args:
            label: of the request, for the log of what had to go.
        Changes: references; evicts when the free list is too short.
        """
        pages = list(match.pages)
        lease = self._lease(pages, match.partial_page, match.num_partial_tokens, num_tokens, label)
        if lease is None and match.partial_page is not None:
            lease = self._lease(pages, None, 0, num_tokens, label)
        if lease is not None:
            num_copied = lease.pending_copy.num_tokens if lease.pending_copy else 0
            self.counters.num_copied_tokens += num_copied
            self.counters.num_shared_tokens += lease.num_shared_tokens - num_copied
        return lease

    def fork(
        self, lease: PageLease, *, num_shared_tokens: int, num_tokens: int, label: str = ""
    ) -> PageLease | None:
        """Lease pages for num_tokens that share the first num_shared_tokens of another lease; None = not now.

        Whole pages are shared by reference, the started one is copied.
        """
        num_whole, num_partial = divmod(num_shared_tokens, self.page_size)
        partial_page = lease.pages[num_whole] if num_partial else None
        child = self._lease(lease.pages[:num_whole], partial_page, num_partial, num_tokens, label)
        if child is not None:
            self.counters.num_forked_tokens += num_shared_tokens
        return child

    def _lease(
        self,
        shared: list[int],
        partial_page: int | None,
        num_partial_tokens: int,
        num_tokens: int,
        label: str,
    ) -> PageLease | None:
        # Retain first: what is shared must not be evicted to make room for the rest.
        held = shared + ([partial_page] if partial_page is not None else [])
        self.pool.lease(held)
        fresh = self._obtain(self.num_pages_for(num_tokens) - len(shared), label)
        if fresh is None:
            self.pool.end_lease(held)
            return None
        copy = None
        if partial_page is not None:
            copy = PageCopy(partial_page, fresh[0], num_partial_tokens)
        num_shared_tokens = len(shared) * self.page_size + num_partial_tokens
        lease = PageLease(shared + fresh, copy, num_shared_tokens=num_shared_tokens)
        self._leases.add(lease)
        return lease

    def grow(self, lease: PageLease, num_pages: int, *, label: str = "", num_ahead: int = 0) -> bool:
        """Append so many pages to a lease; False = not now, and nothing changed.

        Args:
            num_ahead: pages by which other leases will grow next: what has to go for them may go at once.
        """
        fresh = self._obtain(num_pages, label, num_ahead)
        if fresh is None:
            return False
        lease.pages += fresh
        return True

    def copied(self, lease: PageLease) -> None:
        """Note that the lease's pending copy was carried out; its source is let go."""
        if lease.pending_copy is not None:
            source, lease.pending_copy = lease.pending_copy.source, None
            self.pool.end_lease([source])

    def release(self, lease: PageLease) -> None:
        """Give up all pages of a lease, once."""
        if not lease.is_live:
            raise InvariantViolation("a lease was released twice")
        lease.is_live = False
        self._leases.remove(lease)
        self.pool.end_lease(lease.pages)
        if lease.pending_copy is not None:
            self.pool.end_lease([lease.pending_copy.source])

    # -- prefixes ---------------------------------------------------------------------------------------

    def touch(self, namespace: Namespace, token_ids: array[int]) -> None:
        """Count a use of the cached prefix of token_ids, and of its pages' distances."""
        self.counters.num_lookup_tokens += len(token_ids)
        if self.is_enabled:
            tokens = token_ids.tobytes()
            self.tree.touch(namespace, tokens)
            self.reuse.observe(namespace, tokens)

    def publish(
        self,
        lease: PageLease,
        namespace: Namespace,
        token_ids: array[int],
        *,
        num_tokens: int | None = None,
        priority: int = 0,
    ) -> bytes:
        """Offer computed tokens for reuse, the first num_tokens or all: token_ids[i] lies in slot i of the lease.

        Returns: what is offered, packed; nothing when the cache keeps nothing.
        Changes: the tree names those pages that it lacks.
        """
        num_tokens = len(token_ids) if num_tokens is None else num_tokens
        if not self.is_enabled or not num_tokens:
            return b""
        tokens = pack_first(token_ids, num_tokens)
        self.tree.insert(namespace, tokens, lease.pages, priority=priority)
        return tokens

    def demote(self, namespace: Namespace, token_ids: array[int]) -> None:
        """Let the pages at the end of token_ids go before all others."""
        if self.is_enabled:
            self.tree.demote(namespace, token_ids.tobytes())

    def hold(self, scope_id: int, namespace: Namespace, token_ids: array[int]) -> None:
        """Let an open scope hold the cached whole pages of token_ids."""
        if self.is_enabled and scope_id in self.scopes:
            match = self.tree.lookup(namespace, token_ids.tobytes(), max_tokens=len(token_ids))
            self.scopes.hold(scope_id, match.pages, now_s=self.now_s)

    def clear(self) -> int:
        """Evict everything that only the tree holds; give how many pages became free."""
        return self._evict(self.tree.num_pages, reason="cleared", label="")

    # -- pages ------------------------------------------------------------------------------------------

    def _obtain(self, num_pages: int, label: str, num_ahead: int = 0) -> list[int] | None:
        if num_pages <= 0:
            return []
        if num_pages > self.num_obtainable_pages:
            return None
        pages = None
        while pages is None:
            missing = num_pages - self.pool.num_free
            if missing > 0:
                self._evict(missing, reason="room", label=label, num_ahead=num_ahead)
            pages = self.pool.lease_free(num_pages)
            if pages is None and not self.scopes.break_oldest():
                return None
        return pages

    def _evict(self, num_pages: int, *, reason: str, label: str, num_ahead: int = 0) -> int:
        num_freed = 0
        for eviction in self.tree.evict(num_pages, wanted=self.wanted, num_ahead=num_ahead):
            num_freed += eviction.num_pages
            self._log.add(eviction, at_s=self.now_s, reason=reason, label=label)
        self.counters.num_evicted_pages[reason] += num_freed
        return num_freed

    def check(self) -> None:
        """Raise InvariantViolation unless every reference has an owner. Cost: O(pages + nodes)."""
        self.pool.check()
        self.tree.check()
        self.scopes.check()
        leased: Counter[int] = Counter()
        for lease in self._leases:
            leased.update(lease.held_pages)
        num_leases = [leased[page] for page in range(self.pool.num_pages)]
        if num_leases != self.pool.leases or len(leased) != self.pool.num_leased:
            raise InvariantViolation("the count of leased pages differs from the leases")
        owners = leased + self.scopes.owners() + Counter(self.tree.pages())
        for page in range(self.pool.num_pages):
            if self.pool.refs[page] != owners[page]:
                raise InvariantViolation(
                    f"page {page} has {self.pool.refs[page]} references and {owners[page]} owners"
                )
