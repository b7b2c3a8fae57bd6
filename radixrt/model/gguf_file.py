"""A GGUF file -> a model folder in Hugging Face's layout, written once and without loss.

Quantized tensors are written as float32, which holds their values exactly; float16 and bfloat16 stay as they are.
Source of the names: the GGUF specification (ggml-org/ggml, docs/gguf.md) and llama.cpp's gguf-py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tqdm import tqdm

from radixrt.errors import ModelLoadError, first_line
from radixrt.model.gguf_tokenizer import write_tokenizer
from radixrt.model.spec import ModelSpec

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Divisors of the rotary frequencies, present for Llama 3.1 and later; they become rope_parameters.
ROPE_FACTORS = "rope_freqs.weight"
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Known, and used or checked below, or without effect on the computation.
OTHER_KEYS = frozenset(
    {
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.type",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "vocab_size",
    }
)
UNREADABLE = (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it will stand in the safetensors file; `rows` makes its bytes when they are needed."""

    name: str
    source: Any
    dtype: str
    shape: tuple[int, ...]
    num_permuted_heads: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * (4 if self.dtype == "F32" else 2)

    def rows(self) -> np.ndarray[Any, Any]:
        """Give the values, first dimension as in `shape`; two bytes per number unless float32."""
        data = self.source.data
        if self.dtype == "F32":
            data = gguf.dequantize(data, self.source.tensor_type)
        if self.num_permuted_heads:
            # llama.cpp stores the pairs of a rotation side by side, Hugging Face half a head apart.
            pairs = data.reshape(self.num_permuted_heads, -1, 2, *data.shape[1:])
            data = pairs.swapaxes(1, 2).reshape(data.shape)
        return np.ascontiguousarray(data)


def convert_gguf(path: Path, folder: Path, *, show_progress: bool = False) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into an existing folder.

    Raises:
        ModelLoadError: not a GGUF file, an unsupported architecture, tensor type, tokenizer or field.
    Cost: one read of the file, one write of twice to eight times its size; memory of one tensor.
    """
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if _is_small(name, field)}
    except UNREADABLE as error:
        raise ModelLoadError(f"{path} is not a readable GGUF file: {first_line(error)}") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(path, fields, tensors)
    ModelSpec.from_config(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(path, reader, fields, folder)
    stored = [_stored(path, tensor, config) for tensor in reader.tensors if tensor.name != ROPE_FACTORS]
    _write_safetensors(folder / "model.safetensors", stored, show_progress=show_progress)


def _is_small(name: str, field: Any) -> bool:
    return not (name.startswith("tokenizer.ggml.") and len(field.data) > 1)


def _config(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the metadata into a Hugging Face config; refuse what it would not say."""
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        raise ModelLoadError(
            f"{path}: architecture {family!r} is not supported; supported: {list(ARCHITECTURES)}"
        )
    own = {
        name.removeprefix(f"{family}."): value
        for name, value in fields.items()
        if name.startswith(f"{family}.")
    }
    if unknown := {name for name in own.keys() - CONFIG_KEYS.keys() - OTHER_KEYS if own[name]}:
        raise ModelLoadError(f"{path}: unsupported fields {sorted(unknown)}: they may change the result")
    config = {CONFIG_KEYS[name]: value for name, value in own.items() if name in CONFIG_KEYS}
    if missing := set(CONFIG_KEYS.values()) - config.keys() - {"head_dim", "num_key_value_heads"}:
        raise ModelLoadError(f"{path} lacks the fields for {sorted(missing)}")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name, head_dim) != head_dim:
            raise ModelLoadError(f"{path}: {name} must be the head dimension {head_dim}, got {own[name]}")
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(f"{path} lacks the tensor token_embd.weight")
    config |= {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope_parameters(path, own, tensors, head_dim),
    }
    if family == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    for role in ("bos", "eos"):
        config[f"{role}_token_id"] = fields.get(f"tokenizer.ggml.{role}_token_id")
    return config


def _rope_parameters(
    path: Path, own: Mapping[str, Any], tensors: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
    theta = float(own.get("rope.freq_base", 10000.0))
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "linear") or (kind == "linear" and ROPE_FACTORS in tensors):
        raise ModelLoadError(f"{path}: rope scaling {kind!r} is not supported; supported: none, linear")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(own["rope.scaling.factor"])}
    if ROPE_FACTORS not in tensors:
        return {"rope_type": "default", "rope_theta": theta}
    factors = np.asarray(tensors[ROPE_FACTORS].data, dtype=np.float64)
    # The file holds the divisors only; all released models share these three numbers of their formula.
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - blend) / factor + blend), rtol=1e-4):
        raise ModelLoadError(f"{path}: {ROPE_FACTORS} does not follow the Llama 3 formula")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _stored(path: Path, tensor: Any, config: Mapping[str, Any]) -> StoredTensor:
    parts = tensor.name.split(".")
    prefix = ""
    if parts[0] == "blk" and len(parts) == 4:
        prefix, parts = f"model.layers.{parts[1]}.", parts[2:]
    if len(parts) != 2 or parts[0] not in TENSOR_NAMES or parts[1] not in ("weight", "bias"):
        raise ModelLoadError(f"{path}: unsupported tensor {tensor.name}")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    kind = tensor.tensor_type.name
    return StoredTensor(
        name=f"{prefix}{TENSOR_NAMES[parts[0]]}.{parts[1]}",
        source=tensor,
        dtype=kind if kind in ("F16", "BF16") else "F32",
        shape=tuple(int(extent) for extent in reversed(tensor.shape)),
        num_permuted_heads=heads.get(parts[0], 0) if config["model_type"] == "llama" else 0,
    )


def _write_safetensors(path: Path, tensors: list[StoredTensor], *, show_progress: bool) -> None:
    """Write the safetensors format tensor by tensor, so that no more than one is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in _with_progress(tensors, show_progress=show_progress):
            try:
                rows = tensor.rows()
            except (NotImplementedError, *UNREADABLE) as error:
                raise ModelLoadError(f"{tensor.name} cannot be read: {first_line(error)}") from error
            if rows.nbytes != tensor.num_bytes:
                raise ModelLoadError(f"{tensor.name} has {rows.nbytes} bytes, expected {tensor.num_bytes}")
            file.write(rows.data)


def _with_progress(tensors: list[StoredTensor], *, show_progress: bool) -> Iterator[StoredTensor]:
    total = sum(tensor.num_bytes for tensor in tensors)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="converting", disable=None if show_progress else True
    ) as bar:
        for tensor in tensors:
            yield tensor
            bar.update(tensor.num_bytes)
