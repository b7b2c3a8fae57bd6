"""ModelSpec: what differs between the decoders of the Llama family, read from a Hugging Face config."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixrt.errors import ModelLoadError, suggest
from radixrt.kv.store import KVLayout

# architecture -> model type, as Hugging Face names them
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
REQUIRED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
)
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Fields outside a family's own config class that say nothing about the computation. Any other unknown field
# with a value is refused: it may change the result.
NEUTRAL_FIELDS = frozenset(
    [
        "architectures",
        "auto_map",
        "bad_words_ids",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "is_llama_config",
        "max_length",
        "min_length",
        "max_window_layers",
        "model_max_length",
        "name_or_path",
        "num_labels",
        "pretraining_tp",
        "prefix",
        "rope_scaling",
        "rope_theta",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
    ]
)
# rope type -> fields that change its frequencies, besides rope_theta
ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        [
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        ]
    ),
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: dimensions i and i + D/2 turn by position * inverse_frequencies[i].

    Attributes:
        inverse_frequencies: D/2 numbers, radians per position.
        magnitude: factor on cosine and sine (yarn), else 1.
    """

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder.

    Attributes:
        max_context: most tokens of a sequence that the model was made for.
        sliding_windows: per layer, how many positions a token sees, itself included; None = all.
        has_qk_norm: queries and keys pass an RMSNorm per head before the rotation.
        has_tied_head: the output projection is the embedding matrix.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_epsilon: float
    rope: RopeSpec
    sliding_windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_tied_head: bool

    @property
    def num_layers(self) -> int:
        return len(self.sliding_windows)

    @property
    def num_weights(self) -> int:
        """Elements of all matrices; norms and biases are left out."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        num_vocab_matrices = 1 if self.has_tied_head else 2
        return self.num_layers * layer + num_vocab_matrices * self.vocab_size * self.hidden_size

    def kv_layout(self, *, page_size: int, dtype: torch.dtype) -> KVLayout:
        """Give the layout of this model's pages. Pure."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, page_size, dtype)

    @classmethod
    def load(cls, folder: Path) -> ModelSpec:
        """Read config.json in `folder`.

        Raises:
            ModelLoadError: no readable config.json, or as `from_config`.
        """
        path = folder / "config.json"
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise ModelLoadError(f"{folder} is not a model folder: it has no config.json") from None
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
        return cls.parse(text, path=path)

    @classmethod
    def parse(cls, text: bytes, *, path: Path) -> ModelSpec:
        """Read the text of a config.json.

        Args:
            path: of the file, for messages.
        Raises:
            ModelLoadError: not a JSON object in UTF-8, or as `from_config`.
        """
        try:
            config = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(config, dict):
            raise ModelLoadError(f"{path} must hold a JSON object")
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read the fields of a Hugging Face config.json, old (rope_theta, rope_scaling) or new (rope_parameters).

        Raises:
            ModelLoadError: another architecture, or a field that this decoder does not compute. Nothing that may
                change the result is ignored.
        """
        architecture = _architecture(config)
        filled = _fill_defaults(architecture, config)
        for name in SIZES:
            _check_size(name, getattr(filled, name))
        num_heads, num_kv_heads = filled.num_attention_heads, filled.num_key_value_heads
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {num_heads} and {num_kv_heads}"
            )
        if not 0 <= filled.rms_norm_eps < math.inf:
            raise ModelLoadError(f"rms_norm_eps must be in [0, inf), got {filled.rms_norm_eps}")
        if filled.hidden_act != "silu":
            raise ModelLoadError(f'hidden_act must be "silu", got {filled.hidden_act!r}')
        head_dim = getattr(filled, "head_dim", None) or filled.hidden_size // num_heads
        _check_size("head_dim", head_dim)
        has_attention_bias = bool(getattr(filled, "attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=filled.vocab_size,
            hidden_size=filled.hidden_size,
            intermediate_size=filled.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_context=filled.max_position_embeddings,
            norm_epsilon=filled.rms_norm_eps,
            rope=_rope_spec(filled, head_dim),
            sliding_windows=_sliding_windows(architecture, filled),
            has_qkv_bias=has_attention_bias or architecture == "Qwen2ForCausalLM",
            has_output_bias=has_attention_bias,
            has_mlp_bias=bool(getattr(filled, "mlp_bias", False)),
            has_qk_norm=architecture == "Qwen3ForCausalLM",
            has_tied_head=bool(filled.tie_word_embeddings),
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [
        name for name, model_type in ARCHITECTURES.items() if model_type == config.get("model_type")
    ]
    known = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        found = ", ".join(map(str, names)) if isinstance(names, list) else names
        found = found or config.get("model_type") or "none"
        raise ModelLoadError(
            f"architecture {found} is not supported; supported: {known}.{suggest(str(found), ARCHITECTURES)}"
        )
    name: str = names[0]
    if config.get("model_type", ARCHITECTURES[name]) != ARCHITECTURES[name]:
        raise ModelLoadError(f"architecture {name} does not fit model_type {config['model_type']!r}")
    return name


def _fill_defaults(architecture: str, config: Mapping[str, Any]) -> Any:
    """Give the family's own config object of transformers; it fills defaults and knows old spellings."""
    from huggingface_hub.errors import StrictDataclassError  # both only here: kept_spec.py
    from transformers import AutoConfig

    missing = [name for name in REQUIRED_FIELDS if config.get(name) is None]
    if missing:
        raise ModelLoadError(f"config.json lacks {', '.join(missing)}")
    fields = {name: value for name, value in config.items() if name not in ("model_type", "torch_dtype")}
    try:
        filled = AutoConfig.for_model(ARCHITECTURES[architecture], **fields)
    except (StrictDataclassError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(f"config.json of {architecture} is not valid: {error}") from error
    # head_dim is read whether the family's class declares it or not, as transformers does.
    known = NEUTRAL_FIELDS.union(type(filled).__dataclass_fields__, {"head_dim"})
    for name, value in config.items():
        if value and name not in known and not name.startswith("_"):
            raise ModelLoadError(
                f"config.json of {architecture} has the field {name!r} ({value!r}), which is not supported: "
                "it may change the result"
            )
    return filled


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or not 1 <= value < 2**31:
        raise ModelLoadError(f"{name} must be an integer in [1, 2147483648), got {value!r}")


def _sliding_windows(architecture: str, filled: Any) -> tuple[int | None, ...]:
    num_layers: int = filled.num_hidden_layers
    window = getattr(filled, "sliding_window", None)
    if window is not None:
        _check_size("sliding_window", window)
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    layer_types = getattr(filled, "layer_types", None) or ["full_attention"] * num_layers
    if len(layer_types) != num_layers:
        raise ModelLoadError(f"layer_types must name {num_layers} layers, got {len(layer_types)}")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelLoadError(
            f"layer_types holds {sorted(unknown)}: only full and sliding attention are supported"
        )
    if "sliding_attention" in layer_types and window is None:
        raise ModelLoadError("layer_types names sliding_attention, but there is no sliding_window")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _rope_spec(filled: Any, head_dim: int) -> RopeSpec:
    """Compute the frequencies. They depend on nothing but the config: what a cached key holds stays true."""
    parameters: dict[str, Any] = filled.rope_parameters
    rope_type = parameters["rope_type"]
    if not isinstance(rope_type, str) or rope_type not in ROPE_FIELDS:
        raise ModelLoadError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_FIELDS)} "
            "(frequencies that follow the length of the input cannot be cached)"
        )
    unknown = set(parameters) - ROPE_FIELDS[rope_type] - {"rope_type", "type", "rope_theta"}
    if refused := {name for name in unknown if (name, parameters[name]) != ("partial_rotary_factor", 1.0)}:
        raise ModelLoadError(f"rope type {rope_type!r} has unsupported fields: {', '.join(sorted(refused))}")
    try:
        inverse_frequencies, magnitude = _frequencies(rope_type, filled, head_dim)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(
            f"rope type {rope_type!r} with {parameters} cannot be computed: {error}"
        ) from error
    if not math.isfinite(magnitude) or not inverse_frequencies.isfinite().all():
        raise ModelLoadError(
            f"rope type {rope_type!r} with {parameters} gives frequencies that are not finite"
        )
    return RopeSpec(tuple(inverse_frequencies.tolist()), magnitude)


def _frequencies(rope_type: str, filled: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    if rope_type == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (filled.rope_parameters["rope_theta"] ** steps), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse_frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope_type](filled)
    return inverse_frequencies, float(magnitude)
