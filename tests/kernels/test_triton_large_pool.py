"""A pool of more than 2**31 elements: offsets must not be 32-bit. Only the pages that are written take memory."""

import pytest
import torch
from radixrt_kernels.gpu.attention import attend
from radixrt_kernels.gpu.copy_pages import copy_pages
from radixrt_kernels.gpu.rope_write import rope_write

from tests.kernels.test_triton_attention import plan
from tests.support.paged import DEVICE, PagedBatch, make_batch

PAGE_SHAPE = (2, 16, 1, 64)
NUM_PAGES = 2**31 // (2 * 16 * 64) + 1000


@pytest.fixture(scope="module")
def pool():
    return torch.empty(NUM_PAGES, *PAGE_SHAPE, dtype=torch.float16, device=DEVICE)


def test_attention_reads_the_end_of_a_large_pool(pool):
    batch = make_batch([(1, 40), (20, 35)], dtype=torch.float16, num_kv_heads=1)
    num_pages = len(batch.kv_layer)
    pool[-num_pages:] = batch.kv_layer
    table = (batch.page_table + (NUM_PAGES - num_pages)).int()
    far = PagedBatch(batch.q, pool, table, batch.num_new, batch.contexts)
    results = [attend(b.q, b.kv_layer, plan(b), scale=b.scale) for b in (batch, far)]
    assert torch.equal(*results)


def test_rope_write_reaches_the_end_of_a_large_pool(pool):
    qkv = torch.randn(1, 3, 64, dtype=torch.float16).to(DEVICE)
    rotation = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1).to(DEVICE)  # turns nothing
    rope_write(
        qkv,
        pool,
        slots=torch.tensor([NUM_PAGES * 16 - 1], device=DEVICE),
        positions=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        rotation=rotation,
    )
    assert torch.equal(pool[-1, :, -1, 0], qkv[0, 1:])


def test_copy_pages_reaches_the_end_of_a_large_pool(pool):
    pool[-1] = torch.arange(2048, device=DEVICE).view(PAGE_SHAPE)
    copy_pages(pool, pool, [(NUM_PAGES - 1, NUM_PAGES - 2)])
    assert torch.equal(pool[-2], pool[-1])
