"""Safetensors files -> the decoder's weights, every tensor accounted for by name and shape."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from radixrt.errors import ModelLoadError
from radixrt.memory import Arena
from radixrt.model.decoder import DecoderWeights, LayerWeights, Linear
from radixrt.model.spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WeightFiles:
    """The tensors of a model folder by name, copied into one arena as they are taken.

    Invariant: `taken` holds the names that were asked for, each in `file_of`.
    """

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        self.folder = folder
        self.files = {name: _open(folder / name) for name in _file_names(folder)}
        self.file_of = {tensor: name for name, file in self.files.items() for tensor in file.keys()}  # noqa: SIM118
        self.taken: set[str] = set()
        shapes = [self.files[file].get_slice(tensor).get_shape() for tensor, file in self.file_of.items()]
        self.arena = Arena(sum(map(math.prod, shapes)), len(shapes), dtype=dtype, device=device)

    def take(self, *names: str, shapes: Iterable[tuple[int, ...]]) -> torch.Tensor:
        """Read tensors into one, stacked along their first dimension.

        Raises:
            ModelLoadError: one is missing, of another shape, or not of a floating-point type.
        """
        parts = [self._read(name, shape) for name, shape in zip(names, shapes, strict=True)]
        num_rows = [part.shape[0] for part in parts]
        stacked = self.arena.cut((sum(num_rows), *parts[0].shape[1:]))
        for target, part in zip(torch.split(stacked, num_rows), parts, strict=True):
            target.copy_(part)
        return stacked

    def check_all_taken(self, ignored: Iterable[str] = ()) -> None:
        """Raise ModelLoadError if a tensor is left that nobody asked for: its effect would be lost."""
        left = set(self.file_of) - self.taken - set(ignored)
        # Old checkpoints store the rotary frequencies, which follow from the config.
        left = {name for name in left if not name.endswith(".rotary_emb.inv_freq")}
        if left:
            raise ModelLoadError(f"{self.folder} holds {len(left)} unexpected tensors: {_some(left)}")

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.file_of:
            raise ModelLoadError(f"{self.folder} lacks the tensor {name} of shape {list(shape)}")
        path = self.folder / self.file_of[name]
        try:
            tensor: torch.Tensor = self.files[self.file_of[name]].get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{path} cannot be read at {name}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{path}: {name} must have shape {list(shape)} by config.json, got {list(tensor.shape)}"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise ModelLoadError(f"{path}: {name} has the unsupported type {tensor.dtype}")
        self.taken.add(name)
        return tensor


def read_weights(
    folder: Path, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype
) -> DecoderWeights:
    """Read the weights of a folder in Hugging Face's layout: model.safetensors, or shards with an index.

    Raises:
        ModelLoadError: a file is missing or corrupt; a tensor is missing, unexpected or of another shape.
    """
    files = WeightFiles(folder, device=device, dtype=dtype)
    matrix = (spec.vocab_size, spec.hidden_size)
    embedding = files.take("model.embed_tokens.weight", shapes=[matrix])
    layers = tuple(_read_layer(files, spec, layer_index=i) for i in range(spec.num_layers))
    final_norm = files.take("model.norm.weight", shapes=[(spec.hidden_size,)])
    head = embedding if spec.has_tied_head else files.take("lm_head.weight", shapes=[matrix])
    files.check_all_taken(ignored=["lm_head.weight"] if spec.has_tied_head else [])
    return DecoderWeights(embedding, layers, final_norm, head)


def _read_layer(files: WeightFiles, spec: ModelSpec, *, layer_index: int) -> LayerWeights:
    prefix = f"model.layers.{layer_index}."
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def linear(names: tuple[str, ...], rows: tuple[int, ...], columns: int, has_bias: bool) -> Linear:
        weights = [f"{prefix}{name}.weight" for name in names]
        biases = [f"{prefix}{name}.bias" for name in names]
        weight = files.take(*weights, shapes=[(count, columns) for count in rows])
        return Linear(weight, files.take(*biases, shapes=[(count,) for count in rows]) if has_bias else None)

    return LayerWeights(
        attention_norm=files.take(f"{prefix}input_layernorm.weight", shapes=[(hidden,)]),
        qkv=linear(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            (q_rows, kv_rows, kv_rows),
            hidden,
            spec.has_qkv_bias,
        ),
        qk_norm=_read_qk_norm(files, spec, prefix) if spec.has_qk_norm else None,
        output=linear(("self_attn.o_proj",), (hidden,), q_rows, spec.has_output_bias),
        mlp_norm=files.take(f"{prefix}post_attention_layernorm.weight", shapes=[(hidden,)]),
        gate_up=linear(
            ("mlp.gate_proj", "mlp.up_proj"), (intermediate, intermediate), hidden, spec.has_mlp_bias
        ),
        down=linear(("mlp.down_proj",), (hidden,), intermediate, spec.has_mlp_bias),
    )


def _read_qk_norm(files: WeightFiles, spec: ModelSpec, prefix: str) -> torch.Tensor:
    """Give [H + G, D]: the weight of the query norm for every query head, then that of the key norm."""
    q_norm = files.take(f"{prefix}self_attn.q_norm.weight", shapes=[(spec.head_dim,)])
    k_norm = files.take(f"{prefix}self_attn.k_norm.weight", shapes=[(spec.head_dim,)])
    return torch.stack([q_norm] * spec.num_heads + [k_norm] * spec.num_kv_heads)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error


def _file_names(folder: Path) -> list[str]:
    """Give the names of the files that hold the weights; never a path outside the folder."""
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise ModelLoadError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not a readable index of safetensors files: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{index} names {name!r}, which is not a safetensors file of this folder")
    return sorted(names)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (", ..." if len(ordered) > 5 else "")
