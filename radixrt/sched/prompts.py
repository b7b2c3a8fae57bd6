"""SortedPrompts: those who wait by token ids, so that those who share a prefix stand side by side."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

from radixrt.kv.packed import TOKEN_BYTES, num_common_tokens
from radixrt.types import Namespace

MAX_KEY_TOKENS = 4096  # longer common prefixes count as this long when waiting sequences are ordered

T = TypeVar("T")


class Gap:
    """A place between two waiting prompts in sorted order. Nobody shares more with a path that falls into it than they.

    Attributes:
        before, after: packed prompts; empty at the ends.
        is_open: nobody came or went here since.
    """

    __slots__ = ("after", "before", "is_open")

    def __init__(self, before: bytes = b"", after: bytes = b"") -> None:
        self.before = before
        self.after = after
        self.is_open = True

    def num_wanted(self, tokens: bytes, *, num_before: int = 0) -> int:
        """Give how many tokens, behind the first num_before, of a path that falls into the gap somebody waits for.

        Beyond MAX_KEY_TOKENS all is taken to be wanted.
        """
        start = num_before * TOKEN_BYTES
        head, rest, most = tokens[:start], tokens[start:], 0
        for prompt in (self.before, self.after):
            if (
                len(prompt) <= start
            ):  # at most so many are shared, which counts only if they are the most that can be
                num_common = len(prompt) // TOKEN_BYTES if tokens.startswith(prompt) else 0
            elif prompt.startswith(head):
                num_common = num_before + num_common_tokens(prompt[start:], rest)
            else:
                continue
            if num_common >= MAX_KEY_TOKENS:
                return len(rest) // TOKEN_BYTES
            most = max(most, num_common - num_before)
        return most


class SortedPrompts(Generic[T]):
    """Own the sorted view of the waiting list, per namespace.

    Invariant: gaps[i] lies before rows[i], the last gap behind all rows.
    """

    def __init__(self) -> None:
        # Rows differ before what they stand for is compared: no two have the same arrival.
        self._rows: dict[Namespace, list[tuple[bytes, int, T]]] = {}
        self._gaps: dict[Namespace, list[Gap]] = {}
        self._nowhere = Gap()  # in every namespace in which nobody waits

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def __iter__(self) -> Iterator[T]:
        return (row[2] for rows in self._rows.values() for row in rows)

    def add(self, namespace: Namespace, tokens: bytes, arrival: int, item: T) -> None:
        """Take a prompt in. Cost: O(log n) and one move of pointers."""
        if namespace not in self._rows:
            self._nowhere.is_open = False
            self._nowhere = Gap()
            self._rows[namespace], self._gaps[namespace] = [], [Gap()]
        rows, gaps = self._rows[namespace], self._gaps[namespace]
        place = bisect_left(rows, (tokens, arrival))
        rows.insert(place, (tokens, arrival, item))
        gap = gaps[place]
        gap.is_open = False
        gaps[place : place + 1] = [Gap(gap.before, tokens), Gap(tokens, gap.after)]

    def remove(self, namespace: Namespace, tokens: bytes, arrival: int) -> None:
        """Leave a prompt out. Cost: as `add`."""
        rows, gaps = self._rows[namespace], self._gaps[namespace]
        place = bisect_left(rows, (tokens, arrival))
        del rows[place]
        left, right = gaps[place : place + 2]
        left.is_open = right.is_open = False
        gaps[place : place + 2] = [Gap(left.before, right.after)]
        if not rows:
            del self._rows[namespace], self._gaps[namespace]

    def gap(self, namespace: Namespace, tokens: bytes) -> Gap:
        """Give the place of a path. Cost: O(log n) comparisons."""
        rows = self._rows.get(namespace)
        return self._nowhere if rows is None else self._gaps[namespace][bisect_left(rows, (tokens, -1))]

    def place(self, namespace: Namespace, tokens: bytes) -> tuple[list[tuple[bytes, int, T]], int]:
        """Give the rows of a namespace and the place of a path among them: away from it, rows share less and less."""
        rows = self._rows.get(namespace)
        return (rows, bisect_left(rows, (tokens, -1))) if rows else ([], 0)
