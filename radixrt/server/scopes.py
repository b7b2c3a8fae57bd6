"""Scopes that clients open and close by name: prefixes kept while a program needs them."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixrt.errors import InvalidRequest
from radixrt.loop import Scope

MAX_SCOPES_PER_TENANT = 256
MAX_CLOSED_PER_TENANT = 4096  # names of closed scopes that are remembered


@dataclass(slots=True)
class _Opened:
    scope: Scope
    ttl_s: float
    last_used_s: float


class OpenScopes:
    """Own the scopes that clients opened. Owned by the event loop's thread.

    Invariant: at most MAX_SCOPES_PER_TENANT per tenant, least recently used first; the one used longest ago is closed for
    a new one. A tenant's names mean nothing to another. A scope ends by itself in the engine when its lifetime has passed
    since its last use; here it is then forgotten.
    A name that its client closed is not opened again by a request that was sent before and comes after: names are for
    one use. The latest MAX_CLOSED_PER_TENANT of them are remembered.
    """

    def __init__(self, open_scope: Callable[[float], Scope], *, clock: Callable[[], float]) -> None:
        self._open_scope = open_scope
        self._clock = clock
        self._scopes: dict[str, OrderedDict[str, _Opened]] = {}
        self._closed: dict[str, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._scopes.values()))

    def open(self, tenant: str, *, ttl_s: float) -> str:
        """Open a scope; give its name."""
        name = f"scope_{secrets.token_hex(12)}"
        self._add(tenant, name, ttl_s)
        return name

    def scope_id(self, tenant: str, name: str, *, ttl_s: float | None = None) -> int | None:
        """Give the engine's id of a scope; None when its client has closed it, and a lifetime was given.

        Args:
            ttl_s: lifetime with which to open it under this name, if it is not open.
        Raises:
            InvalidRequest: this tenant has no such scope, and no lifetime was given.
        """
        mine = self._scopes.get(tenant, OrderedDict())
        found = mine.get(name)
        if found is not None and self._clock() - found.last_used_s > found.ttl_s:
            mine.pop(name).scope.close()
            found = None
        if found is None and ttl_s is None:
            raise InvalidRequest(
                "there is no such scope, or it was closed or not used for too long",
                parameter="scope",
                value=name,
            )
        if found is None and name in self._closed.get(tenant, ()):
            return None
        if found is None:
            found = self._add(tenant, name, ttl_s or 0.0)
        found.last_used_s = self._clock()
        self._scopes[tenant].move_to_end(name)
        return found.scope.scope_id

    def close(self, tenant: str, names: Sequence[str]) -> int:
        """Close scopes; tell how many were there."""
        mine, remembered = (
            self._scopes.get(tenant, OrderedDict()),
            self._closed.setdefault(tenant, OrderedDict()),
        )
        for name in names:
            remembered[name] = None
            remembered.move_to_end(name)
        while len(remembered) > MAX_CLOSED_PER_TENANT:
            remembered.popitem(last=False)
        closed = [mine.pop(name) for name in dict.fromkeys(names) if name in mine]
        for opened in closed:
            opened.scope.close()
        return len(closed)

    def close_all(self) -> None:
        """Close the scopes of all tenants: the engine may outlive the server."""
        for mine in self._scopes.values():
            while mine:
                mine.popitem()[1].scope.close()

    def _add(self, tenant: str, name: str, ttl_s: float) -> _Opened:
        mine = self._scopes.setdefault(tenant, OrderedDict())
        mine[name] = opened = _Opened(self._open_scope(ttl_s), ttl_s, self._clock())
        if len(mine) > MAX_SCOPES_PER_TENANT:
            mine.popitem(last=False)[1].scope.close()
        return opened
