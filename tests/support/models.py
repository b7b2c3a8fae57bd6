"""Tiny random models in Hugging Face's layout and as GGUF files, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from radixrt.model.gguf_file import TENSOR_NAMES
from radixrt.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_tokenizer, save_tokenizer

ModelKind = Literal["llama", "mistral", "qwen2", "qwen3"]

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide enough that the likeliest token leads by more than rounding.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
OF_KIND: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}


SHORT_NAMES = {long: short for short, long in TENSOR_NAMES.items()}


def tiny_model(
    kind: ModelKind,
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 320,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Save a random float32 model of 2 or 3 layers and a tokenizer; give its folder.

    Args:
        folder: made if missing; files in it are replaced.
        tokenizer: default: bytes with a ChatML template; `vocab_size` grows to hold it.
        overrides: fields of the Hugging Face config.
    Changes: the files in `folder`; not torch's global random state.
    """
    tokenizer = tokenizer or byte_tokenizer(chat=True)
    values = {**SMALL, **OF_KIND[kind], "vocab_size": max(vocab_size, tokenizer.vocab_size), **overrides}
    config = AutoConfig.for_model(kind, **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomize_vectors(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def oracle(folder: Path) -> Any:
    """Load the plain transformers model in float32 with its simplest attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def write_gguf(
    folder: Path,
    path: Path,
    *,
    fields: dict[str, Any] | None = None,
    rename: dict[str, str] | None = None,
    quantization: gguf.GGMLQuantizationType | None = None,
    factors: np.ndarray[Any, Any] | None = None,
) -> Path:
    """Write a model folder as llama.cpp's converter does; give `path`.

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
        short = _gguf_name(name)
        writer.add_tensor((rename or {}).get(short, short), gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _randomize_vectors(model: torch.nn.Module) -> None:
    """Draw norms and biases: their usual start, ones and zeros, would hide that they are not applied."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            torch.nn.init.normal_(parameter, mean=centre, std=0.2)


def _gguf_name(name: str) -> str:
    """Give llama.cpp's name of a Hugging Face tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{SHORT_NAMES[rest]}.{kind}"
    return f"{SHORT_NAMES[stem]}.{kind}"
