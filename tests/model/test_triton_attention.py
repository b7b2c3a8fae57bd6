"""The decoder with Triton's attention against the decoder with the reference: a GPU, else the interpreter."""

import pytest
import torch

from radixrt.kv.store import KVStore
from radixrt.model.attention import TorchAttention, TritonAttention
from radixrt.model.decoder import Decoder
from radixrt.model.inputs import BatchInputs
from radixrt.model.loader import device_attention
from radixrt.model.spec import ModelSpec
from radixrt.model.weights import read_weights
from tests.support.models import tiny_model
from tests.support.paged import DEVICE

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


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_logits_equal_those_of_the_reference(kind, tmp_path):
    folder = tiny_model(
        kind, tmp_path, head_dim=64, hidden_size=96, num_attention_heads=3, num_key_value_heads=1
    )
    spec = ModelSpec.load(folder)
    weights = read_weights(folder, spec, device=DEVICE, dtype=torch.float32)
    backends = (TorchAttention(), TritonAttention(spec, dtype=torch.float32))
    logits = []
    for attention in backends:
        decoder = Decoder(spec, weights, attention)
        layout = spec.kv_layout(page_size=PAGE_SIZE, dtype=torch.float32)
        store = KVStore(layout, num_pages=40, device=DEVICE)
        store.data.fill_(float("nan"))
        steps = (step([4, 9], [4, 13]), step([7, 1], [11, 14]), step([1, 1], [12, 15]))
        logits.append([decoder.forward(inputs, store) for inputs in steps])
    for expected, got in zip(*logits, strict=True):
        # float32 sums in another order, on logits of order 10
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_cuda_device_gets_triton_where_the_shape_has_a_kernel(tmp_path, caplog):
    cuda = torch.device("cuda")
    small = ModelSpec.load(tiny_model("llama", tmp_path / "small"))
    large = ModelSpec.load(tiny_model("llama", tmp_path / "large", head_dim=64))
    options = {"device": cuda, "dtype": torch.bfloat16}
    assert isinstance(device_attention(large, **options), TritonAttention)
    assert not caplog.records
    assert isinstance(device_attention(small, **options), TorchAttention)
    assert "head dimension must be one of (64, 128), got 16; the slower torch attention" in caplog.text
    assert isinstance(
        device_attention(large, device=torch.device("mps"), dtype=torch.float32), TorchAttention
    )


def test_a_model_without_a_kernel_is_refused(tmp_path):
    spec = ModelSpec.load(tiny_model("llama", tmp_path))
    with pytest.raises(ValueError, match=r"head dimension must be one of \(64, 128\), got 16"):
        TritonAttention(spec, dtype=torch.float32)
