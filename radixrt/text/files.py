"""The tokenizer files of a Hugging Face model folder, read into plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from radixrt.errors import ModelLoadError, first_line

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files of a folder say about its tokenizer.

    Attributes:
        special_tokens: role -> token, e.g. "bos_token" -> "<s>".
        eos_ids: ids named by generation_config.json and config.json.
        add_bos: whether a prompt begins with BOS; None leaves it to the backend.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]
    chat_template: str | None
    add_bos: bool | None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json, tokenizer_config.json, the chat template, generation_config.json and config.json.

    Only tokenizer.json must be there.

    Raises:
        ModelLoadError: a file is missing or corrupt; the text names it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: a model folder needs a tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise ModelLoadError(f"{path} is not a valid tokenizer: {first_line(error)}") from error
    config = _read_object(folder / "tokenizer_config.json")
    _add_missing_tokens(backend, config)
    special_tokens = {
        role: token
        for role in _ROLES
        if (token := _token_content(config.get(role))) and backend.token_to_id(token) is not None
    }
    return TokenizerFiles(
        backend=backend,
        special_tokens=special_tokens,
        eos_ids=_eos_ids(folder, frozenset(backend.get_added_tokens_decoder())),
        chat_template=_chat_template(folder, config),
        add_bos=_optional_bool(config, "add_bos_token"),
    )


def _read_object(path: Path) -> dict[str, Any]:
    """Give the JSON object in a file, {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


def _token_content(value: object) -> str | None:
    """Give the text of a token written as a string or as an AddedToken object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _optional_bool(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add what tokenizer_config.json declares beyond tokenizer.json; mark its special tokens as special."""
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, Mapping):
        for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
            content = _token_content(entry)
            if content and backend.token_to_id(content) is None:
                flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word")}
                special = bool(entry.get("special", False))
                added = tokenizers.AddedToken(
                    content, normalized=bool(entry.get("normalized", not special)), special=special, **flags
                )
                backend.add_tokens([added])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    values = list(extra.values()) if isinstance(extra, Mapping) else list(extra)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for value in values if (token := _token_content(value)) and token not in known]
    if missing:
        backend.add_special_tokens(missing)


def _eos_ids(folder: Path, added_ids: frozenset[int]) -> tuple[int, ...]:
    """Collect the ids of all files; an id of ordinary text (a default left in a config) ends nothing."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_object(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found |= {item for item in values if isinstance(item, int) and item in added_ids}
    return tuple(sorted(found))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None
