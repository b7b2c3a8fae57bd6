"""Tile sizes of the attention kernels by dtype, head dimension, group and page size. Nothing is tuned at run time.

The entries were chosen from what the compiler reports for sm_90 (compile.py: registers, spills, shared bytes, wgmma);
`radixrt bench gpu` times them on a card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

NUM_SMS = 132  # H100 and H200
HEAD_DIMS = (64, 128)
MAX_GROUP_HEADS = 16
NEVER_SHARED = 1 << 40


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tiles of tree_decode.

    Attributes:
        block_tokens: keys per tile, a power of two.
        narrow_rows, wide_rows: rows (query x head of the group) of an item read by few or by many queries.
        min_chunk_tokens: a page segment is not split finer.
        num_programs: programs wanted in flight; segments are split until there are about so many.
        min_shared_tokens: two sequences read a common segment once when it is at least this long; many
            sequences already at half of it. In bytes alone 16 tokens would do for D = 128, R = 4 (their keys
            and values against two partial results); the rest pays for the merge.
    """

    block_tokens: int
    narrow_rows: int
    wide_rows: int
    num_warps: int
    num_stages: int
    min_chunk_tokens: int = 256
    num_programs: int = 4 * NUM_SMS
    min_shared_tokens: int = 128


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """Tiles of extend: block_rows rows (new token x head of the group) against block_tokens keys."""

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int


_DECODE = {
    (torch.bfloat16, 64): DecodeConfig(128, 16, 64, num_warps=4, num_stages=3),
    (torch.bfloat16, 128): DecodeConfig(64, 16, 64, num_warps=4, num_stages=3),
    (torch.float32, 64): DecodeConfig(32, 16, 32, num_warps=8, num_stages=2),
    (torch.float32, 128): DecodeConfig(16, 16, 32, num_warps=8, num_stages=2),
}
_EXTEND = {
    (torch.bfloat16, 64): ExtendConfig(128, 64, num_warps=8, num_stages=3),
    (torch.bfloat16, 128): ExtendConfig(128, 64, num_warps=8, num_stages=3),
    (torch.float32, 64): ExtendConfig(64, 32, num_warps=8, num_stages=2),
    (torch.float32, 128): ExtendConfig(32, 16, num_warps=8, num_stages=2),
}


def check_shape(head_dim: int, num_group_heads: int) -> None:
    """Raise ValueError when there is no kernel for this head dimension or group."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head dimension must be one of {HEAD_DIMS}, got {head_dim}")
    if not 1 <= num_group_heads <= MAX_GROUP_HEADS:
        raise ValueError(
            f"query heads per kv head must be from 1 to {MAX_GROUP_HEADS}, got {num_group_heads}"
        )


def _key(dtype: torch.dtype, head_dim: int, num_group_heads: int) -> tuple[torch.dtype, int]:
    check_shape(head_dim, num_group_heads)
    # float16 tiles are as large as bfloat16 ones.
    return (torch.bfloat16 if dtype == torch.float16 else dtype), head_dim


def decode_config(dtype: torch.dtype, head_dim: int, num_group_heads: int, page_size: int) -> DecodeConfig:
    """Give the tiles of tree_decode. Pure.

    Raises:
        ValueError: no kernel for this head dimension or group.
    """
    return _DECODE[_key(dtype, head_dim, num_group_heads)]


def extend_config(dtype: torch.dtype, head_dim: int, num_group_heads: int, page_size: int) -> ExtendConfig:
    """Give the tiles of extend. Pure.

    Raises:
        ValueError: no kernel for this head dimension or group.
    """
    return _EXTEND[_key(dtype, head_dim, num_group_heads)]


def unmerged(config: DecodeConfig) -> DecodeConfig:
    """Give the same tiles for plans that read every sequence by itself. Pure."""
    return replace(config, min_shared_tokens=NEVER_SHARED)
