"""The host's side of tree_decode: cut a batch of page tables into work items.

Sequences whose page tables begin alike share these pages: the running part of the radix tree is read off the tables.
A run of pages is merged (read once for all its sequences) when that saves more than its partial results cost.

    segments   [shared by 0 1 2 3 ][ shared by 0 1 ][ 0 alone ]
                                                    [ 1 alone ]
                                  [ 2 alone ]
                                  [ 3 alone ]
    items      a segment is cut along its tokens (split-KV) and its sequences (rows of a tile)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixrt_kernels.gpu.checks import check_page_size, check_window
from radixrt_kernels.gpu.configs import DecodeConfig

Ints = npt.NDArray[np.int32]
AnyInts = npt.NDArray[np.integer[Any]]
ALIGNED_INTS = 4
ITEM_FIELDS = 5  # where in the flat page table, tokens, first position, first member, members
MEMBER_FIELDS = 3  # row of q, slot of the partial result or -1 (the only one: to the output), first visible
MERGE_FIELDS = 3  # row of q, its partial results: first slot and the one past the last


@dataclass(frozen=True, slots=True)
class DeviceDecodePlan:
    """A DecodePlan's arrays on the device: views of one tensor.

    Attributes:
        items: [I, 5] int32; an item of 0 tokens does nothing.
        members: [M, 3] int32.
        merges: [K, 3] int32, the rows with partial results, and their slots; one without slots does nothing.
        num_slots: how many partial results there are.
        has_window: members' first visible position hides tokens.
    """

    items: torch.Tensor
    members: torch.Tensor
    merges: torch.Tensor
    num_slots: int
    has_window: bool


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work items of one step; fields as in DeviceDecodePlan.

    Invariants: each row's items cover its visible context once; slots are distinct; every member of an item sees
    at least one of its tokens.
    """

    items: Ints
    members: Ints
    merges: Ints
    num_slots: int
    has_window: bool

    def padded(self, *, num_items: int, num_members: int, num_merges: int, num_slots: int) -> DecodePlan:
        """Give the same plan with the sizes of a captured graph. Pure.

        Raises:
            ValueError: a size is less than the plan needs.
        """
        for name, size, needed in (
            ("num_items", num_items, len(self.items)),
            ("num_members", num_members, len(self.members)),
            ("num_merges", num_merges, len(self.merges)),
            ("num_slots", num_slots, self.num_slots),
        ):
            if size < needed:
                raise ValueError(f"{name} must be at least {needed}, got {size}")
        items, members, merges = (
            np.concatenate([array, np.zeros((size - len(array), array.shape[1]), np.int32)])
            for array, size in (
                (self.items, num_items),
                (self.members, num_members),
                (self.merges, num_merges),
            )
        )
        return DecodePlan(items, members, merges, num_slots, self.has_window)

    def to_device(self, device: torch.device) -> DeviceDecodePlan:
        """Copy the arrays to a device in one transfer."""
        # Each array starts at a multiple of 16 bytes: a kernel is compiled anew for other alignments.
        arrays = (self.items, self.members, self.merges)
        sizes = [-(-array.size // ALIGNED_INTS) * ALIGNED_INTS for array in arrays]
        flat = np.zeros(sum(sizes), np.int32)
        for array, stop, size in zip(arrays, np.cumsum(sizes), sizes, strict=True):
            flat[stop - size : stop - size + array.size] = array.ravel()
        on_device = torch.split(torch.from_numpy(flat).to(device), sizes)
        items, members, merges = (
            part[: array.size].view(array.shape) for array, part in zip(arrays, on_device, strict=True)
        )
        return DeviceDecodePlan(items, members, merges, self.num_slots, self.has_window)


@dataclass(frozen=True, slots=True)
class Segment:
    """Pages [first_page, first_page + n) of a sequence's table, the same in all `sequences`; n from num_tokens."""

    first_page: int
    num_tokens: int
    sequences: list[int]


def plan_decode(
    page_table: Ints,
    context_lens: AnyInts,
    *,
    page_size: int,
    num_group_heads: int,
    num_kv_heads: int,
    config: DecodeConfig,
    sequences: AnyInts | None = None,
    rows: AnyInts | None = None,
    sliding_window: int | None = None,
) -> DecodePlan:
    """Cut sequences with one new token each into work items. Pure.

    Args:
        page_table: [B, P] int32, pages of each sequence in order.
        context_lens: [B], tokens of each sequence, the new one included; at least 1, at most P * page_size.
        sequences: [C], the rows of page_table to cut; None = all.
        rows: [C], which row of q each of these sequences' token is; None = one after the other.
        sliding_window: a token sees this many positions, itself included; None = all.
    Raises:
        ValueError: counts do not fit together.
    Cost: about 0.2 ms for 64 sequences of 128 pages each, on one busy core.
    """
    num_sequences, num_columns = page_table.shape
    check_page_size(page_size)
    check_window(sliding_window)
    contexts = np.asarray(context_lens, np.int64)
    if contexts.shape != (num_sequences,):
        raise ValueError(f"context_lens must have {num_sequences} entries, got {contexts.shape}")
    if num_sequences and not (contexts.min() >= 1 and contexts.max() <= num_columns * page_size):
        raise ValueError(
            f"context_lens must be from 1 to {num_columns * page_size}, "
            f"got {contexts.min()} to {contexts.max()}"
        )
    chosen = np.arange(num_sequences) if sequences is None else np.asarray(sequences, np.int64)
    row_of = np.zeros(num_sequences, np.int64)
    row_of[chosen] = np.arange(len(chosen)) if rows is None else np.asarray(rows, np.int64)
    first_visible = np.maximum(contexts - (sliding_window or contexts.max(initial=1)), 0)
    segments = find_segments(page_table, contexts, chosen, page_size, config.min_shared_tokens)
    if sliding_window is not None:
        segments = _cut_to_window(segments, first_visible, page_size)
    items, members = _cut(
        segments, first_visible, page_size, num_columns, num_group_heads, num_kv_heads, config
    )
    sequence = members[:, 0].copy()
    members[:, 0] = row_of[sequence]
    members[:, 2] = first_visible[sequence]
    merges, num_slots = _assign_slots(members)
    return DecodePlan(items, members, merges, num_slots, sliding_window is not None)


def find_segments(
    page_table: Ints,
    contexts: npt.NDArray[np.int64],
    sequences: npt.NDArray[np.int64],
    page_size: int,
    min_shared_tokens: int,
) -> list[Segment]:
    """Give the tree of page runs, each with those of `sequences` that read it; covers every context once. Pure."""
    num_sequences = len(sequences)
    if not num_sequences:
        return []
    order = sorted(sequences.tolist(), key=lambda b: page_table[b].tobytes())
    # Rows that begin alike are neighbours now. alike[i]: how many whole pages sorted rows i - 1 and i share.
    table, full_pages = page_table[order], contexts[order] // page_size
    differs = table[1:] != table[:-1]
    alike = np.where(differs.any(1), differs.argmax(1), table.shape[1])
    alike = [0, *np.minimum(alike, np.minimum(full_pages[1:], full_pages[:-1])).tolist()]
    lengths = contexts.tolist()
    segments: list[Segment] = []
    pending = [(0, num_sequences, 0)]  # sorted rows [low, high) whose pages before `first` are covered
    while pending:
        low, high, first = pending.pop()
        count = high - low
        if count == 1:
            if (num_tokens := lengths[order[low]] - first * page_size) > 0:
                segments.append(Segment(first, num_tokens, [order[low]]))
            continue
        shared = min(alike[low + 1 : high])
        num_tokens = (shared - first) * page_size
        # Saved: a read for all but one sequence. Paid: a partial result for each.
        if num_tokens > 0 and 2 * num_tokens * (count - 1) >= min_shared_tokens * count:
            segments.append(Segment(first, num_tokens, order[low:high]))
            first = shared
        start = low
        for index in range(low + 1, high):
            if alike[index] == shared:
                pending.append((start, index, first))
                start = index
        pending.append((start, high, first))
    return segments


def _cut_to_window(
    segments: list[Segment], first_visible: npt.NDArray[np.int64], page_size: int
) -> list[Segment]:
    """Drop sequences that do not see a segment, and pages that none of them sees."""
    cut = []
    for segment in segments:
        start = segment.first_page * page_size
        stop = start + segment.num_tokens
        sequences = [b for b in segment.sequences if first_visible[b] < stop]
        if sequences:
            first_page = max(segment.first_page, int(first_visible[sequences].min()) // page_size)
            cut.append(Segment(first_page, stop - first_page * page_size, sequences))
    return cut


def _cut(
    segments: list[Segment],
    first_visible: npt.NDArray[np.int64],
    page_size: int,
    num_columns: int,
    num_group_heads: int,
    num_kv_heads: int,
    config: DecodeConfig,
) -> tuple[Ints, Ints]:
    """Cut segments into items [I, 5] and their members [M, 3], whose first field is the sequence."""
    leader = np.array([segment.sequences[0] for segment in segments], np.int64)
    first_page = np.array([segment.first_page for segment in segments], np.int64)
    num_tokens = np.array([segment.num_tokens for segment in segments], np.int64)
    num_members = np.array([len(segment.sequences) for segment in segments], np.int64)
    flat = np.array([b for segment in segments for b in segment.sequences], np.int64)
    flat_start = np.cumsum(num_members) - num_members
    narrow, wide = config.narrow_rows // num_group_heads, config.wide_rows // num_group_heads
    per_block = np.where(num_members <= narrow, narrow, wide)
    num_blocks = -(-num_members // per_block)
    # Chunks of whole tiles and whole pages, about num_programs of them over all kv heads.
    unit = max(config.block_tokens, page_size)
    wanted = max(config.num_programs // num_kv_heads, 1)
    at_most = max(-(-int((num_tokens * num_blocks).sum()) // wanted), config.min_chunk_tokens, unit)
    num_chunks = -(-num_tokens // at_most)
    even = -(-num_tokens // num_chunks)
    per_chunk = -(-even // unit) * unit
    num_chunks = -(-num_tokens // per_chunk)
    # items: segment after segment, block after block, chunk after chunk
    num_items = num_blocks * num_chunks
    of = np.repeat(np.arange(len(segments)), num_items)
    index = np.arange(len(of)) - np.repeat(np.cumsum(num_items) - num_items, num_items)
    block, chunk = np.divmod(index, num_chunks[of])
    token = chunk * per_chunk[of]
    tokens = np.minimum(per_chunk[of], num_tokens[of] - token)
    position = first_page[of] * page_size + token
    taken = np.minimum(per_block[of], num_members[of] - block * per_block[of])
    pair_item = np.repeat(np.arange(len(of)), taken)
    pair_index = np.arange(len(pair_item)) - np.repeat(np.cumsum(taken) - taken, taken)
    sequence = flat[(flat_start[of] + block * per_block[of])[pair_item] + pair_index]
    is_seen = first_visible[sequence] < (position + tokens)[pair_item]
    if not is_seen.all():
        pair_item, sequence = pair_item[is_seen], sequence[is_seen]
        taken = np.bincount(pair_item, minlength=len(of))
    where = leader[of] * num_columns + position // page_size
    items = np.empty((len(of), ITEM_FIELDS), np.int32)
    for field, values in enumerate((where, tokens, position, np.cumsum(taken) - taken, taken)):
        items[:, field] = values
    items = items[taken > 0]
    # The longest first, so that no long item starts when the others are done.
    items = items[np.argsort(-items[:, 1], kind="stable")]
    members = np.zeros((len(sequence), MEMBER_FIELDS), np.int32)
    members[:, 0] = sequence
    return items, members


def _assign_slots(members: Ints) -> tuple[Ints, int]:
    """Write each member's slot; a row's slots are consecutive. Gives merges [K, 3] and the number of slots.

    Changes: members[:, 1].
    """
    rows = members[:, 0]
    num_parts = np.bincount(rows)
    num_slots = np.where(num_parts > 1, num_parts, 0)
    stop = np.cumsum(num_slots)
    by_row = np.argsort(rows, kind="stable")
    rank = np.empty(len(members), np.int64)
    rank[by_row] = np.arange(len(members)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    members[:, 1] = np.where(num_parts[rows] > 1, (stop - num_slots)[rows] + rank, -1)
    (merged,) = np.nonzero(num_slots)
    merges = np.empty((len(merged), MERGE_FIELDS), np.int32)
    merges[:, 0], merges[:, 1], merges[:, 2] = merged, (stop - num_slots)[merged], stop[merged]
    return merges, int(num_slots.sum())
