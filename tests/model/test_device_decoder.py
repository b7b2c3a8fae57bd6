"""The device decoder on Triton's kernels against the torch decoder: on a GPU, else in the interpreter."""

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
from tests.support.models import tiny_model
from tests.support.paged import DEVICE, as_ints

# The interpreter computes with numpy, which warns of what kernels meet on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
PAGE_SIZE = 4


def step(news, contexts):
    """Give inputs of one step; every sequence starts with the same page and goes on in pages of its own."""
    page_table = torch.zeros(len(contexts), max(-(-c // PAGE_SIZE) for c in contexts), dtype=torch.int32)
    for b, context in enumerate(contexts):
        num_own = -(-context // PAGE_SIZE) - 1
        page_table[b, 0] = 1
        page_table[b, 1 : 1 + num_own] = torch.arange(num_own) + 2 + 10 * b
    positions = torch.cat([torch.arange(c - n, c) for n, c in zip(news, contexts, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(news)), torch.tensor(news))
    slots = page_table[owner, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    starts = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32)
    return BatchInputs(
        token_ids=(positions * 7 + 3 * (positions >= PAGE_SIZE) * owner).to(DEVICE) % 300,
        positions=positions.to(DEVICE),
        slots=slots.to(DEVICE),
        page_table=page_table.to(DEVICE),
        query_start=starts.to(DEVICE),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        sample_rows=(starts[1:].long() - 1).to(DEVICE),
        num_query_tokens=tuple(news),
        num_context_tokens=tuple(contexts),
    )


def on_device(inputs, planner):
    plans = planner.plan(as_ints(inputs.page_table), inputs.num_query_tokens, inputs.num_context_tokens)
    plans = tuple(plan.to_device(inputs.page_table) for plan in plans)
    return DeviceInputs(inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_rows, plans)


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
    table = as_ints(step([3], [6]).page_table)
    [short] = planner.plan(table, (3,), (6,))
    [long] = planner.plan(table, (3,), (8,))
    [decode] = planner.plan(table, (1,), (6,))
    assert short.extend.sliding_window is None
    assert long.extend.sliding_window is None
    assert decode.decode.has_window
    table = as_ints(step([3], [9]).page_table)
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
        assert not caplog.records
    else:
        assert refusals(spec, page_size=page_size) == [reason]
        assert isinstance(decoder, Decoder)
        assert f"{reason}; the slower torch decoder" in caplog.text
        assert len(caplog.records) == 1
    assert isinstance(device_decoder(spec, weights, device=torch.device("mps"), **sizes), Decoder)
