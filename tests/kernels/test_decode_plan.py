"""The planner of tree_decode over random trees of pages: laws, no kernels."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from radixrt_kernels.gpu.configs import decode_config
from radixrt_kernels.gpu.decode_plan import plan_decode

EVERYTHING = 1 << 40


class RandomTree:
    """Page tables that share leading pages as the leaves of a random tree do; each last page is private."""

    def __init__(self, draw: random.Random, *, page_size: int):
        self.page_size = page_size
        num_sequences, num_columns = draw.randrange(1, 60), draw.randrange(1, 40)
        self.contexts = np.array(
            [draw.randrange(1, num_columns * page_size + 1) for _ in range(num_sequences)]
        )
        self.table = np.zeros((num_sequences, num_columns), np.int32)
        self._next_page = 1
        self._fill(draw, list(range(num_sequences)), 0)
        for b, context in enumerate(self.contexts):
            last = (context - 1) // page_size
            self.table[b, last:] = 0
            self.table[b, last] = self._page()

    def _page(self) -> int:
        self._next_page += 1
        return self._next_page

    def _fill(self, draw: random.Random, sequences: list[int], column: int) -> None:
        if not sequences or column >= self.table.shape[1]:
            return
        stop = column + draw.randrange(1, 6)
        for at in range(column, min(stop, self.table.shape[1])):
            self.table[sequences, at] = self._page()
        groups: list[list[int]] = [[] for _ in range(draw.choice([1, 2, 3]))]
        for b in sequences:
            draw.choice(groups).append(b)
        for group in groups:
            self._fill(draw, group, stop)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_items_cover_each_visible_context_once(seed, is_apart):
    draw = random.Random(seed)
    tree = RandomTree(draw, page_size=draw.choice([1, 4, 16, 64, 256]))
    if is_apart:  # no two begin alike
        tree.table[:, 0] = draw.sample(range(1 << 20, 1 << 30), len(tree.table))
    num_group_heads, window = draw.choice([1, 3, 4, 8, 16]), draw.choice([None, 1, 5, 70, 400])
    config = replace(
        decode_config(torch.bfloat16, 128, num_group_heads, tree.page_size),
        min_shared_tokens=draw.choice([1, 16, 128, EVERYTHING]),
        num_programs=draw.choice([1, 64, 528, 5000]),
        min_chunk_tokens=draw.choice([64, 256]),
    )
    num_sequences = len(tree.contexts)
    sequences = np.array(sorted(draw.sample(range(num_sequences), draw.randrange(1, num_sequences + 1))))
    plan = plan_decode(
        tree.table,
        tree.contexts,
        sequences=sequences,
        page_size=tree.page_size,
        num_group_heads=num_group_heads,
        num_kv_heads=draw.choice([1, 8]),
        config=config,
        sliding_window=window,
    )
    spans: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(len(sequences))}
    for where, num_tokens, position, first, count in plan.items.tolist():
        assert 0 < count * num_group_heads <= config.wide_rows
        assert position % tree.page_size == 0
        column, num_pages = position // tree.page_size, -(-num_tokens // tree.page_size)
        pages = tree.table.ravel()[where : where + num_pages]
        for row, slot, first_visible in plan.members[first : first + count].tolist():
            b = sequences[row]
            assert (tree.table[b, column : column + num_pages] == pages).all()
            assert first_visible == max(0, tree.contexts[b] - (window or EVERYTHING))
            assert first_visible < position + num_tokens  # it sees a token of this item
            spans[row].append((position, position + num_tokens, slot))
    for row, parts in spans.items():
        parts.sort()
        context = tree.contexts[sequences[row]]
        assert parts[0][0] <= max(0, context - (window or EVERYTHING))
        assert parts[-1][1] == context
        assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
        merged = [merge for merge in plan.merges.tolist() if merge[0] == row]
        if len(parts) == 1:
            assert parts[0][2] == -1
            assert not merged
        else:
            assert sorted(part[2] for part in parts) == list(range(merged[0][1], merged[0][2]))
    slots = plan.members[:, 1]
    assert sorted(slots[slots >= 0]) == list(range(plan.num_slots))


def test_sharing_is_read_once_where_it_pays():
    table = np.array([[1, 2, 10], [1, 2, 11], [1, 3, 12]], np.int32)
    contexts = np.array([33, 40, 35])

    def tokens(min_shared_tokens):
        config = replace(decode_config(torch.bfloat16, 128, 4, 16), min_shared_tokens=min_shared_tokens)
        plan = plan_decode(table, contexts, page_size=16, num_group_heads=4, num_kv_heads=8, config=config)
        return int(plan.items[:, 1].sum())

    alone = 33 + 40 + 35
    # page 1 saves two reads of 16 tokens, page 2 one
    assert tokens(16) == alone - 2 * 16 - 16
    # pages 1 and 2 for the first two together save 32 tokens once
    assert tokens(22) == alone - 32
    assert tokens(33) == alone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 12}, "page_size must be a power of two, got 12"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"context_lens": np.array([5])}, "context_lens must have 2 entries"),
        ({"context_lens": np.array([5, 33])}, "context_lens must be from 1 to 32, got 5 to 33"),
        ({"context_lens": np.array([0, 3])}, "context_lens must be from 1 to 32, got 0 to 3"),
    ],
)
def test_counts_that_do_not_fit_are_refused(change, message):
    arguments = {
        "context_lens": np.array([5, 20]),
        "page_size": 16,
        "num_group_heads": 4,
        "num_kv_heads": 8,
        "config": decode_config(torch.bfloat16, 128, 4, 16),
    }
    with pytest.raises(ValueError, match=message):
        plan_decode(np.ones((2, 2), np.int32), **{**arguments, **change})
