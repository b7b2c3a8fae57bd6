"""Token ids as bytes, four a token: comparing two runs is one memcmp."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize
MAX_XOR_TOKENS = 32  # shorter runs are compared as one integer, longer ones halved before


def pack(token_ids: Sequence[int]) -> bytes:
    """Give token ids as bytes, TOKEN_BYTES each. Pure."""
    return array("i", token_ids).tobytes()


def pack_first(token_ids: array[int], num_tokens: int) -> bytes:
    """Give the first tokens as bytes, with one copy. Pure."""
    if num_tokens >= len(token_ids):
        return token_ids.tobytes()
    return memoryview(token_ids)[:num_tokens].tobytes()


def unpack(tokens: bytes) -> list[int]:
    """Give packed tokens as ints. Pure."""
    return array("i", tokens).tolist()


def num_common_tokens(left: bytes, right: bytes) -> int:
    """Give how many leading tokens two packed runs share. Pure. Cost: O(log n) comparisons."""
    if left[:TOKEN_BYTES] != right[:TOKEN_BYTES]:
        return 0  # neighbours in sorted order often share nothing
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    if left[: high * TOKEN_BYTES] == right[: high * TOKEN_BYTES]:
        return high
    # The runs agree on [0, low) and differ somewhere in [low, high).
    while high - low > MAX_XOR_TOKENS:
        middle = (low + high) // 2
        if left[low * TOKEN_BYTES : middle * TOKEN_BYTES] == right[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    start, stop = low * TOKEN_BYTES, high * TOKEN_BYTES
    differing = int.from_bytes(left[start:stop], "little") ^ int.from_bytes(right[start:stop], "little")
    lowest_bit = (differing & -differing).bit_length() - 1
    return low + lowest_bit // (8 * TOKEN_BYTES)
