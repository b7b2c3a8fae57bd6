"""The reference kernels against a loop over tokens in float64."""

import itertools
import math

import pytest
import torch
from radixrt_kernels.reference import paged_attention, plan_attention, write_kv

HEAD_DIM = 8


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def naive(q, keys, values, *, num_new, scale, sliding_window, soft_cap):
    """Attend token by token in float64: q [N, H, D]; keys, values [context, G, D] in order."""
    context, num_kv_heads, _ = keys.shape
    output = torch.zeros_like(q, dtype=torch.float64)
    for i, head in itertools.product(range(num_new), range(q.shape[1])):
        position = context - num_new + i
        first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
        kv_head = head // (q.shape[1] // num_kv_heads)
        scores = keys[first : position + 1, kv_head].double() @ q[i, head].double() * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        output[i, head] = scores.softmax(0) @ values[first : position + 1, kv_head].double()
    return output


class Case:
    """A batch with scattered pages; every slot that no sequence owns holds NaN."""

    def __init__(self, counts, *, page_size, num_kv_heads=2, num_group_heads=2, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.new, self.context = zip(*counts, strict=True)
        needed = [-(-context // page_size) for context in self.context]
        order = (1 + torch.randperm(sum(needed), generator=generator)).tolist()
        # The middle layer of three: the first dimension is strided, as in the KV store.
        shape = (sum(needed) + 1, 3, 2, page_size, num_kv_heads, HEAD_DIM)
        self.kv_layer = torch.full(shape, math.nan, dtype=dtype)[:, 1]
        self.page_table = torch.zeros(len(counts), max(needed) + 1, dtype=torch.int32)
        self.keys, self.values = [], []
        for b, (context, num_pages) in enumerate(zip(self.context, needed, strict=True)):
            pages = [order.pop() for _ in range(num_pages)]
            self.page_table[b, :num_pages] = torch.tensor(pages)
            k, v = torch.randn(2, context, num_kv_heads, HEAD_DIM, generator=generator).to(dtype)
            slots = torch.tensor([pages[i // page_size] * page_size + i % page_size for i in range(context)])
            write_kv(k, v, self.kv_layer, slots)
            self.keys.append(k)
            self.values.append(v)
        num_heads = num_kv_heads * num_group_heads
        self.q = torch.randn(sum(self.new), num_heads, HEAD_DIM, generator=generator).to(dtype)

    def run(self, **options):
        return paged_attention(
            self.q,
            self.kv_layer,
            page_table=self.page_table,
            num_query_tokens=self.new,
            num_context_tokens=self.context,
            scale=HEAD_DIM**-0.5,
            **options,
        )

    def expected(self, *, sliding_window=None, soft_cap=None):
        rows = torch.split(self.q, list(self.new))
        return torch.cat(
            [
                naive(
                    q,
                    keys,
                    values,
                    num_new=len(q),
                    scale=HEAD_DIM**-0.5,
                    sliding_window=sliding_window,
                    soft_cap=soft_cap,
                )
                for q, keys, values in zip(rows, self.keys, self.values, strict=True)
            ]
        )


def ragged_counts(page_size):
    """Give (new, context) pairs: decodes, whole prompts, extensions, around the borders of a page."""
    lengths = {1, max(1, page_size - 1), page_size, page_size + 1, 3 * page_size + 2}
    decodes = [(1, context) for context in sorted(lengths)]
    whole = [(context, context) for context in sorted(lengths)]
    extensions = [(2, page_size + 2), (3, 2 * page_size + 1), (2, 5 * page_size + 2), (20, 21 + page_size)]
    return [*decodes, *whole, *extensions]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_group_heads", [1, 2, 4])
def test_ragged_batch_equals_naive_loop(page_size, num_group_heads):
    case = Case(ragged_counts(page_size), page_size=page_size, num_group_heads=num_group_heads)
    # float32 sums of at most 50 terms of order 1
    torch.testing.assert_close(case.run().double(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 5}, {"sliding_window": 1000}])
def test_sliding_window_equals_naive_loop(page_size, options):
    case = Case(ragged_counts(page_size), page_size=page_size)
    torch.testing.assert_close(case.run(**options).double(), case.expected(**options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"soft_cap": 0.5}, {"soft_cap": 2.0, "sliding_window": 6}])
def test_soft_cap_equals_naive_loop(options):
    case = Case(ragged_counts(4), page_size=4)
    torch.testing.assert_close(case.run(**options).double(), case.expected(**options), atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_within_its_rounding():
    case = Case(ragged_counts(4), page_size=4, dtype=torch.bfloat16)
    # 8 bits of mantissa on outputs of order 1
    torch.testing.assert_close(case.run().double(), case.expected(), atol=0.03, rtol=0.03)


def test_batched_equals_alone():
    counts = ragged_counts(4)
    case = Case(counts, page_size=4)
    batched = torch.split(case.run(), [new for new, _ in counts])
    for b, (new, context) in enumerate(counts):
        alone = paged_attention(
            torch.split(case.q, list(case.new))[b],
            case.kv_layer,
            page_table=case.page_table[b : b + 1],
            num_query_tokens=(new,),
            num_context_tokens=(context,),
            scale=HEAD_DIM**-0.5,
        )
        torch.testing.assert_close(batched[b], alone, atol=1e-6, rtol=1e-6)


def test_unreferenced_memory_changes_nothing():
    case = Case(ragged_counts(4), page_size=4)
    with_nan = case.run()
    case.kv_layer.nan_to_num_(nan=7.0)
    assert torch.isfinite(with_nan).all()
    assert torch.equal(with_nan, case.run())


def test_decodes_of_similar_length_form_one_group():
    page_table = torch.zeros(3, 64, dtype=torch.int32)
    groups = plan_attention(
        page_table, num_query_tokens=(1, 1, 1), num_context_tokens=(65, 80, 100), page_size=16
    )
    assert [group.num_sequences for group in groups] == [3]
    groups = plan_attention(
        page_table, num_query_tokens=(1, 1, 1), num_context_tokens=(65, 1000, 100), page_size=16
    )
    assert sorted(group.num_sequences for group in groups) == [1, 2]


def test_window_gathers_only_the_pages_it_sees():
    page_table = torch.arange(1, 65, dtype=torch.int32)[None]
    (group,) = plan_attention(
        page_table, num_query_tokens=(1,), num_context_tokens=(1000,), page_size=16, sliding_window=20
    )
    # the token at 999 sees 980 to 999: pages 61 (976 to 991) and 62
    assert group.page_ids.tolist() == [62, 63]


@pytest.mark.parametrize(
    ("new", "context"), [((0,), (1,)), ((2,), (1,)), ((1,), (9,)), ((1, 1), (1, 1)), ((1,), (1, 1))]
)
def test_counts_that_do_not_fit_are_refused(new, context):
    with pytest.raises(ValueError, match=r"sequence 0 must have|page_table has 1 rows"):
        plan_attention(
            torch.ones(1, 2, dtype=torch.int32), num_query_tokens=new, num_context_tokens=context, page_size=4
        )


def test_write_kv_changes_only_its_slots():
    kv_layer = torch.zeros(4, 2, 2, 1, HEAD_DIM)
    k, v = torch.ones(2, 1, HEAD_DIM), torch.full((2, 1, HEAD_DIM), 2.0)
    write_kv(k, v, kv_layer, torch.tensor([7, 2]))
    assert kv_layer[3, 0, 1].eq(1).all()
    assert kv_layer[1, 1, 0].eq(2).all()
    assert kv_layer.count_nonzero() == 4 * HEAD_DIM
    with pytest.raises(ValueError, match="k must be"):
        write_kv(k.double(), v, kv_layer, torch.tensor([7, 2]))
