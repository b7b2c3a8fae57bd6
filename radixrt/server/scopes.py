"""Scopes that clients open and close by name: prefixes kept while a program needs them."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable

from radixrt.errors import InvalidRequest
from radixrt.loop import Scope

MAX_SCOPES_PER_TENANT = 256


class OpenScopes:
    """Own the scopes that clients opened. Owned by the event loop's thread.

    Invariant: at most MAX_SCOPES_PER_TENANT per tenant; the one used longest ago is closed for a new one.
    """

    def __init__(self, open_scope: Callable[[float], Scope]) -> None:
        self._open_scope = open_scope
        self._scopes: dict[str, OrderedDict[str, Scope]] = {}

    def open(self, tenant: str, *, ttl_s: float) -> str:
        """Open a scope; give its name."""
        mine = self._scopes.setdefault(tenant, OrderedDict())
        name = f"scope_{secrets.token_hex(12)}"
        mine[name] = self._open_scope(ttl_s)
        if len(mine) > MAX_SCOPES_PER_TENANT:
            mine.popitem(last=False)[1].close()
        return name

    def scope_id(self, tenant: str, name: str) -> int:
        """Give the engine's id of a scope.

        Raises:
            InvalidRequest: this tenant has no such scope.
        """
        mine = self._scopes.get(tenant, OrderedDict())
        if name not in mine:
            raise InvalidRequest("there is no such scope, or it was closed", parameter="scope", value=name)
        mine.move_to_end(name)
        return mine[name].scope_id

    def close(self, tenant: str, name: str) -> bool:
        """Close a scope; tell whether it was there."""
        scope = self._scopes.get(tenant, OrderedDict()).pop(name, None)
        if scope is not None:
            scope.close()
        return scope is not None
