"""What is left open is chosen from the machine."""

import pytest
import torch

from radixrt import EngineConfig, InvalidRequest
from radixrt.exec.resolve import resolve
from radixrt.model.spec import ModelSpec
from radixrt.model.weights import read_weights
from tests.support.models import tiny_model


@pytest.fixture
def card(monkeypatch):
    """Let there be a CUDA device with so many free bytes; give a way to set them."""
    free = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 40))
    return lambda num_bytes: free.__setitem__(0, num_bytes)


def test_pages_on_a_card_leave_room_for_the_weights(tmp_path, card):
    folder = tiny_model("llama", tmp_path)
    spec = ModelSpec.load(folder)
    weights = read_weights(folder, spec, device=torch.device("cpu"), dtype=torch.float32)
    matrices = [weights.embedding, weights.head]
    for layer in weights.layers:
        matrices += [item.weight for item in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert spec.num_weights == sum(matrix.numel() for matrix in matrices)
    options = {"folder": folder, "spec": spec, "num_tokenizer_ids": 300}
    card(2 * spec.num_weights + 1_000_000)
    config = resolve(EngineConfig(), **options)
    assert config.dtype == torch.bfloat16
    assert config.num_pages == 800_000 // config.layout.num_page_bytes
    card(2 * spec.num_weights)
    with pytest.raises(InvalidRequest, match=f"weights need {2 * spec.num_weights} bytes, the device has"):
        resolve(EngineConfig(), **options)


def test_a_tied_head_counts_once(tmp_path):
    tied = ModelSpec.load(tiny_model("llama", tmp_path / "tied", tie_word_embeddings=True))
    own = ModelSpec.load(tiny_model("llama", tmp_path / "own"))
    assert own.num_weights - tied.num_weights == own.vocab_size * own.hidden_size
