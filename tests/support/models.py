"""Tiny random models in Hugging Face's layout, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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


def _randomize_vectors(model: torch.nn.Module) -> None:
    """Draw norms and biases: their usual start, ones and zeros, would hide that they are not applied."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            torch.nn.init.normal_(parameter, mean=centre, std=0.2)
