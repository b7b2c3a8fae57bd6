"""rope_write, add_norm, silu_mul and copy_pages against the reference: on a GPU, else in Triton's interpreter."""

import math

import pytest
import torch
from radixrt_kernels import reference
from radixrt_kernels.gpu.copy_pages import copy_pages
from radixrt_kernels.gpu.rope_write import rope_write
from radixrt_kernels.gpu.rows import MAX_ROW, add_norm, silu_mul

from tests.support.paged import DEVICE

# The interpreter computes with numpy, which warns of what kernels meet on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter cuts bfloat16 off where torch rounds: two units in the last of 8 bits, for a rounded sum's norm.
CLOSE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 1e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def rope_case(*, num_heads, num_kv_heads, head_dim, page_size, dtype, has_norm, num_tokens=5):
    kv_layer = torch.full((4, 3, 2, page_size, num_kv_heads, head_dim), math.nan, dtype=dtype)[:, 1]
    order = torch.randperm(4 * page_size, generator=torch.Generator().manual_seed(3))
    angles = torch.arange(50)[:, None] * torch.logspace(0, -3, head_dim // 2)
    # The projection is wider than it needs to be: tokens are strided.
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads + 1, head_dim, dtype=dtype)[:, :-1]
    options = {
        "slots": order[:num_tokens].to(DEVICE),
        "positions": torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(4)).to(DEVICE),
        "rotation": torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE),
        "qk_norm": random(num_heads + num_kv_heads, head_dim, dtype=dtype, seed=5) if has_norm else None,
        "epsilon": 1e-5,
    }
    return qkv, kv_layer.to(DEVICE), options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size"),
    [(9, 3, 64, 16), (32, 8, 128, 4), (2, 2, 64, 1), (8, 1, 128, 32)],
)
def test_rope_write_equals_reference(dtype, has_norm, num_heads, num_kv_heads, head_dim, page_size):
    qkv, kv_layer, options = rope_case(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        has_norm=has_norm,
        num_tokens=min(5, 4 * page_size),
    )
    expected_kv = kv_layer.clone()
    expected = reference.rope_write(qkv, expected_kv, **options)
    got = rope_write(qkv, kv_layer, **options)
    torch.testing.assert_close(got, expected, **CLOSE[dtype])
    # NaN everywhere but at the slots
    torch.testing.assert_close(kv_layer, expected_kv, equal_nan=True, **CLOSE[dtype])
    values = kv_layer[:, 1].flatten(0, 1)[options["slots"]]
    assert torch.equal(values, qkv[:, num_heads + num_kv_heads :])


def test_rope_write_refuses_what_does_not_fit():
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 4, "has_norm": False}
    qkv, kv_layer, options = rope_case(dtype=torch.float32, **shape)
    with pytest.raises(ValueError, match=r"slots must be torch.int64, got torch.int32"):
        rope_write(qkv, kv_layer, **{**options, "slots": options["slots"].int()})
    with pytest.raises(ValueError, match=r"rotation must have shape \[any, 64\], got \[50, 32\]"):
        rope_write(qkv, kv_layer, **{**options, "rotation": options["rotation"][:, :32].contiguous()})
    with pytest.raises(ValueError, match="multiple of 2 query heads, got 3"):
        rope_write(qkv[:, :-1], kv_layer, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [1, 576, 1024])
@pytest.mark.parametrize("has_residual", [False, True])
def test_add_norm_equals_reference(dtype, num_columns, has_residual):
    x, weight = random(3, num_columns, dtype=dtype), random(num_columns, dtype=dtype, seed=1)
    residual = random(3, num_columns, dtype=dtype, seed=2) if has_residual else None
    expected_residual = residual.clone() if has_residual else None
    expected = reference.add_norm(x, expected_residual, weight=weight, epsilon=1e-5)
    before = x.clone()
    got = add_norm(x, residual, weight=weight, epsilon=1e-5)
    torch.testing.assert_close(got, expected, **CLOSE[dtype])
    torch.testing.assert_close(residual, expected_residual, **CLOSE[dtype])
    assert torch.equal(x, before)


def test_add_norm_refuses_what_does_not_fit():
    x, weight = random(2, 8), random(8)
    with pytest.raises(ValueError, match=r"residual must have shape \[2, 8\], got \[1, 8\]"):
        add_norm(x, x[:1], weight=weight, epsilon=1e-5)
    with pytest.raises(ValueError, match=r"weight must be torch\.float32, got torch\.float16"):
        add_norm(x, None, weight=weight.half(), epsilon=1e-5)
    with pytest.raises(ValueError, match="x must have from 1 to"):
        add_norm(random(1, MAX_ROW + 1), None, weight=random(MAX_ROW + 1), epsilon=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [1, 1500])
def test_silu_mul_equals_reference(dtype, num_columns):
    gate_up = random(3, 2 * num_columns, dtype=dtype)
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), **CLOSE[dtype])
    with pytest.raises(ValueError, match="even number of columns, got 3"):
        silu_mul(random(2, 3))


def test_silu_mul_of_large_numbers_is_finite():
    gate_up = torch.tensor([[1e4, -1e4, 1.0, 1.0]], device=DEVICE)
    assert silu_mul(gate_up).tolist() == [[1e4, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_pages_copies_all_layers_bit_for_bit(dtype):
    store = random(6, 3, 2, 16, 2, 64, dtype=dtype)
    store[2, 1] = math.nan
    expected = store.clone()
    pairs = [(2, 5), (1, 4), (2, 3)]
    reference.copy_pages(expected, expected, pairs)
    copy_pages(store, store, pairs)
    assert torch.equal(store.view(torch.uint8), expected.view(torch.uint8))
    # between stores a page id may be source and target
    other = torch.zeros_like(store)
    copy_pages(store, other, [(1, 2), (2, 1)])
    assert torch.equal(other[2], store[1])
    assert other[[0, 3, 4, 5]].count_nonzero() == 0
    copy_pages(store, store, [])


def test_copy_pages_refuses_pairs_whose_order_matters():
    store = torch.zeros(4, 8, device=DEVICE)
    for pairs, message in (
        ([(1, 2), (2, 3)], "must not read a page that they write, got source 2"),
        ([(1, 3), (2, 3)], "distinct target pages"),
        ([(1, 4)], r"pages below 4 and 4, got \(1, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_pages(store, store, pairs)
    with pytest.raises(ValueError, match="multiple of 16 bytes, got 12"):
        copy_pages(torch.zeros(4, 3, device=DEVICE), torch.zeros(4, 3, device=DEVICE), [])
    with pytest.raises(ValueError, match=r"target must have pages of \[8\]"):
        copy_pages(store, store[:, :4], [])
