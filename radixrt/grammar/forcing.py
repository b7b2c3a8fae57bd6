"""Forced bytes where the engine's own search for them must stay off: in grammars that users wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import llguidance
import numpy as np

MAX_FORCED_BYTES = 256
_NUM_BYTES = 256


@lru_cache(maxsize=1)
def byte_tokenizer() -> llguidance.LLTokenizer:
    """Give the engine's own tokenizer of single bytes; its few tokens make masks cheap."""
    return llguidance.LLTokenizer("byte")


class ByteFollower:
    """A second cursor, over single bytes, that follows a matcher and tells which bytes have no alternative.

    Owned by the matcher. The engine's search can run for ever; this one takes at most MAX_FORCED_BYTES small masks.
    """

    __slots__ = ("_cursor", "_make", "_num_followed", "_num_synced")

    def __init__(self, make: Callable[[], llguidance.LLMatcher]) -> None:
        self._make = make
        self._cursor: llguidance.LLMatcher | None = None  # made when first asked
        self._num_followed = 0  # bytes that the cursor took
        self._num_synced = 0  # of them, how many are still the matcher's

    def fork(self) -> ByteFollower:
        """Give an independent one in the same state."""
        fork = ByteFollower(self._make)
        fork._cursor = None if self._cursor is None else self._cursor.deep_copy()
        fork._num_followed, fork._num_synced = self._num_followed, self._num_synced
        return fork

    def cut(self, num_bytes: int) -> None:
        """Note that the matcher went back to so many bytes."""
        self._num_synced = min(self._num_synced, num_bytes)

    def forced(self, data: bytes) -> tuple[bytes, bool]:
        """Give the bytes that must follow the matcher's text, and whether the text ends after them.

        Args:
            data: all that the matcher accepted.
        """
        cursor = self._follow(data)
        run = bytearray()
        while len(run) < MAX_FORCED_BYTES and not (cursor.is_accepting() or cursor.is_stopped()):
            bits = np.frombuffer(cursor.compute_bitmask(), dtype=np.uint8)[: _NUM_BYTES // 8]
            values = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if len(values) != 1 or cursor.try_consume_tokens([int(values[0])]) != 1:
                break
            run.append(int(values[0]))
        is_end = bool(cursor.is_accepting()) and bool(cursor.is_stopped() or not any(_byte_bits(cursor)))
        cursor.rollback(len(run))
        return bytes(run), is_end

    def _follow(self, data: bytes) -> llguidance.LLMatcher:
        cursor = self._cursor
        if cursor is None:
            cursor = self._cursor = self._make()
            self._num_followed = self._num_synced = 0
        cursor.rollback(self._num_followed - self._num_synced)
        cursor.try_consume_tokens(list(data[self._num_synced :]))
        self._num_followed = self._num_synced = len(data)
        return cursor


def _byte_bits(cursor: llguidance.LLMatcher) -> bytes:
    bits: bytes = cursor.compute_bitmask()[: _NUM_BYTES // 8]
    return bits
