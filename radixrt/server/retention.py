"""Prompts that a client asked to keep: engine scopes, one per namespace and lifetime."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from radixrt.loop import Scope
from radixrt.types import Namespace

MAX_SCOPES_PER_TENANT = 64
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_ttl_s(text: str) -> int:
    """Give the seconds of a lifetime like "30m". Pure."""
    return int(text[:-1]) * _UNIT_S[text[-1]]


@dataclass(slots=True)
class _Kept:
    scope: Scope
    last_used_s: float


class Retention:
    """Own the scopes that requests opened by asking. Owned by the event loop's thread.

    A scope ends by itself in the engine when its lifetime has passed since its last use; here it is then forgotten.
    Invariant: at most MAX_SCOPES_PER_TENANT per tenant; the one used longest ago gives way.
    """

    def __init__(self, open_scope: Callable[[float], Scope], *, clock: Callable[[], float]) -> None:
        self._open_scope = open_scope
        self._clock = clock
        self._kept: dict[str, OrderedDict[tuple[Namespace, int], _Kept]] = {}

    def scope_id(self, tenant: str, namespace: Namespace, *, ttl_s: int) -> int:
        """Give the scope that keeps a namespace's prompts for so long; open it if there is none."""
        now_s = self._clock()
        mine = self._kept.setdefault(tenant, OrderedDict())
        for key in [key for key, kept in mine.items() if now_s - kept.last_used_s > key[1]]:
            mine.pop(key).scope.close()
        kept = mine.get((namespace, ttl_s))
        if kept is None:
            kept = mine[namespace, ttl_s] = _Kept(self._open_scope(float(ttl_s)), now_s)
        kept.last_used_s = now_s
        mine.move_to_end((namespace, ttl_s))
        while len(mine) > MAX_SCOPES_PER_TENANT:
            mine.popitem(last=False)[1].scope.close()
        return kept.scope.scope_id

    def close_all(self) -> None:
        """Close the scopes of all tenants: the engine may outlive the server."""
        for mine in self._kept.values():
            while mine:
                mine.popitem()[1].scope.close()

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))
