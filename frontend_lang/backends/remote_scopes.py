"""The scopes that programs have open on a server, by the names they have there."""

from __future__ import annotations

import itertools
import secrets
from collections import deque

MOST_TOLD = 256  # closed scopes that a server is told of at once
TTL_S = 300.0  # what a server may keep after a last use, when nobody is left to close it


class RemoteScopes:
    """Own the names of scopes, and which of them a server is still to close. Used from any thread.

    Nothing is sent for its own sake: a server opens a scope with the first request that names it, and is told of closed
    ones with the next request, or at the end of the run.
    """

    def __init__(self) -> None:
        self._prefix = f"program_{secrets.token_hex(8)}"  # what nobody else can guess, nor open by chance
        self._ids = itertools.count()
        self._named: set[int] = set()  # open, and known to the server
        self._closed: deque[str] = deque(maxlen=16 * MOST_TOLD)  # beyond that they run out by themselves

    def __len__(self) -> int:
        """Give how many are open on the server, as far as is known here."""
        return len(self._named) + len(self._closed)

    def open(self) -> int:
        """Begin a scope, here only."""
        return next(self._ids)

    def name(self, scope_id: int) -> str:
        """Give the name under which a request opens the scope there."""
        self._named.add(scope_id)
        return self._name(scope_id)

    def close(self, scope_id: int) -> None:
        """End a scope; the server is to be told if it knows of it."""
        if scope_id in self._named:
            self._named.remove(scope_id)
            self._closed.append(self._name(scope_id))

    def take_closed(self) -> list[str]:
        """Give closed scopes that the server is to be told of now, and forget them."""
        names: list[str] = []
        while self._closed and len(names) < MOST_TOLD:
            try:
                names.append(self._closed.popleft())
            except IndexError:  # another thread took the last one
                break
        return names

    def _name(self, scope_id: int) -> str:
        return f"{self._prefix}_{scope_id}"
