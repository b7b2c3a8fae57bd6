"""extend against the reference in float64: on a GPU, else in Triton's interpreter."""

import numpy as np
import pytest
import torch
from radixrt_kernels.gpu.configs import ExtendConfig, extend_config
from radixrt_kernels.gpu.extend import DeviceExtendPlan, extend, plan_extend

from tests.support.paged import DEVICE, TOLERANCE, PagedBatch, make_batch, relative_error

CONFIG = ExtendConfig(64, 64, num_warps=4, num_stages=2)


def plan(batch: PagedBatch, *, config=CONFIG, sliding_window=None):
    return plan_extend(
        q_start=np.cumsum(batch.num_new) - batch.num_new,
        num_new=np.array(batch.num_new),
        contexts=np.array(batch.contexts),
        sequences=np.arange(len(batch.contexts)),
        num_columns=batch.page_table.shape[1],
        num_group_heads=batch.q.shape[1] // batch.kv_layer.shape[3],
        config=config,
        sliding_window=sliding_window,
    ).to_device(DEVICE)


def attend(batch: PagedBatch, *, config=CONFIG, sliding_window=None, soft_cap=None, planned=None):
    return extend(
        batch.q,
        batch.kv_layer,
        page_table=batch.page_table,
        plan=planned or plan(batch, config=config, sliding_window=sliding_window),
        scale=batch.scale,
        soft_cap=soft_cap,
        out=torch.full_like(batch.q, float("nan")),
        config=config,
    )


# (new, context): whole prompts (nothing cached), one token, chunks over a prefix that ends inside a page
RAGGED = [(1, 1), (17, 17), (1, 100), (33, 130), (70, 75), (64, 64)]


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_lengths_around_page_borders(page_size):
    lengths = {1, max(1, page_size - 1), page_size, page_size + 1}
    counts = [(n, n) for n in lengths] + [(2, page_size + 1 + n) for n in lengths]
    batch = make_batch(counts, page_size=page_size, num_kv_heads=1)
    assert relative_error(attend(batch), batch.expected()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_group_heads", "head_dim"), [(1, 128), (3, 64), (4, 64), (8, 64)])
def test_every_dtype_group_and_head_dim(dtype, num_group_heads, head_dim):
    batch = make_batch(
        RAGGED, dtype=dtype, num_group_heads=num_group_heads, head_dim=head_dim, num_kv_heads=1
    )
    assert relative_error(attend(batch), batch.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_production_tiles(dtype):
    batch = make_batch([(150, 300), (40, 40)], dtype=dtype)
    result = attend(batch, config=extend_config(dtype, 64, 2, 16))
    assert relative_error(result, batch.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("sliding_window", [1, 7, 70, 10_000])
def test_sliding_window(sliding_window):
    batch = make_batch(RAGGED, num_kv_heads=1)
    result = attend(batch, sliding_window=sliding_window)
    assert relative_error(result, batch.expected(sliding_window=sliding_window)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("options", [{"soft_cap": 0.5}, {"soft_cap": 2.0, "sliding_window": 40}])
def test_soft_cap(options):
    batch = make_batch(RAGGED, num_kv_heads=1)
    # 2 sigmoid(2 x) - 1 loses a few bits of small x
    assert relative_error(attend(batch, **options), batch.expected(**options)) < 5e-6


def test_where_pages_lie_changes_no_bit():
    batch = make_batch(RAGGED, dtype=torch.float16, num_kv_heads=1)
    assert torch.equal(attend(batch), attend(batch.permuted(1)))


def test_order_and_padding_of_tiles_change_no_bit():
    batch = make_batch(RAGGED, num_kv_heads=1)
    planned = plan(batch)
    tiles = torch.cat([planned.tiles.new_zeros(3, 5), planned.tiles.flip(0)])
    assert torch.equal(
        attend(batch, planned=planned), attend(batch, planned=DeviceExtendPlan(tiles, planned.sliding_window))
    )


def test_chunks_equal_the_whole():
    batch = make_batch([(100, 100)], num_kv_heads=1)
    whole = attend(batch)
    for start, stop in ((0, 31), (31, 80), (80, 100)):
        part = PagedBatch(
            batch.q[start:stop].contiguous(), batch.kv_layer, batch.page_table, (stop - start,), (stop,)
        )
        assert relative_error(attend(part), whole[start:stop]) < TOLERANCE[torch.float32]


def test_wrong_arguments_are_refused():
    batch = make_batch([(3, 20)])
    with pytest.raises(ValueError, match="num_new must be from 1 to the context"):
        plan(PagedBatch(batch.q, batch.kv_layer, batch.page_table, (21,), (20,)))
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        plan(batch, sliding_window=0)
    with pytest.raises(ValueError, match=r"kv_layer must be torch\.float16, got torch.float32"):
        extend(
            batch.q.half(),
            batch.kv_layer,
            page_table=batch.page_table,
            plan=plan(batch),
            scale=1.0,
        )
