"""StepPlan -> the arrays of a step on the host, and how the decoder sees them on the device.

Nothing here reads a device: work items are cut from the host's page tables. A token that was sampled in the step before
and that the host has not seen yet is named by its row among that step's samples.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain, count
from operator import add, attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixrt.exec.device_sampling import DrawNumbers
from radixrt.kv.cache import PageLease
from radixrt.model.device_decoder import DeviceInputs
from radixrt.model.device_kernels import (
    PLAN_FIELDS,
    AttentionPlanner,
    BatchPlan,
    DeviceBatchPlan,
    DeviceDecodePlan,
    DeviceExtendPlan,
    Ints,
)
from radixrt.sched.plan import NUM_TOKENS, START, Chunk, StepPlan
from radixrt.sched.sequence import Sequence

LEASE = attrgetter("sequence.lease")


class PageTables:
    """Own the page table of the last step; rows that did not change are not written again.

    Invariant: row b holds the first counts[b] pages of leases[b], then zeros. (Leases only ever append pages.)
    """

    def __init__(self) -> None:
        self._table = np.zeros((0, 0), np.int32)
        self._leases: list[PageLease | None] = []
        self._counts: list[int] = []

    def update(self, leases: Seq[PageLease], counts: Seq[int]) -> Ints:
        """Give [B, P] int32: the first counts[b] pages of each lease, then zeros; good until the next call."""
        num_rows, num_columns = len(leases), max(counts)
        if num_rows > self._table.shape[0] or num_columns > self._table.shape[1]:
            rows, columns = (
                max(new, 2 * old) for new, old in zip((num_rows, num_columns), self._table.shape, strict=True)
            )
            self._table = np.zeros((rows, columns), np.int32)
            self._leases, self._counts = [None] * rows, [0] * rows
        for row, (lease, num_pages) in enumerate(zip(leases, counts, strict=True)):
            num_held = self._counts[row]
            if self._leases[row] is not lease or num_held > num_pages:
                self._table[row, :num_held] = 0
                self._leases[row], num_held = lease, 0
            if num_held < num_pages:
                self._table[row, num_held:num_pages] = lease.pages[num_held:num_pages]
            self._counts[row] = num_pages
        return self._table[:num_rows, :num_columns]


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step on the host.

    Attributes:
        plan: what it carries out.
        arrays: everything that the device must be told, in the order of the buffer; the page table last.
        attention: the work items per distinct window; their arrays are among `arrays`.
        wanted: per chunk the positions whose distribution is wanted; their rows of logits follow one another.
        draws: the chunks from whose last row a token is drawn; row i of the draw's arrays is draws[i].
        draw_rows: their rows of logits.
        draw_of_chunk: per chunk, which draw is its own.
    """

    plan: StepPlan
    arrays: dict[str, npt.NDArray[Any]]
    attention: tuple[BatchPlan, ...]
    wanted: tuple[tuple[int, ...], ...]
    draws: tuple[Chunk, ...]
    draw_rows: tuple[int, ...]
    draw_of_chunk: tuple[int | None, ...]

    @property
    def num_logit_rows(self) -> int:
        return sum(map(len, self.wanted))

    @property
    def is_decode(self) -> bool:
        """Tell whether every sequence has one new token."""
        return len(self.arrays["token_ids"]) == len(self.plan.chunks)

    @property
    def needs_tables(self) -> bool:
        """Tell whether a draw needs a mask, a bias or counts of tokens."""
        return any((self.arrays[name] >= 0).any() for name in ("mask_rows", "bias_rows", "penalty_rows"))

    @property
    def has_unseen_tokens(self) -> bool:
        """Tell whether tokens come from the step before, on the device."""
        return bool(self.arrays["sampled_from"].any())


def build_step(
    plan: StepPlan,
    planner: AttentionPlanner,
    *,
    tables: PageTables,
    numbers: DrawNumbers,
    sampled_rows: Mapping[Sequence, int],
) -> HostStep:
    """Make a step's arrays for a non-empty plan.

    Args:
        tables, numbers: kept from step to step.
        sampled_rows: where the last step's sampled token of a sequence lies on the device.
    Changes: tables and numbers.
    """
    chunks, page_size = plan.chunks, planner.page_size
    news, first_positions = tuple(map(NUM_TOKENS, chunks)), list(map(START, chunks))
    contexts = tuple(map(add, first_positions, news))
    table = tables.update(list(map(LEASE, chunks)), [-(-stop // page_size) for stop in contexts])
    num_new = np.array(news, np.int64)
    first_row = num_new.cumsum() - num_new
    owner = np.repeat(np.arange(len(chunks)), num_new)
    positions = np.arange(len(owner)) + (np.array(first_positions, np.int64) - first_row)[owner]
    columns, offsets = np.divmod(positions, page_size)
    token_ids, sampled_from = _tokens(chunks, sampled_rows)
    wanted = tuple(map(wanted_positions, chunks))
    num_wanted = list(accumulate(map(len, wanted)))
    draws = tuple(chunk for chunk in chunks if chunk.wants_sample)
    draw_rows = tuple(stop - 1 for chunk, stop in zip(chunks, num_wanted, strict=True) if chunk.wants_sample)
    attention = planner.plan(table, news, contexts)
    arrays: dict[str, npt.NDArray[Any]] = {
        "token_ids": token_ids,
        "positions": positions,
        "slots": table[owner, columns].astype(np.int64) * page_size + offsets,
        "sampled_from": sampled_from,
        "sample_rows": _sample_rows(wanted, num_wanted, first_row - np.array(first_positions)),
        "copies": np.array([(copy.source, copy.target) for copy in plan.page_copies], np.int32).reshape(
            -1, 2
        ),
        "draw_rows": np.array(draw_rows, np.int64),
        **numbers.update(draws),
        **attention_arrays(attention),
        "page_table": table,
    }
    counter = count()
    draw_of_chunk = tuple(next(counter) if chunk.wants_sample else None for chunk in chunks)
    return HostStep(plan, arrays, attention, wanted, draws, draw_rows, draw_of_chunk)


def _sample_rows(
    wanted: Seq[tuple[int, ...]], num_wanted: Seq[int], row_of_position: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Give the rows whose distribution is wanted: of a position, the one before it. Pure.

    Args:
        num_wanted: how many positions are wanted of a chunk and all before it.
        row_of_position: per chunk, the row of position 0 if it had one.
    """
    rows = np.fromiter(chain.from_iterable(wanted), np.int64, num_wanted[-1])
    return rows + np.repeat(row_of_position - 1, list(map(len, wanted)))


def _tokens(
    chunks: Seq[Chunk], sampled_rows: Mapping[Sequence, int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Give token ids [T], and sampled_from [T]: 0, or 1 + the row of the last step's sample that is the token."""
    tokens = array("i")
    unseen, rows = list[int](), list[int]()
    for sequence, start, num_tokens, *_ in chunks:
        known, stop = sequence.token_ids, start + num_tokens
        if start < len(known):
            tokens.extend(known[start:stop])
        if stop > len(known):
            unseen.append(len(tokens))
            rows.append(1 + sampled_rows[sequence])
            tokens.append(0)
    sampled_from = np.zeros(len(tokens), np.int32)
    sampled_from[unseen] = rows
    return np.frombuffer(tokens, np.int32).astype(np.int64), sampled_from


def wanted_positions(chunk: Chunk) -> tuple[int, ...]:
    """Give the positions whose token distribution is wanted: the scored ones, then the next token's. Pure."""
    return (*chunk.scored, chunk.stop) if chunk.wants_sample else tuple(chunk.scored)


def attention_arrays(attention: Seq[BatchPlan]) -> dict[str, Ints]:
    """Give the arrays of a step's work items by name; those of kernels without work are empty. Pure."""
    found: dict[str, Ints] = {}
    for index, plan in enumerate(attention):
        arrays = {name: np.zeros((0, width), np.int32) for name, width in PLAN_FIELDS.items()}
        if plan.decode is not None:
            arrays |= {
                "items": plan.decode.items,
                "members": plan.decode.members,
                "merges": plan.decode.merges,
            }
        if plan.extend is not None:
            arrays["tiles"] = plan.extend.tiles
        found |= {f"{name}_{index}": array for name, array in arrays.items()}
    return found


def device_inputs(
    views: Mapping[str, torch.Tensor], attention: Seq[BatchPlan], *, token_ids: torch.Tensor
) -> DeviceInputs:
    """Give what the decoder reads, from the arrays on the device. Pure."""
    plans = []
    for index, plan in enumerate(attention):
        decode = extend = None
        if plan.decode is not None:
            decode = DeviceDecodePlan(
                views[f"items_{index}"],
                views[f"members_{index}"],
                views[f"merges_{index}"],
                plan.decode.num_slots,
                plan.decode.has_window,
            )
        if plan.extend is not None:
            extend = DeviceExtendPlan(views[f"tiles_{index}"], plan.extend.sliding_window)
        plans.append(DeviceBatchPlan(views["page_table"], decode, extend))
    return DeviceInputs(token_ids, views["positions"], views["slots"], views["sample_rows"], tuple(plans))


def join_tokens(views: Mapping[str, torch.Tensor], sampled: torch.Tensor) -> torch.Tensor:
    """Give the step's token ids [T], those of the last step's samples put in. Launches only."""
    sampled_from = views["sampled_from"].long()
    found = sampled[(sampled_from - 1).clamp(min=0)]
    return torch.where(sampled_from > 0, found, views["token_ids"])
