"""tree_decode against the reference in float64: on a GPU, else in Triton's interpreter."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from radixrt_kernels.gpu.configs import DecodeConfig, decode_config
from radixrt_kernels.gpu.decode_plan import plan_decode
from radixrt_kernels.gpu.tree_decode import tree_decode

from tests.support.paged import DEVICE, TOLERANCE, PagedBatch, as_ints, make_batch, relative_error

# Large tiles: the interpreter's cost is one of operations, not of elements.
CONFIG = DecodeConfig(
    64, 16, 64, num_warps=4, num_stages=2, min_chunk_tokens=64, num_programs=8, min_shared_tokens=16
)
NEVER_MERGE = replace(CONFIG, min_shared_tokens=1 << 30)


def plan(batch: PagedBatch, *, config=CONFIG, sliding_window=None):
    return plan_decode(
        as_ints(batch.page_table),
        np.array(batch.contexts),
        page_size=batch.page_size,
        num_group_heads=batch.q.shape[1] // batch.kv_layer.shape[3],
        num_kv_heads=batch.kv_layer.shape[3],
        config=config,
        sliding_window=sliding_window,
    )


def decode(batch: PagedBatch, *, config=CONFIG, sliding_window=None, soft_cap=None, planned=None):
    planned = planned or plan(batch, config=config, sliding_window=sliding_window)
    return tree_decode(
        batch.q,
        batch.kv_layer,
        page_table=batch.page_table,
        plan=planned.to_device(DEVICE),
        scale=batch.scale,
        soft_cap=soft_cap,
        out=torch.full_like(batch.q, float("nan")),
        config=config,
    )


def decodes(*contexts):
    return [(1, context) for context in contexts]


def border_lengths(page_size):
    """Give lengths around the borders of a page and of a tile; 0 keys cached is a context of 1."""
    return sorted({1, max(1, page_size - 1), page_size, page_size + 1, 65, 130})


def tree_batch(**options):
    """Give six sequences: all share 5 pages, then 0-2 share 3 more, then 3-4 share 1."""
    contexts = (8 * 16 + 1, 8 * 16 + 17, 9 * 16, 6 * 16 + 5, 6 * 16 + 16, 5 * 16 + 2)
    tree = [(range(6), 5), ((0, 1, 2), 3), ((3, 4), 1)]
    return make_batch(decodes(*contexts), tree=tree, **{"num_kv_heads": 1, **options})


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_lengths_around_page_borders(page_size):
    batch = make_batch(decodes(*border_lengths(page_size)), page_size=page_size)
    assert relative_error(decode(batch), batch.expected()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_group_heads", "head_dim"), [(1, 64), (3, 64), (4, 128), (8, 128)])
def test_every_dtype_group_and_head_dim(dtype, num_group_heads, head_dim):
    batch = tree_batch(dtype=dtype, num_group_heads=num_group_heads, head_dim=head_dim)
    assert relative_error(decode(batch), batch.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_production_tiles(dtype):
    config = decode_config(dtype, 64, 3, 16)
    batch = make_batch(decodes(700, 40), dtype=dtype, num_kv_heads=1, num_group_heads=3)
    assert relative_error(decode(batch, config=config), batch.expected()) < TOLERANCE[dtype]


def test_shared_prefix_equals_plain_decode():
    batch = tree_batch(num_kv_heads=2)
    merged, plain = plan(batch), plan(batch, config=NEVER_MERGE)
    assert merged.items[:, 1].sum() == (5 + 3 + 1) * 16 + 1 + 17 + 16 + 5 + 16 + 2
    assert plain.items[:, 1].sum() == sum(batch.contexts)
    error = relative_error(decode(batch, planned=merged), decode(batch, planned=plain))
    assert error < TOLERANCE[torch.float32]


def test_number_of_splits_does_not_matter():
    batch = make_batch(decodes(500, 130, 1))
    results = []
    for num_programs, parts in ((1, 0), (12, 6), (64, 11)):
        planned = plan(batch, config=replace(CONFIG, num_programs=num_programs))
        assert planned.num_slots == parts
        results.append(decode(batch, planned=planned))
    for result in results:
        assert relative_error(result, batch.expected()) < TOLERANCE[torch.float32]


def test_wide_and_narrow_tiles_meet_in_one_launch():
    # 20 sequences share 2 pages: 40 rows of a kv head in a wide tile, own tails in narrow ones
    batch = make_batch(decodes(*range(33, 53)), tree=[(range(20), 2)], num_kv_heads=1)
    planned = plan(batch)
    assert planned.items[:, 4].max() == 20
    assert planned.items[:, 4].min() == 1
    assert relative_error(decode(batch, planned=planned), batch.expected()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("sliding_window", [1, 5, 40, 90, 10_000])
def test_sliding_window(sliding_window):
    batch = tree_batch()
    result = decode(batch, sliding_window=sliding_window)
    assert relative_error(result, batch.expected(sliding_window=sliding_window)) < TOLERANCE[torch.float32]


def test_window_reads_only_pages_it_sees():
    batch = make_batch(decodes(500))
    # the token at 499 sees 480 to 499: pages 30 and 31
    assert plan(batch, sliding_window=20).items[:, 1].tolist() == [20]


@pytest.mark.parametrize("options", [{"soft_cap": 0.5}, {"soft_cap": 2.0, "sliding_window": 40}])
def test_soft_cap(options):
    batch = tree_batch()
    # 2 sigmoid(2 x) - 1 loses a few bits of small x
    assert relative_error(decode(batch, **options), batch.expected(**options)) < 5e-6


def test_where_pages_lie_changes_no_bit():
    batch = tree_batch(dtype=torch.float16)
    assert torch.equal(decode(batch), decode(batch.permuted(1)))


def test_order_of_items_changes_no_bit():
    batch = tree_batch()
    planned = plan(batch)
    backwards = replace(planned, items=planned.items[::-1].copy())
    assert torch.equal(decode(batch, planned=planned), decode(batch, planned=backwards))


def test_padding_of_a_graph_changes_no_bit():
    batch = tree_batch()
    planned = plan(batch)
    padded = planned.padded(
        num_items=len(planned.items) + 3,
        num_members=len(planned.members) + 5,
        num_merges=len(planned.merges) + 2,
        num_slots=planned.num_slots + 7,
    )
    assert torch.equal(decode(batch, planned=planned), decode(batch, planned=padded))
    with pytest.raises(ValueError, match="num_slots must be at least"):
        planned.padded(num_items=100, num_members=100, num_merges=100, num_slots=1)


def test_rows_of_other_sequences_are_left_alone():
    batch = make_batch(decodes(20, 40))
    planned = plan_decode(
        as_ints(batch.page_table),
        np.array(batch.contexts),
        page_size=16,
        num_group_heads=2,
        num_kv_heads=2,
        config=CONFIG,
        rows=np.array([4, 1]),
    )
    q = torch.full((6, 4, 64), float("nan"), device=DEVICE)
    q[[4, 1]] = batch.q
    out = tree_decode(
        q,
        batch.kv_layer,
        page_table=batch.page_table,
        plan=planned.to_device(DEVICE),
        scale=batch.scale,
        out=torch.full_like(q, 7.0),
        config=CONFIG,
    )
    assert torch.equal(out[[4, 1]], decode(batch))
    assert out[[0, 2, 3, 5]].eq(7.0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 80)}, r"kv_layer must have shape \[any, 2, any, any, 80\]"),
        ({"q": torch.zeros(2, 3, 64)}, "q must have a multiple of 2 heads, got 3"),
        ({"q": torch.zeros(2, 4, 64, dtype=torch.float64)}, "q must be torch.bfloat16 or"),
        ({"page_table": torch.zeros(2, 3)}, "page_table must be torch.int32, got torch.float32"),
        ({"soft_cap": 0.0}, "soft_cap must be a positive number"),
        ({"out": torch.zeros(2, 64, 4).transpose(1, 2)}, "out must be contiguous"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    batch = make_batch(decodes(20, 40))
    arguments = {
        "q": batch.q,
        "kv_layer": batch.kv_layer,
        "page_table": batch.page_table,
        "plan": plan(batch).to_device(DEVICE),
        "scale": 1.0,
    }
    change = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()
    }
    with pytest.raises(ValueError, match=message):
        tree_decode(**{**arguments, **change})


def test_a_plan_keeps_its_invariants():
    batch = tree_batch()
    planned = plan(batch)
    rows, slots = planned.members[:, 0], planned.members[:, 1]
    assert sorted(slots[slots >= 0]) == list(range(planned.num_slots))
    for row, first, stop in planned.merges:
        assert sorted(slots[rows == row]) == list(range(first, stop))
    # each row's items cover its context once
    for b, context in enumerate(batch.contexts):
        spans = sorted(
            (position, position + tokens)
            for _, tokens, position, first, count in planned.items
            if b in rows[first : first + count]
        )
        assert spans[0][0] == 0
        assert spans[-1][1] == context
        assert all(stop == start for (_, stop), (start, _) in pairwise(spans))
    on_device = planned.to_device(DEVICE)
    for tensor in (on_device.items, on_device.members, on_device.merges):
        assert tensor.storage_offset() % 4 == 0


def test_nothing_to_decode_launches_nothing():
    batch = make_batch(decodes(20))
    planned = plan_decode(
        as_ints(batch.page_table)[:0],
        np.array([]),
        page_size=16,
        num_group_heads=2,
        num_kv_heads=2,
        config=CONFIG,
    )
    assert len(planned.items) == 0
    assert decode(batch, planned=planned).isnan().all()
