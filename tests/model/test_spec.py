"""Which configs are understood, and which are refused instead of computed wrongly."""

import json

import pytest
import torch

from radixrt.errors import ModelLoadError
from radixrt.model.spec import ModelSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2}


def test_defaults_are_those_of_the_family():
    spec = ModelSpec.from_config(LLAMA)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 4, 8)
    assert not any([spec.has_qkv_bias, spec.has_output_bias, spec.has_mlp_bias, spec.has_tied_head])
    assert spec.sliding_windows == (None,) * 4
    assert spec.rope.inverse_frequencies == pytest.approx([1, 0.1, 0.01, 0.001])


def test_old_and_new_rope_spellings_agree():
    old = LLAMA | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}
    assert ModelSpec.from_config(old).rope == ModelSpec.from_config(new).rope
    assert ModelSpec.from_config(old).rope.inverse_frequencies[0] == 0.5


def test_qwen2_windows_follow_their_switch():
    off = QWEN2 | {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 2}
    assert ModelSpec.from_config(off).sliding_windows == (None,) * 4
    assert ModelSpec.from_config(off | {"use_sliding_window": True}).sliding_windows == (None, None, 16, 16)


def test_kv_layout_has_the_shape_of_the_model():
    layout = ModelSpec.from_config(QWEN2).kv_layout(page_size=16, dtype=torch.bfloat16)
    assert layout.page_shape == (4, 2, 16, 2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            r"GemmaForCausalLM is not supported; supported: LlamaForCausalLM",
        ),
        ({"architectures": ["LlamaForCausalLm"]}, r'Did you mean "LlamaForCausalLM"'),
        ({"architectures": None, "model_type": "falcon"}, "falcon is not supported"),
        ({"model_type": "mistral"}, "does not fit model_type"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "big"}, "is not valid"),
        ({"hidden_act": "gelu"}, "hidden_act must be"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"residual_multiplier": 0.2}, "'residual_multiplier' .* may change the result"),
        ({"sliding_window": 4096}, "'sliding_window' .* may change the result"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' .* may change the result"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "is not valid"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [4]}}, "mrope_section"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": 0}, r"vocab_size must be an integer in \[1, 2147483648\), got 0"),
        ({"hidden_size": 2**63}, "hidden_size must be"),
        ({"num_attention_heads": 0}, "is not valid"),
        ({"num_attention_heads": -1}, "num_attention_heads must be"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be"),
        ({"head_dim": -2}, "head_dim must be"),
        ({"max_position_embeddings": -1}, "max_position_embeddings must be"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps must be in \[0, inf\), got nan"),
        ({"rope_theta": 0}, "'default' with .* not finite"),
        ({"rope_theta": float("nan")}, "'default' with .* not finite"),
        ({"rope_theta": "1e4"}, "'default' with .* cannot be computed"),
        ({"rope_theta": 10**30}, "'default' with .* cannot be computed"),
        (
            {"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}},
            "rope type .*yarn.* is not supported",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change, message):
    with pytest.raises(ModelLoadError, match=message):
        ModelSpec.from_config(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "must name 4 layers|is not valid"),
        ({"layer_types": ["sliding_attention"] * 4}, "there is no sliding_window"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
            r"sliding_window must be an integer in \[1, ",
        ),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ModelLoadError, match=message):
        ModelSpec.from_config(QWEN2 | change)


def test_empty_and_neutral_fields_pass():
    neutral = {
        "torch_dtype": "bfloat16",
        "_name_or_path": "x",
        "is_llama_config": True,
        "rope_interleaved": False,
    }
    assert ModelSpec.from_config(LLAMA | neutral) == ModelSpec.from_config(LLAMA)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_broken_config_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelSpec.load(tmp_path)


def test_config_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelSpec.load(tmp_path) == ModelSpec.from_config(LLAMA)
