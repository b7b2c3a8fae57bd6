"""The tokenizer of a GGUF file -> tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from radixrt.errors import ModelLoadError, first_line

# token types of the format
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
# ids that end an answer
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level vocabulary cuts text before merging, as the model's own tokenizer.json says.

    Attributes:
        pattern: pieces; None = the pattern of GPT-2.
        has_single_digits: digits stand alone first.
        is_composed: text is brought to Unicode form NFC first.
        ignores_merges: a piece that is a token stays one, whatever the merges say.
    """

    pattern: str | None = None
    has_single_digits: bool = False
    is_composed: bool = False
    ignores_merges: bool = False


LETTERS_UPPER, LETTERS_LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
LLAMA3 = Splitting(pattern=WORDS % "{1,3}", ignores_merges=True)
QWEN2 = Splitting(pattern=WORDS % "", is_composed=True)
TEKKEN = Splitting(
    pattern=rf"[^\r\n\p{{L}}\p{{N}}]?[{LETTERS_UPPER}]*[{LETTERS_LOWER}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{LETTERS_UPPER}]+[{LETTERS_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    ignores_merges=True,
)
# tokenizer.ggml.pre -> how to split
SPLITTINGS = {
    "default": Splitting(),
    "gpt-2": Splitting(),
    "smollm": Splitting(has_single_digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}


def write_tokenizer(path: Path, reader: Any, fields: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into a folder.

    Args:
        path: the GGUF file.
        reader: its gguf.GGUFReader.
        fields: its metadata without the long lists.
    Raises:
        ModelLoadError: the file has no tokenizer, or one of an unsupported kind.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama") or "tokenizer.ggml.tokens" not in reader.fields:
        raise ModelLoadError(f"{path}: tokenizer {kind!r} is not supported; supported: gpt2, llama")
    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    backend = _sentencepiece(path) if kind == "llama" else _byte_level(path, reader, fields, tokens)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        role: tokens[fields[key]] for role, key in ROLES.items() if 0 <= fields.get(key, -1) < len(tokens)
    }
    # llama.cpp begins a SentencePiece prompt with BOS unless the file says otherwise.
    config["add_bos_token"] = bool(fields.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", config)
    ends = sorted({fields[key] for key in END_KEYS if key in fields})
    _write_json(folder / "generation_config.json", {"eos_token_id": ends})


def _byte_level(
    path: Path, reader: Any, fields: Mapping[str, Any], tokens: list[str]
) -> tokenizers.Tokenizer:
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in SPLITTINGS:
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(SPLITTINGS)}"
        )
    splitting = SPLITTINGS[name]
    types = _list(reader, "tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in _list(reader, "tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.ignores_merges)
    except Exception as error:
        raise ModelLoadError(f"{path}: the tokenizer is not valid: {first_line(error)}") from error
    backend = tokenizers.Tokenizer(model)
    if splitting.is_composed:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.has_single_digits else []
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, normalized=False, special=token_type == CONTROL)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    return backend


def _sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """Build through transformers, which recovers the merges from the scores."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        raise ModelLoadError(f"{path}: the tokenizer cannot be read: {first_line(error)}") from error
    backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    return backend


def _list(reader: Any, name: str) -> list[Any]:
    return reader.fields[name].contents() if name in reader.fields else []


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
