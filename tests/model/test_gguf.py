"""GGUF files are converted without loss, or refused."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from radixrt.errors import ModelLoadError
from radixrt.model.gguf_file import TENSOR_NAMES, convert_gguf
from radixrt.text.tokenizer import Tokenizer
from tests.support.models import tiny_model
from tests.support.tokenizers import byte_tokenizer

KINDS = ["llama", "qwen2", "qwen3"]
SHORT_NAMES = {long: short for short, long in TENSOR_NAMES.items()}


@pytest.fixture
def original(tmp_path):
    """Give a maker of tiny models whose tokenizer has merges."""

    def make(kind, **overrides):
        tokenizer = byte_tokenizer(chat=True, extra=["hello", " 1"])
        return tiny_model(kind, tmp_path / "original", tokenizer=tokenizer, **overrides)

    return make


def gguf_name(name):
    """Give llama.cpp's name of a Hugging Face tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{SHORT_NAMES[rest]}.{kind}"
    return f"{SHORT_NAMES[stem]}.{kind}"


def write_gguf(folder, path, *, fields=None, rename=None, quantization=None, factors=None):
    """Write a model folder as llama.cpp's converter does.

    Args:
        fields: metadata to add or replace; a value of None leaves a field out.
        rename: tensor name -> other name.
        quantization: type of the matrices; default float32.
        factors: tensor of rotary divisors.
    """
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tokenizer = Tokenizer.from_folder(folder)
    tokens = [tokenizer._backend.id_to_token(i) for i in range(tokenizer.vocab_size)]
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    metadata = {
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": heads["q_proj"],
        f"{family}.attention.head_count_kv": heads["k_proj"],
        f"{family}.attention.key_length": config.get("head_dim", 16),
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in tokenizer.special_ids else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_ids[-1],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        **(fields or {}),
    }
    writer = gguf.GGUFWriter(path, family)
    for name, value in metadata.items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        if value is not None:
            add.get(type(value), writer.add_string)(name, value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for name, tensor in load_file(folder / "model.safetensors").items():
        data = tensor.numpy()
        head_name = name.split(".")[-2]
        if family == "llama" and head_name in heads:
            shape = (heads[head_name], 2, -1, *data.shape[1:])
            data = np.ascontiguousarray(data.reshape(shape).swapaxes(1, 2).reshape(data.shape))
        kind = quantization if quantization is not None and data.ndim == 2 else gguf.GGMLQuantizationType.F32
        short = gguf_name(name)
        writer.add_tensor((rename or {}).get(short, short), gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
