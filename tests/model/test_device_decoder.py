"""The device decoder on Triton's kernels against the torch decoder: on a GPU, else in the interpreter."""

import itertools
from array import array

import pytest
import torch

from radixrt.kv.store import KVStore
from radixrt.model.attention import TorchAttention
from radixrt.model.decoder import Decoder
from radixrt.model.device_decoder import DeviceDecoder, DeviceInputs
from radixrt.model.device_kernels import AttentionPlanner, refusals
from radixrt.model.inputs import BatchInputs
from radixrt.model.loader import device_decoder
from radixrt.model.spec import ModelSpec
from radixrt.model.weights import read_weights
from tests.support.logs import own_records
from tests.support.models import tiny_model
from tests.support.paged import DEVICE, as_ints

# The interpreter computes with numpy, which warns of what kernels meet on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
PAGE_SIZE = 4


def step(news, contexts):
    """Give inputs of one step; every sequence starts with the same page and goes on in pages of its own."""
    width = max(-(-context // PAGE_SIZE) for context in contexts)
    table = []
    for b, context in enumerate(contexts):
        own = [page + 2 + 10 * b for page in range(-(-context // PAGE_SIZE) - 1)]
        table.append([1, *own] + [0] * (width - 1 - len(own)))
    places = [(b, i) for b, (n, c) in enumerate(zip(news, contexts, strict=True)) for i in range(c - n, c)]
    ends = list(itertools.accumulate(news, initial=0))
    return BatchInputs(
        token_ids=array("q", [(i * 7 + 3 * (i >= PAGE_SIZE) * b) % 300 for b, i in places]),
        positions=array("q", [i for _, i in places]),
        slots=array("q", [table[b][i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for b, i in places]),
        page_table=array("i", itertools.chain(*table)),
        query_start=array("i", ends),
        context_lens=array("i", contexts),
        sample_rows=array("q", [end - 1 for end in ends[1:]]),
    )


def on_device(inputs, planner):
    batch = inputs.to(DEVICE)
    plans = planner.plan(as_ints(batch.page_table), batch.num_query_tokens, batch.num_context_tokens)
    plans = tuple(plan.to_device(batch.page_table) for plan in plans)
    return DeviceInputs(batch.token_ids, batch.positions, batch.slots, batch.sample_rows, plans)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_equal_those_of_the_torch_decoder(kind, tmp_path):
    folder = tiny_model(
        kind, tmp_path, head_dim=64, hidden_size=96, num_attention_heads=3, num_key_value_heads=1
    )
    spec = ModelSpec.load(folder)
    weights = read_weights(folder, spec, device=DEVICE, dtype=torch.float32)
    steps = (step([4, 9], [4, 13]), step([7, 1], [11, 14]), step([1, 1], [12, 15]))
    layout = spec.kv_layout(page_size=PAGE_SIZE, dtype=torch.float32)
    stores = [KVStore(layout, num_pages=40, device=DEVICE) for _ in range(2)]
    for store in stores:
        store.data.fill_(float("nan"))
    decoder = Decoder(spec, weights, TorchAttention())
    device_decoder = DeviceDecoder(spec, weights, max_context=20)
    planner = AttentionPlanner(spec, PAGE_SIZE, torch.float32)
    for inputs in steps:
        expected = decoder.forward(inputs, stores[0])
        with torch.inference_mode():
            got = device_decoder.forward(on_device(inputs, planner), stores[1])
        # float32 sums in another order, on logits of order 10
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stores[1].data, stores[0].data, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_a_window_that_hides_nothing_is_left_out_of_prefills_only(tmp_path):
    spec = ModelSpec.load(tiny_model("mistral", tmp_path, head_dim=64))  # a window of 8
    planner = AttentionPlanner(spec, PAGE_SIZE, torch.float32)
    table = as_ints(step([3], [6]).to(DEVICE).page_table)
    [short] = planner.plan(table, (3,), (6,))
    [long] = planner.plan(table, (3,), (8,))
    [decode] = planner.plan(table, (1,), (6,))
    assert short.extend.sliding_window is None
    assert long.extend.sliding_window is None
    assert decode.decode.has_window
    table = as_ints(step([3], [9]).to(DEVICE).page_table)
    [longer] = planner.plan(table, (3,), (9,))
    assert longer.extend.sliding_window == 8


@pytest.mark.parametrize(
    ("options", "page_size", "reason"),
    [
        ({}, 16, "head dimension must be one of (64, 128), got 16"),
        ({"head_dim": 64}, 12, "page_size must be a power of two, got 12"),
        (
            {"head_dim": 64, "hidden_size": 34, "num_attention_heads": 17, "num_key_value_heads": 1},
            16,
            "query heads per kv head must be from 1 to 16, got 17",
        ),
        ({"head_dim": 64}, 16, None),
    ],
)
def test_cuda_gets_triton_where_kernels_take_the_model_else_torch_with_one_warning(
    tmp_path, caplog, options, page_size, reason
):
    spec = ModelSpec.load(folder := tiny_model("llama", tmp_path, **options))
    weights = read_weights(folder, spec, device=DEVICE, dtype=torch.float32)
    cuda, sizes = torch.device("cuda"), {"page_size": page_size, "max_context": 64}
    decoder = device_decoder(spec, weights, device=cuda, **sizes)
    if reason is None:
        assert isinstance(decoder, DeviceDecoder)
        assert not own_records(caplog)
    else:
        assert refusals(spec, page_size=page_size) == [reason]
        assert isinstance(decoder, Decoder)
        assert f"{reason}; the slower torch decoder" in caplog.text
        assert len(own_records(caplog)) == 1
    assert isinstance(device_decoder(spec, weights, device=torch.device("mps"), **sizes), Decoder)
