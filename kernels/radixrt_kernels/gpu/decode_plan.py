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
class Segments:
    """Runs of pages with the sequences that read them.

    Attributes:
        readers: [any] int64 sequences; those of a segment are neighbours.
        fields: [4, N] int64: a segment's first page in its readers' tables, its tokens, its first reader's place in
            `readers`, and how many readers it has.
    """

    readers: npt.NDArray[np.int64]
    fields: npt.NDArray[np.int64]


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
    Cost: about 0.1 ms for 64 sequences of 128 pages each, a half more where they share most pages; mostly calls of
        numpy, so 0.06 ms for one sequence.
    """
    num_sequences, num_columns = page_table.shape
    check_page_size(page_size)
    check_window(sliding_window)
    contexts = np.asarray(context_lens, np.int64)
    if contexts.shape != (num_sequences,):
        raise ValueError(f"context_lens must have {num_sequences} entries, got {contexts.shape}")
    lengths = contexts.tolist()
    if lengths and not 1 <= min(lengths) <= max(lengths) <= num_columns * page_size:
        raise ValueError(
            f"context_lens must be from 1 to {num_columns * page_size}, got {min(lengths)} to {max(lengths)}"
        )
    chosen = np.arange(num_sequences) if sequences is None else np.asarray(sequences, np.int64)
    has_window = sliding_window is not None
    if not len(chosen):
        items, members, merges = (
            np.zeros((0, width), np.int32) for width in (ITEM_FIELDS, MEMBER_FIELDS, MERGE_FIELDS)
        )
        return DecodePlan(items, members, merges, 0, has_window)
    row_of = np.zeros(num_sequences, np.int64)
    row_of[chosen] = np.arange(len(chosen)) if rows is None else rows
    segments = find_segments(page_table, contexts, chosen, page_size, config.min_shared_tokens)
    first_visible = None
    if sliding_window is not None:
        first_visible = np.maximum(contexts - sliding_window, 0)
        segments = _cut_to_window(segments, first_visible, page_size)
    items, sequence = _cut(
        segments, first_visible, page_size, num_columns, num_group_heads, num_kv_heads, config
    )
    members = np.zeros((len(sequence), MEMBER_FIELDS), np.int32)
    members[:, 0] = row_of[sequence]
    if first_visible is not None:
        members[:, 2] = first_visible[sequence]
    merges, num_slots = _assign_slots(members)
    return DecodePlan(items, members, merges, num_slots, has_window)


def find_segments(
    page_table: Ints,
    contexts: npt.NDArray[np.int64],
    sequences: npt.NDArray[np.int64],
    page_size: int,
    min_shared_tokens: int,
) -> Segments:
    """Give the tree of page runs, each with those of `sequences` that read it; covers every context once. Pure."""
    first_pages = page_table[sequences, 0]
    if len(set(first_pages.tolist())) == len(sequences):  # nothing is shared: as below, in a few calls
        keys = first_pages.byteswap().view(np.uint32)  # ordered as their bytes
        readers = sequences[keys.argsort()[::-1]]
        fields = np.zeros((4, len(readers)), np.int64)
        fields[1], fields[2], fields[3] = contexts[readers], np.arange(len(readers)), 1
        return Segments(readers, fields)
    order, alike = _sorted_alike(page_table, contexts, sequences, page_size)
    lengths = contexts[order].tolist()
    found: list[int] = []
    pending = [(0, len(order), 0)]  # sorted rows [low, high) whose pages before `first` are covered
    while pending:
        low, high, first = pending.pop()
        between, count = alike[low + 1 : high], high - low
        shared = min(between, default=0)
        num_tokens = (shared - first) * page_size
        # Saved: a read for all but one sequence. Paid: a partial result for each.
        if num_tokens > 0 and 2 * num_tokens * (count - 1) >= min_shared_tokens * count:
            found += (first, num_tokens, low, count)
            first = shared
        if shared == max(between, default=0):  # each goes on alone
            for row in range(high - 1, low - 1, -1):
                if (num_tokens := lengths[row] - first * page_size) > 0:
                    found += (first, num_tokens, row, 1)
            continue
        start = low
        for index in range(low + 1, high):
            if alike[index] == shared:
                pending.append((start, index, first))
                start = index
        pending.append((start, high, first))
    return Segments(order, np.array(found, np.int64).reshape(-1, 4).T)


def _sorted_alike(
    page_table: Ints, contexts: npt.NDArray[np.int64], sequences: npt.NDArray[np.int64], page_size: int
) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Sort sequences so that those that begin alike are neighbours; say how many whole pages each shares with the
    one before it."""
    num_columns = page_table.shape[1]
    row_bytes = np.dtype((np.void, num_columns * page_table.itemsize))  # compared as bytes are
    rows = np.ascontiguousarray(page_table).view(row_bytes)[:, 0]
    order = sequences[rows[sequences].argsort(kind="stable")]
    table, full_pages = page_table[order], contexts[order] // page_size
    differs = table[1:] != table[:-1]
    where = differs.argmax(1)
    where[~differs[np.arange(len(where)), where]] = num_columns
    return order, [0, *np.minimum(where, np.minimum(full_pages[1:], full_pages[:-1])).tolist()]


def _cut_to_window(segments: Segments, first_visible: npt.NDArray[np.int64], page_size: int) -> Segments:
    """Drop sequences that do not see a segment, and pages that none of them sees."""
    first_page, num_tokens, first_reader, num_readers = segments.fields
    stop = first_page * page_size + num_tokens
    readers = segments.readers[_ranges(first_reader, num_readers)]
    segment = np.repeat(np.arange(len(stop)), num_readers)
    is_seen = first_visible[readers] < stop[segment]
    readers, segment = readers[is_seen], segment[is_seen]
    num_readers = np.bincount(segment, minlength=len(stop))
    (kept,) = num_readers.nonzero()
    num_readers = num_readers[kept]
    first_reader = num_readers.cumsum() - num_readers
    first_seen = np.minimum.reduceat(first_visible[readers], first_reader)
    first_page = np.maximum(first_page[kept], first_seen // page_size)
    num_tokens = stop[kept] - first_page * page_size
    return Segments(readers, np.array((first_page, num_tokens, first_reader, num_readers)))


def _ranges(starts: npt.NDArray[np.int64] | int, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Give the numbers of all [start, start + count), one range after the other. Pure."""
    stops = counts.cumsum()
    return np.repeat(starts - stops + counts, counts) + np.arange(stops[-1])


def _cut(
    segments: Segments,
    first_visible: npt.NDArray[np.int64] | None,
    page_size: int,
    num_columns: int,
    num_group_heads: int,
    num_kv_heads: int,
    config: DecodeConfig,
) -> tuple[Ints, npt.NDArray[np.int64]]:
    """Cut segments into items [I, 5]; give them and their members' sequences [M]."""
    first_page, num_tokens, first_reader, num_readers = segments.fields
    where = segments.readers[first_reader] * num_columns + first_page
    start = first_page * page_size
    most = config.wide_rows // num_group_heads
    if num_readers.max() > most:
        num_blocks = -(-num_readers // most)
        fields = np.array((where, start, num_tokens, first_reader, num_readers))
        where, start, num_tokens, first_reader, num_readers = np.repeat(fields, num_blocks, axis=1)
        num_before = most * _ranges(0, num_blocks)
        first_reader = first_reader + num_before
        num_readers = np.minimum(num_readers - num_before, most)
    # Chunks of whole tiles and whole pages, about num_programs of them over all kv heads.
    unit = max(config.block_tokens, page_size)
    wanted = max(config.num_programs // num_kv_heads, 1)
    at_most = max(-(-int(num_tokens.sum()) // wanted), config.min_chunk_tokens, unit)
    even = -(-num_tokens // -(-num_tokens // at_most))
    per_chunk = -(-even // unit) * unit
    num_chunks = -(-num_tokens // per_chunk)
    # items: segment after segment, block after block, chunk after chunk
    fields = np.array((where, start, num_tokens, first_reader, num_readers, per_chunk))
    where, start, num_tokens, first_reader, num_members, per_chunk = np.repeat(fields, num_chunks, axis=1)
    token = per_chunk * _ranges(0, num_chunks)
    tokens = np.minimum(num_tokens - token, per_chunk)
    position = start + token
    sequence = segments.readers[_ranges(first_reader, num_members)]
    if first_visible is not None:
        item = np.repeat(np.arange(len(tokens)), num_members)
        is_seen = first_visible[sequence] < (position + tokens)[item]
        sequence = sequence[is_seen]
        num_members = np.bincount(item[is_seen], minlength=len(tokens))
    first_member = num_members.cumsum() - num_members
    items = np.array((where + token // page_size, tokens, position, first_member, num_members), np.int32)
    # The longest first, so that no long item starts when the others are done.
    order = (-tokens).argsort(kind="stable")
    if first_visible is not None:
        order = order[num_members[order] > 0]
    return items.T.take(order, axis=0), sequence


def _assign_slots(members: Ints) -> tuple[Ints, int]:
    """Write each member's slot; a row's slots are consecutive. Gives merges [K, 3] and the number of slots.

    Changes: members[:, 1].
    """
    rows = members[:, 0]
    num_parts = np.bincount(rows)
    (merged,) = (num_parts > 1).nonzero()
    by_row = rows.argsort(kind="stable")
    split = by_row[(num_parts > 1)[rows[by_row]]]
    members[:, 1] = -1
    members[split, 1] = np.arange(len(split))
    stop = num_parts[merged].cumsum()
    return np.array((merged, stop - num_parts[merged], stop), np.int32).T.copy(), len(split)
