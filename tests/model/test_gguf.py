"""GGUF files are converted without loss, or refused."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from radixrt.errors import ModelLoadError
from radixrt.model.gguf_file import convert_gguf
from radixrt.text.tokenizer import Tokenizer
from tests.support.models import tiny_model, write_gguf
from tests.support.tokenizers import byte_tokenizer, sentencepiece_tokenizer

KINDS = ["llama", "qwen2", "qwen3"]


@pytest.fixture
def original(tmp_path):
    """Give a maker of tiny models whose tokenizer has merges."""

    def make(kind, **overrides):
        tokenizer = byte_tokenizer(chat=True, extra=["hello", " 1"])
        return tiny_model(kind, tmp_path / "original", tokenizer=tokenizer, **overrides)

    return make


def convert(folder, tmp_path, **options):
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(write_gguf(folder, tmp_path / "model.gguf", **options), target)
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_float32_file_gives_back_the_same_weights(original, tmp_path, kind):
    folder = original(kind, attention_bias=kind == "llama")
    target = convert(folder, tmp_path)
    expected, found = (load_file(path / "model.safetensors") for path in (folder, target))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == json.loads((folder / "config.json").read_text())["architectures"]


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (gguf.GGMLQuantizationType.F16, torch.float16),
        (gguf.GGMLQuantizationType.BF16, torch.bfloat16),
        (gguf.GGMLQuantizationType.Q8_0, torch.float32),
        (gguf.GGMLQuantizationType.Q4_1, torch.float32),
    ],
)
def test_quantized_matrices_keep_their_values(original, tmp_path, quantization, dtype):
    folder = original("qwen2")
    found = load_file(convert(folder, tmp_path, quantization=quantization) / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        expected = tensor.numpy()
        if expected.ndim == 2:
            assert found[name].dtype == dtype
            packed = gguf.quantize(expected, quantization)
            expected = gguf.dequantize(packed, quantization)
        assert np.array_equal(found[name].float().numpy(), expected)


def test_tokenizer_is_carried_over(original, tmp_path):
    folder = original("llama")
    target = convert(folder, tmp_path)
    before, after = Tokenizer.from_folder(folder), Tokenizer.from_folder(target)
    assert after.vocab_bytes == before.vocab_bytes
    assert (after.bos_id, after.special_ids) == (before.bos_id, before.special_ids)
    assert set(after.eos_ids) == {before.eos_ids[-1]}
    assert after.encode("héllo 12") == [after.bos_id, *before.encode("héllo 12", add_special_tokens=False)]
    assert after.chat is not None


def llama3_factors(head_dim, *, theta, factor, original):
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((original / wavelengths - 1) / 3, 0, 1)
    return 1 / ((1 - blend) / factor + blend)


def test_rotary_divisors_become_the_llama3_formula(original, tmp_path):
    folder = original("llama")
    factors = llama3_factors(16, theta=10000.0, factor=8.0, original=8192)
    config = json.loads((convert(folder, tmp_path, factors=factors) / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "llama3"
    assert config["rope_parameters"]["factor"] == 8.0


def test_linear_rope_scaling_is_carried_over(original, tmp_path):
    folder = original("qwen2")
    fields = {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 4.0}
    config = json.loads((convert(folder, tmp_path, fields=fields) / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": {"general.architecture": "gemma2"}}, "'gemma2' is not supported"),
        ({"fields": {"llama.expert_count": 8}}, "expert_count"),
        ({"fields": {"llama.block_count": None}}, "lacks the fields for"),
        ({"fields": {"llama.rope.dimension_count": 8}}, "must be the head dimension 16"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "'yarn' is not supported"),
        ({"fields": {"tokenizer.ggml.model": "bert"}}, "tokenizer 'bert' is not supported"),
        ({"fields": {"tokenizer.ggml.pre": "unheard-of"}}, "'unheard-of' is not supported"),
        ({"rename": {"token_embd.weight": "other.weight"}}, r"lacks the tensor token_embd\.weight"),
        (
            {"rename": {"blk.0.attn_q.weight": "blk.0.attn_qkv.weight"}},
            r"unsupported tensor blk\.0\.attn_qkv",
        ),
        ({"factors": np.array([1, 1, 2, 3, 4, 5, 6, 8.0])}, "does not follow the Llama 3 formula"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(original, tmp_path, options, message):
    folder = original("llama")
    with pytest.raises(ModelLoadError, match=message):
        convert(folder, tmp_path, **options)


@pytest.mark.parametrize("num_bytes", [0, 3, 100, 30_000])
def test_truncated_file_is_refused(original, tmp_path, num_bytes):
    folder = original("llama")
    path = write_gguf(folder, tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        convert_gguf(path, tmp_path)


def test_sentencepiece_vocabulary_is_carried_over(tmp_path):
    before = sentencepiece_tokenizer(extra=["hello", " world"])
    folder = tiny_model("llama", tmp_path / "original", tokenizer=before, vocab_size=before.vocab_size)
    tokens = [before._backend.id_to_token(i) for i in range(before.vocab_size)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": None,
    }
    after = Tokenizer.from_folder(convert(folder, tmp_path, fields=fields))
    assert after.vocab_bytes == before.vocab_bytes
    for text in ("hello world", " hello  é", "line\nline"):
        assert after.encode(text) == before.encode(text)
        assert after.encode(text)[0] == after.bos_id == 1
