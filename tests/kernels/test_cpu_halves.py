"""Products of bfloat16 weights in float16 (AVX512-FP16): against float64, at the ends of the range, and to the bit."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from radixrt_kernels.cpu.build import COMPILER, FLAGS, LINK_FLAGS, SOURCE_FOLDER

from tests.support.variants import CPU_FLAGS, VARIANTS_BY_NAME

HERE = Path(__file__).parent
REAL, EMULATED = VARIANTS_BY_NAME["avx512_fp16"], VARIANTS_BY_NAME["fp16_emulated"]
HERE_VARIANTS = [variant for variant in (REAL, EMULATED) if variant.needs <= CPU_FLAGS]
PANEL = 32
POINTER, INT64, INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
# Rounding of a float16, relative to the number.
ROUNDING = 2.0**-11
# A run has this many products.
RUN = 24

pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler"),
    pytest.mark.skipif(not HERE_VARIANTS, reason="the CPU lacks AVX-512"),
]


class Products:
    def __init__(self, path):
        self.functions = ctypes.CDLL(str(path))
        self.functions.multiply.argtypes = (POINTER, INT64, INT64, POINTER, INT64, INT32, INT32, POINTER)

    def __call__(self, rows, weight, *, is_paired=False, num_threads=1):
        """Give rows [R, I] times weight [O, I] transposed, both taken as bfloat16."""
        rows, weight = rows.to(torch.bfloat16).contiguous(), weight.to(torch.bfloat16).contiguous()
        width = (len(weight) + PANEL - 1) // PANEL * PANEL
        found = torch.full((len(rows), width), torch.nan)
        sizes = (*rows.shape, weight.data_ptr(), len(weight), is_paired, num_threads)
        self.functions.multiply(rows.data_ptr(), *sizes, found.data_ptr())
        return found[:, : len(weight)]


def compile_products(variant, folder):
    target = folder / f"{variant.name}.so"
    flags = (*FLAGS, *variant.flags, *LINK_FLAGS, f"-I{SOURCE_FOLDER}")
    subprocess.run(
        [COMPILER, *flags, str(HERE / "half_product.cpp"), "-o", str(target)], check=True, capture_output=True
    )
    return Products(target)


@pytest.fixture(scope="module")
def all_products(tmp_path_factory):
    folder = tmp_path_factory.mktemp("halves")
    return {variant.name: compile_products(variant, folder) for variant in HERE_VARIANTS}


@pytest.fixture(params=[variant.name for variant in HERE_VARIANTS])
def products(request, all_products):
    return all_products[request.param]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def exact(rows, weight):
    return rows.double() @ weight.double().T


def magnitudes(rows, weight):
    """Give the sums of the products' absolute values: what a bound on roundings is relative to."""
    return rows.double().abs() @ weight.double().abs().T


# One input pair, below, at and past a run and what is added in float16, many.
INPUTS = [2, 46, 48, 50, 190, 192, 194, 576, 1536]


@pytest.mark.parametrize("num_inputs", INPUTS)
@pytest.mark.parametrize("num_rows", [1, 5, 12, 13, 26])
def test_no_error_passes_the_bound_of_its_roundings(products, num_rows, num_inputs):
    rows, weight = random(num_rows, num_inputs), random(70, num_inputs, seed=1)
    # Each partial sum rounds once, runs are added in two steps more; the rest is float32.
    limit = (RUN + 3) * ROUNDING * magnitudes(rows, weight)
    assert ((products(rows, weight).double() - exact(rows, weight)).abs() <= limit).all()


def test_errors_are_of_the_size_of_bfloat16_inputs(products):
    rows = torch.randn(24, 576, generator=torch.Generator().manual_seed(3))
    weight = random(96, 576, seed=1)
    known = rows.double() @ weight.double().T
    narrow = exact(rows.to(torch.bfloat16), weight)
    of_inputs = (narrow - known).square().mean().sqrt()
    of_products = (products(rows, weight).double() - narrow).square().mean().sqrt()
    assert of_products < of_inputs


@pytest.mark.parametrize("num_inputs", INPUTS)
def test_what_float16_holds_is_exact(products, num_inputs):
    """Whole numbers with small sums, times a power of two of each row and of each output."""
    generator = torch.Generator().manual_seed(5)

    def some(count, seed):
        whole = torch.randint(-2, 3, (count, num_inputs), generator=generator).float()
        # Sums of both signs stay small.
        whole[:, 1::2] = -whole[:, ::2]
        scale = torch.randint(-60, 60, (count, 1), generator=torch.Generator().manual_seed(seed))
        return torch.ldexp(whole, scale)

    rows, weight = some(9, 6), some(40, 7)
    rows[:, 1::2] = rows[:, ::2]
    assert torch.equal(products(rows, weight).double(), exact(rows, weight))


@pytest.mark.parametrize("row_exponent", [-100, -60, 0, 60, 100])
@pytest.mark.parametrize("weight_exponent", [-100, -20, 0, 20, 124])
def test_no_size_of_rows_or_weights_costs_precision(products, row_exponent, weight_exponent):
    rows, weight = random(4, 192), random(33, 192, seed=1)
    scaled = products(
        torch.ldexp(rows, torch.tensor(row_exponent)), torch.ldexp(weight, torch.tensor(weight_exponent))
    )
    whole = products(rows, weight)
    known = torch.ldexp(whole.double(), torch.tensor(row_exponent + weight_exponent)).float()
    # Where the units pass the range on the way, the result may still be a number: they are applied together.
    is_normal = (known.abs() > 2.0**-126) & known.isfinite()
    assert torch.equal(scaled[is_normal], known[is_normal])
    assert scaled[known.isinf()].isinf().all()


@pytest.mark.parametrize("exponent", [-120, -126, -133])
def test_the_least_numbers_count(products, exponent):
    """Down to the last bit of bfloat16, though the inverse of their largest is no number."""
    small = torch.ldexp(torch.tensor([[1.0, 2.0, -3.0, 0.0], [0.0, 1.0, 1.0, 0.0]]), torch.tensor(exponent))
    large = torch.ldexp(torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]]), torch.tensor(100))
    for rows, weight in [(small, large), (large, small)]:
        assert torch.equal(products(rows, weight).double(), exact(rows, weight))


@pytest.mark.parametrize("value", [15.9375, 1.0, 1e-30, 3e38])
def test_sums_of_the_largest_products_do_not_overflow(products, value):
    rows = torch.full((2, 4096), value, dtype=torch.bfloat16)
    weight = torch.full((32, 4096), 15.9375 if value < 1e30 else 1e-30, dtype=torch.bfloat16)
    weight[1] = -weight[1]
    torch.testing.assert_close(products(rows, weight).double(), exact(rows, weight), rtol=2e-2, atol=0)


def test_small_elements_beside_a_large_one_keep_what_float16_can_hold(products):
    """A row's least element is 2^-17 of its largest: both count to bfloat16's precision."""
    rows = torch.zeros(1, 64, dtype=torch.bfloat16)
    rows[0, 0], rows[0, 33] = 1.0, 1.0078125 * 2.0**-17
    weight = torch.zeros(2, 64, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 33] = 1.0, 1.0
    assert products(rows, weight)[0].tolist() == [1.0, 1.0078125 * 2.0**-17]


def test_rows_are_the_same_alone_and_together_whatever_the_threads(products):
    rows, weight = random(700, 576), random(70, 576, seed=1)
    together = products(rows, weight)
    assert torch.equal(products(rows, weight, num_threads=3), together)
    for first, stop in [(0, 1), (5, 8), (11, 23), (100, 137), (699, 700)]:
        assert torch.equal(products(rows[first:stop], weight), together[first:stop])


def test_paired_weights_lie_side_by_side(products):
    rows, weight = random(3, 64), random(64, 64, seed=1)
    whole = products(rows, weight)
    order = torch.tensor([half * 32 + p * 16 + i for p in range(2) for half in range(2) for i in range(16)])
    assert torch.equal(products(rows, weight, is_paired=True), whole[:, order])


def test_zeros_give_zeros(products):
    rows, weight = random(3, 50), random(33, 50, seed=1)
    rows[1] = 0
    weight[5] = 0
    found = products(rows, weight)
    assert found[1].eq(0).all()
    assert found[:, 5].eq(0).all()
    assert found[0, :5].ne(0).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_stays_in_its_row(products, value):
    rows, weight = random(14, 100), random(33, 100, seed=1)
    known = products(rows, weight)
    rows[4, 77] = value
    found = products(rows, weight)
    assert not found[4].isfinite().any()
    assert torch.equal(found[torch.arange(14) != 4], known[torch.arange(14) != 4])
    rows[4, 77] = 1
    weight[7, 3] = value
    found = products(rows, weight)
    assert not found[:, 7].isfinite().any()
    assert torch.equal(found[:4, torch.arange(33) != 7], known[:4, torch.arange(33) != 7])


@pytest.mark.skipif(len(HERE_VARIANTS) < 2, reason="the CPU lacks AVX512-FP16")
@pytest.mark.parametrize("num_inputs", INPUTS)
def test_instructions_and_plain_code_agree_to_the_bit(all_products, num_inputs):
    rows, weight = random(17, num_inputs), random(40, num_inputs, seed=1)
    rows[3] *= 2.0**-30
    assert torch.equal(all_products[REAL.name](rows, weight), all_products[EMULATED.name](rows, weight))
