"""The tokenizer of a GGUF file -> tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from radixrt.errors import ModelLoadError, first_line

# token types of the format
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
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
    build = _sentencepiece if kind == "llama" else _byte_level
    try:
        backend = build(path, reader, fields, tokens)
    except (ValueError, IndexError, TypeError, OverflowError) as error:
        raise ModelLoadError(f"{path}: the tokenizer is not valid: {first_line(error)}") from error
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
    types = _token_types(reader, tokens)
    parts = [merge.partition(" ") for merge in _list(reader, "tokenizer.ggml.merges")]
    merges = [(left, right) for left, _, right in parts]
    model = _merging(_vocabulary(tokens, types), merges, ignore_merges=splitting.ignores_merges)
    backend = tokenizers.Tokenizer(model)
    if splitting.is_composed:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.has_single_digits else []
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, types)
    return backend


def _sentencepiece(
    path: Path, reader: Any, fields: Mapping[str, Any], tokens: list[str]
) -> tokenizers.Tokenizer:
    """Build the BPE of SentencePiece: a pair merges if the result is a token, the best score first."""
    types, scores = _token_types(reader, tokens), _list(reader, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.scores must have {len(tokens)} entries, got {len(scores)}"
        )
    vocabulary = _vocabulary(tokens, types)
    ranked = sorted((i for i in vocabulary.values() if types[i] == NORMAL), key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    for i in ranked:
        splits = [(tokens[i][:cut], tokens[i][cut:]) for cut in range(1, len(tokens[i]))]
        known = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    model = _merging(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    marks: list[Any] = [normalizers.Replace(" ", "\u2581")]
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        marks = [normalizers.Prepend("\u2581"), *marks]
        steps = [*steps, decoders.Strip(" ", 1, 0)]
    backend.normalizer = normalizers.Sequence(marks)
    backend.decoder = decoders.Sequence(steps)
    _add_tokens(backend, tokens, types)
    return backend


def _merging(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises this very class
        raise ValueError(first_line(error)) from error


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}


def _token_types(reader: Any, tokens: list[str]) -> list[int]:
    types = _list(reader, "tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens, but {len(types)} token types")
    return types


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Let control and user-defined tokens be found whole in text."""
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=token_type == CONTROL)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (CONTROL, USER_DEFINED)
        ]
    )


def _list(reader: Any, name: str) -> list[Any]:
    return reader.fields[name].contents() if name in reader.fields else []


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
