"""C++ paged attention against the torch reference: every variant, and nothing but the own tokens matters, to the bit."""

import itertools
import math

import pytest
import torch
from radixrt_kernels.cpu import CpuAttention, load_library
from radixrt_kernels.reference import paged_attention, write_kv

from radixrt.config import home_folder
from tests.support.variants import WIDENING_NAMES


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def attention(native_library):
    return CpuAttention(native_library, num_threads=2)


class Case:
    """A batch over scattered pages; every slot that no sequence owns holds NaN.

    Args:
        counts: (new, context) of each sequence.
        num_shared: leading positions that all sequences have in the same pages, a multiple of page_size.
    """

    def __init__(self, counts, *, page_size, num_shared=0, heads=(2, 2), head_dim=16, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        self.counts = counts
        num_kv_heads, num_group_heads = heads
        needed = [-(-context // page_size) for _, context in counts]
        order = (1 + torch.randperm(sum(needed), generator=generator)).tolist()
        shape = (sum(needed) + 1, 3, 2, page_size, num_kv_heads, head_dim)
        self.kv_layer = torch.full(shape, math.nan, dtype=dtype)[:, 1]
        self.page_table = torch.zeros(len(counts), max(needed) + 1, dtype=torch.int32)
        shared = [order.pop() for _ in range(num_shared // page_size)]
        for b, ((_, context), num_pages) in enumerate(zip(counts, needed, strict=True)):
            pages = shared[:num_pages] + [order.pop() for _ in range(num_pages - len(shared))]
            self.page_table[b, :num_pages] = torch.tensor(pages)
            k, v = torch.randn(2, context, num_kv_heads, head_dim, generator=generator).to(dtype)
            slots = torch.tensor([pages[i // page_size] * page_size + i % page_size for i in range(context)])
            write_kv(k, v, self.kv_layer, slots)
        num_rows = sum(new for new, _ in counts)
        self.q = torch.randn(num_rows, num_kv_heads * num_group_heads, head_dim, generator=generator).to(
            dtype
        )

    def run(self, attend, *, rows=None, **options):
        """Attend for all sequences, or for those with the indices `rows`."""
        chosen = range(len(self.counts)) if rows is None else rows
        starts = [0, *itertools.accumulate(new for new, _ in self.counts)]
        return attend(
            torch.cat([self.q[starts[b] : starts[b + 1]] for b in chosen]),
            self.kv_layer,
            page_table=self.page_table[list(chosen)],
            num_query_tokens=tuple(self.counts[b][0] for b in chosen),
            num_context_tokens=tuple(self.counts[b][1] for b in chosen),
            scale=self.q.shape[-1] ** -0.5,
            **options,
        )


def ragged_counts(page_size):
    """Give (new, context): decodes, runs and chunks around the borders of a page and of a block of 64 keys."""
    lengths = {1, max(1, page_size - 1), page_size, page_size + 1, 63, 64, 65, 130}
    decodes = [(1, context) for context in sorted(lengths)]
    runs = [(3, 66), (7, 64), (2, 129)]
    chunks = [(70, 70), (40, 100), (64, 128), (33, 34)]
    return [*decodes, *runs, *chunks]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 3), 64), ((1, 4), 32), ((3, 1), 16), ((1, 8), 128), ((2, 2), 24)]
)
def test_ragged_batch_equals_reference(attention, page_size, heads, head_dim):
    case = Case(ragged_counts(page_size), page_size=page_size, heads=heads, head_dim=head_dim)
    # float32 sums of at most 130 terms of order 1
    torch.testing.assert_close(case.run(attention), case.run(paged_attention), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [1, 5, 64, 100, 1000])
@pytest.mark.parametrize(("heads", "head_dim"), [((2, 2), 16), ((2, 3), 64), ((2, 7), 64)])
def test_sliding_window_equals_reference(attention, sliding_window, heads, head_dim):
    case = Case(ragged_counts(4), page_size=4, heads=heads, head_dim=head_dim)
    options = {"sliding_window": sliding_window}
    torch.testing.assert_close(
        case.run(attention, **options), case.run(paged_attention, **options), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"),
    # whole panels or not, one or two of them, few rows and many
    [((2, 3), 64, 1), ((2, 3), 64, 4), ((2, 3), 64, 16), ((3, 1), 48, 16), ((1, 4), 96, 16), ((2, 7), 32, 4)],
)
def test_bfloat16_is_as_near_to_float64_as_the_reference(attention, heads, head_dim, page_size):
    case = Case(
        ragged_counts(page_size), page_size=page_size, heads=heads, head_dim=head_dim, dtype=torch.bfloat16
    )
    found, theirs = case.run(attention).double(), case.run(paged_attention).double()
    case.kv_layer, case.q = case.kv_layer.double(), case.q.double()
    expected = case.run(paged_attention)
    error, their_error = ((x - expected).square().mean().sqrt() for x in (found, theirs))
    assert error < 1.1 * their_error


@pytest.mark.parametrize("lead", [0.0, 2.0, 5.0, 7.5, 9.0])  # in powers of two
def test_bfloat16_is_as_near_to_float64_where_one_key_leads(attention, lead):
    """As in heads that copy: a key of a later block has by far the largest weight, which must not be rounded."""
    generator, length, scale = torch.Generator().manual_seed(0), 320, 64**-0.5
    counts = [(1, length)] * 16
    case = Case(counts, page_size=16, heads=(2, 1), head_dim=64, dtype=torch.bfloat16)
    for b in range(len(counts)):
        pages = case.page_table[b, : length // 16].long()
        keys = case.kv_layer[pages, 0].flatten(0, 1).double()  # [length, G, D]
        q = case.q[b].double()  # [G, D]: a head of queries for each of keys
        scores = (keys * q).sum(-1) * scale
        wanted = torch.randn(length, 2, generator=generator, dtype=torch.float64) / math.log2(math.e)
        wanted[200] = wanted[:64].amax(0) + lead / math.log2(math.e)
        keys += ((wanted - scores) / scale)[..., None] * q / (q * q).sum(-1, keepdim=True)
        case.kv_layer[pages, 0] = keys.to(torch.bfloat16).view(len(pages), 16, 2, 64)
    found, theirs = case.run(attention).double(), case.run(paged_attention).double()
    case.kv_layer, case.q = case.kv_layer.double(), case.q.double()
    expected = case.run(paged_attention)
    error, their_error = ((x - expected).square().mean().sqrt() for x in (found, theirs))
    assert error < 1.1 * their_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    # up to eight rows may be read straight from the pages, in one pass or in two
    [((2, 3), 64), ((3, 1), 48), ((1, 4), 96), ((2, 5), 64), ((2, 7), 32), ((1, 8), 128), ((2, 2), 24)],
)
def test_company_changes_no_bit(attention, dtype, heads, head_dim):
    case = Case(ragged_counts(4), page_size=4, heads=heads, head_dim=head_dim, dtype=dtype)
    batched = torch.split(case.run(attention), [new for new, _ in case.counts])
    for b, together in enumerate(batched):
        assert torch.equal(together, case.run(attention, rows=[b]))


@pytest.fixture(params=WIDENING_NAMES or ["avx512_fp16"])
def widening(request):
    """Give attention that widens bfloat16 to floats, and attention that does not, of the same vectors."""
    if not WIDENING_NAMES:
        pytest.skip("the CPU has no AVX512-FP16")
    folder = home_folder() / "build"
    return [
        CpuAttention(load_library(folder, variant=name), num_threads=1) for name in (request.param, "avx512")
    ]


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 3), 64), ((3, 1), 48), ((1, 4), 96), ((2, 7), 32), ((1, 8), 128)]
)
def test_widened_bfloat16_is_nearer_to_float64_than_pairs(widening, heads, head_dim):
    case = Case(ragged_counts(16), page_size=16, heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    found, theirs = (case.run(attend).double() for attend in widening)
    assert not torch.equal(found, theirs)  # weights are not rounded
    case.kv_layer, case.q = case.kv_layer.double(), case.q.double()
    expected = case.run(paged_attention)
    error, their_error = ((x - expected).square().mean().sqrt() for x in (found, theirs))
    assert error <= their_error


@pytest.mark.parametrize("value_scale", [1e-30, 1e5, 1e36])
@pytest.mark.parametrize("key_scale", [1e-3, 1.0, 300.0])
def test_keys_and_values_may_be_anything_finite(attention, key_scale, value_scale):
    """As in models whose keys have biases of several hundred: nothing overflows, and scores keep their bits."""
    case = Case(ragged_counts(4), page_size=4, heads=(2, 3), head_dim=64, dtype=torch.bfloat16)
    keys, values = case.kv_layer[:, 0], case.kv_layer[:, 1]
    keys[..., :2] += 1.0  # two dimensions with a bias, whose products take each other away in most scores
    case.q[..., 1] = -case.q[..., 0]
    keys *= key_scale
    values *= value_scale
    found = case.run(attention).double()
    for b, together in enumerate(torch.split(found, [new for new, _ in case.counts])):
        assert torch.equal(together, case.run(attention, rows=[b]).double())
    case.kv_layer, case.q = case.kv_layer.double(), case.q.double()
    expected = case.run(paged_attention)
    # weights and results may be rounded to bfloat16; values of order 1, at most 5 or so
    torch.testing.assert_close(found / value_scale, expected / value_scale, atol=2e-2, rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_shared", "page_size"), [(128, 16), (132, 4), (321, 1), (64, 16)])
@pytest.mark.parametrize("heads", [(2, 3), (1, 7)])
def test_reading_a_shared_prefix_once_changes_no_bit(attention, dtype, num_shared, page_size, heads):
    contexts = [num_shared + extra for extra in (1, 5, 64, 65, 200, 17, 18, 19, 20, 21, 22, 23)]
    counts = [(1 + b % 3, context + 2) for b, context in enumerate(contexts)]
    case = Case(counts, page_size=page_size, num_shared=num_shared, heads=heads, head_dim=64, dtype=dtype)
    batched = torch.split(case.run(attention), [new for new, _ in counts])
    for b, together in enumerate(batched):
        assert torch.equal(together, case.run(attention, rows=[b]))
    if dtype == torch.float32:
        torch.testing.assert_close(torch.cat(batched), case.run(paged_attention), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "growth", [-50.0, -3.0, 0.5, 3.0, 7.9, 8.1, 50.0]
)  # from block to block, in powers of two
def test_largest_scores_may_grow_or_fall_by_any_step(attention, dtype, growth):
    counts = [(1, 330), (4, 330), (330, 330)]  # few rows and many
    case = Case(counts, page_size=16, heads=(2, 3), head_dim=64, dtype=dtype)
    case.q.fill_(1.0)
    steps = (
        torch.arange(330) // 64 * growth / (64**0.5 * math.log2(math.e))
    )  # every element of a key has this much
    for b in range(len(counts)):
        pages = case.page_table[b, : -(-330 // 16)].long()
        keys = case.kv_layer[pages, 0].flatten(0, 1)
        keys[:330] += steps.to(dtype)[:, None, None]
        case.kv_layer[pages, 0] = keys.view(len(pages), 16, *keys.shape[1:])
    found = case.run(attention)
    for b, together in enumerate(torch.split(found, [new for new, _ in counts])):
        assert torch.equal(together, case.run(attention, rows=[b]))
    case.kv_layer, case.q = case.kv_layer.double(), case.q.double()
    # scores of up to 250 in float32, and weights and results rounded to bfloat16
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.double(), case.run(paged_attention), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((3, 3), 64), ((9, 1), 64), ((2, 7), 64), ((3, 5), 128)]
)  # a turn fits the first cache or not, in one pass or in two
def test_a_block_of_any_length_has_the_bits_that_it_has_in_a_whole_context(
    attention, dtype, page_size, heads, head_dim
):
    # a block's positions are taken in turns of four from each quarter: cut it around all borders
    lengths = [
        *range(1, 9),
        *(border + step for border in (12, 16, 20, 32, 48, 64) for step in (-1, 0, 1, 2)),
        116,
    ]
    case = Case([(116, 116)], page_size=page_size, heads=heads, head_dim=head_dim, dtype=dtype)
    whole = case.run(attention)
    if dtype == torch.float32:
        torch.testing.assert_close(whole, case.run(paged_attention), atol=1e-5, rtol=1e-5)
    for length in lengths:
        alone = attention(
            case.q[length - 1 : length],
            case.kv_layer,
            page_table=case.page_table,
            num_query_tokens=(1,),
            num_context_tokens=(length,),
            scale=head_dim**-0.5,
        )
        assert torch.equal(alone[0], whole[length - 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_groups_on_one_thread_change_no_bit(native_library, dtype):
    # 40 sequences of 3 rows: one group of 96 rows and one of the rest, and on 7 threads groups of 24
    counts = [(1, 192 + 1 + 5 * b) for b in range(40)]
    case = Case(counts, page_size=16, num_shared=192, heads=(1, 3), head_dim=64, dtype=dtype)
    one, many = (case.run(CpuAttention(native_library, num_threads=count)) for count in (1, 7))
    assert torch.equal(one, many)
    alone = CpuAttention(native_library, num_threads=1)
    for b in range(0, 40, 3):
        assert torch.equal(case.run(alone, rows=[b]), one[b : b + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_one_call_have_the_bits_of_calls_of_their_own(attention, dtype):
    case = Case([(1, 300), (3, 66), (70, 70)], page_size=4, heads=(2, 3), head_dim=64, dtype=dtype)
    options = {
        "page_table": case.page_table,
        "num_query_tokens": (1, 3, 70),
        "num_context_tokens": (300, 66, 70),
        "scale": 64**-0.5,
    }
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(len(case.kv_layer), 5, *case.kv_layer.shape[1:], generator=generator).to(dtype)
    for kv in (pool, pool[:, ::2]):  # layers side by side or not
        q = torch.randn(kv.shape[1], *case.q.shape, generator=generator).to(dtype)
        together = attention.attend_layers(q, kv, **options)
        for i in range(kv.shape[1]):
            assert torch.equal(together[i], attention(q[i], kv[:, i], **options))


@pytest.mark.parametrize(
    "counts",
    [[(1, 300)], [(1, 300)] * 5, [(1, 1000), (1, 70), (1, 3)], [*ragged_counts(16), *[(1, 300)] * 20]],
    ids=["one", "few", "unequal", "many"],  # heads together in an item or apart
)
def test_threads_change_no_bit(native_library, counts):
    case = Case(counts, page_size=16, heads=(2, 3), head_dim=64)
    results = [case.run(CpuAttention(native_library, num_threads=count)) for count in (1, 2, 5)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_chunks_change_no_bit(attention):
    case = Case([(150, 150)], page_size=4, heads=(2, 3), head_dim=64)
    whole = case.run(attention)
    for cuts in ([0, 1, 150], [0, 64, 100, 149, 150], [*range(151)]):
        parts = [
            attention(
                case.q[start:stop],
                case.kv_layer,
                page_table=case.page_table,
                num_query_tokens=(stop - start,),
                num_context_tokens=(stop,),
                scale=64**-0.5,
            )
            for start, stop in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_unreferenced_memory_changes_nothing(attention):
    case = Case(ragged_counts(4), page_size=4)
    with_nan = case.run(attention)
    case.kv_layer.nan_to_num_(nan=7.0)
    assert torch.isfinite(with_nan).all()
    assert torch.equal(with_nan, case.run(attention))


def test_bad_arguments_are_refused(attention):
    case = Case([(1, 9)], page_size=4)
    case.page_table[0, 1] = 100
    with pytest.raises(ValueError, match="page_table must name pages"):
        case.run(attention)
    case.page_table[0, 1] = 1
    case.counts = [(1, 100)]
    with pytest.raises(ValueError, match="1 <= new tokens <= context"):
        case.run(attention)
    case.counts, case.q = [(1, 9)], case.q.double()
    with pytest.raises(ValueError, match="kv must be pages of contiguous"):
        case.run(attention)


def test_what_would_lead_outside_the_pages_is_refused(attention):
    case = Case([(1, 9)], page_size=4)
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got -3"):
        case.run(attention, sliding_window=-3)
    whole = case.kv_layer
    for part in (whole[:, :1], whole[:0], whole[..., :0, :], whole[..., :0]):
        case.kv_layer = part
        with pytest.raises(ValueError, match="kv must be"):
            case.run(attention)
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        CpuAttention(attention.library, num_threads=0)
