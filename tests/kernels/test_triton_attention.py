"""A mixed batch of decodes, whole prompts and chunks against the reference."""

import pytest
import torch
from radixrt_kernels.gpu.attention import attend, plan_attention

from tests.support.paged import TOLERANCE, as_ints, make_batch, relative_error

MIXED = [(1, 70), (30, 50), (1, 66), (5, 5), (1, 1), (1, 90)]


def plan(batch, **options):
    planned = plan_attention(
        as_ints(batch.page_table),
        num_query_tokens=batch.num_new,
        num_context_tokens=batch.contexts,
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.kv_layer.shape[3],
        head_dim=batch.q.shape[2],
        page_size=batch.page_size,
        dtype=batch.q.dtype,
        **options,
    )
    return planned.to_device(batch.page_table)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_mixed_batch_equals_reference(sliding_window):
    batch = make_batch(MIXED, tree=[((0, 2, 5), 4)], num_kv_heads=1, num_group_heads=3)
    result = attend(batch.q, batch.kv_layer, plan(batch, sliding_window=sliding_window), scale=batch.scale)
    expected = batch.expected(sliding_window=sliding_window)
    assert relative_error(result, expected) < TOLERANCE[torch.float32]


def test_decodes_and_chunks_alone_need_one_kernel():
    decodes, chunks = make_batch([(1, 20), (1, 30)]), make_batch([(2, 20), (30, 30)])
    assert plan(decodes).extend is None
    assert plan(chunks).decode is None
    for batch in (decodes, chunks):
        result = attend(batch.q, batch.kv_layer, plan(batch), scale=batch.scale)
        assert relative_error(result, batch.expected()) < TOLERANCE[torch.float32]


def test_other_shapes_are_refused():
    batch = make_batch([(1, 5)], head_dim=32)
    with pytest.raises(ValueError, match=r"head dimension must be one of \(64, 128\), got 32"):
        plan(batch)
    batch = make_batch([(1, 5)], num_kv_heads=1, num_group_heads=17)
    with pytest.raises(ValueError, match="query heads per kv head must be from 1 to 16, got 17"):
        plan(batch)
