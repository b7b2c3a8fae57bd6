"""Scopes: prefixes that someone still needs, kept until the scope is closed, runs out of time or stands in the way.

A scope holds the whole pages of what its requests published, one reference each. Held pages are the last to be
evicted, not exempt: when everything else is not enough, the scope used longest ago is broken first, so that held
pages can never stop a running sequence. A broken scope stays open: what its next requests publish is held again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from radixrt.errors import InvariantViolation
from radixrt.kv.pool import PagePool


class Scope:
    """What one scope holds, and which sequences under way use it. Owned by Scopes."""

    __slots__ = ("expires_at_s", "pages", "ttl_s", "users")

    def __init__(self, ttl_s: float, now_s: float) -> None:
        self.ttl_s = ttl_s
        self.expires_at_s = now_s + ttl_s
        self.pages: set[int] = set()
        self.users: set[int] = set()


class Scopes:
    """Own the open scopes, least recently used first.

    Invariants: one pool reference per page and scope; num_held_pages <= max_pages.
    """

    def __init__(self, pool: PagePool, *, max_pages: int) -> None:
        self._pool = pool
        self._max_pages = max_pages
        self._scopes: OrderedDict[int, Scope] = OrderedDict()
        self.num_held_pages = 0
        self.num_broken = 0

    def __len__(self) -> int:
        return len(self._scopes)

    def __contains__(self, scope_id: int) -> bool:
        return scope_id in self._scopes

    def open(self, scope_id: int, *, ttl_s: float, now_s: float) -> None:
        """Begin a scope; it ends by itself ttl_s after its last use, and not while it is in use."""
        if scope_id in self._scopes:
            raise InvariantViolation(f"scope {scope_id} is open already")
        self._scopes[scope_id] = Scope(ttl_s, now_s)

    def begin_use(self, scope_id: int, user: int) -> None:
        """Note that a sequence names a scope; nothing happens if it is not open.

        Args:
            user: tells the sequence from all others, e.g. its arrival.
        """
        if scope_id in self._scopes:
            self._scopes[scope_id].users.add(user)

    def end_use(self, scope_id: int, user: int, *, now_s: float) -> None:
        """Undo `begin_use`, if it had an effect, when the sequence has ended; the scope's time begins anew."""
        scope = self._scopes.get(scope_id)
        if scope is not None and user in scope.users:
            scope.users.remove(user)
            scope.expires_at_s = now_s + scope.ttl_s

    def hold(self, scope_id: int, pages: Iterable[int], *, now_s: float) -> bool:
        """Add pages to a scope, in order, as far as max_pages allows; False if it is closed (nothing happens)."""
        scope = self._scopes.get(scope_id)
        if scope is None:
            return False
        scope.expires_at_s = now_s + scope.ttl_s
        self._scopes.move_to_end(scope_id)
        fresh = [page for page in pages if page not in scope.pages]
        fresh = fresh[: self._max_pages - self.num_held_pages]
        self._pool.retain(fresh)
        scope.pages.update(fresh)
        self.num_held_pages += len(fresh)
        return True

    def close(self, scope_id: int) -> None:
        """Let go of all that a scope holds. Closing twice is fine."""
        scope = self._scopes.pop(scope_id, None)
        if scope is not None:
            self._let_go(scope)

    def _let_go(self, scope: Scope) -> None:
        self.num_held_pages -= len(scope.pages)
        self._pool.release(scope.pages)
        scope.pages = set()

    def expire(self, now_s: float) -> None:
        """Close the scopes whose time is up."""
        if self._scopes:
            late = [key for key, scope in self._scopes.items() if scope.expires_at_s <= now_s]
            for scope_id in late:
                if not self._scopes[scope_id].users:
                    self.close(scope_id)

    def break_oldest(self) -> bool:
        """Let go of all that the scope used longest ago holds; False when none holds anything."""
        oldest = next((scope for scope in self._scopes.values() if scope.pages), None)
        if oldest is None:
            return False
        self._let_go(oldest)
        self.num_broken += 1
        return True

    def owners(self) -> Counter[int]:
        """Count the references of all scopes, for the audit."""
        return Counter(page for scope in self._scopes.values() for page in scope.pages)

    def check(self) -> None:
        """Raise InvariantViolation unless the counts are right and within their limits."""
        num_held = sum(len(scope.pages) for scope in self._scopes.values())
        if num_held != self.num_held_pages or num_held > self._max_pages:
            raise InvariantViolation(
                f"scopes hold {num_held} pages, count {self.num_held_pages}, may hold {self._max_pages}"
            )
