"""Tiny tokenizers, built in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from radixrt.text.tokenizer import Tokenizer
from radixrt.text.vocabulary import byte_alphabet

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Merged tokens that cross the borders that matter to JSON, and characters of 2, 3 and 4 bytes.
JSON_MERGES = (
    *('":', '",', '":"', '","', '{"', '"}', '"]', '["', "],", "},", "}]", "[[", "{}", "[]", '", "', '": '),
    *(
        "tr",
        "true",
        "fal",
        "false",
        "null",
        "nu",
        "  ",
        "\\u",
        "\\n",
        '\\"',
        "00",
        "1.",
        "e+",
        "-1",
        "12",
        "é",
    ),
    *(
        "ü",
        "日",
        "本",
        "日本",
        "語",
        "日本語",
        "🙂",
        "🙂🙂",
        "ab",
        "abc",
        "name",
        "age",
        "the ",
        " a",
        "in",
        "er",
    ),
)


def byte_tokenizer(*, extra: Sequence[str] = (), chat: bool = False) -> Tokenizer:
    """Build a byte-level BPE tokenizer: ids 0..255 are the bytes, then 3 special tokens, then `extra`.

    Args:
        extra: texts that become one token each; what is needed to merge them becomes tokens too.
        chat: give it a ChatML template with a default system message.
    """
    to_character = {byte: character for character, byte in byte_alphabet().items()}
    vocabulary = {to_character[byte]: byte for byte in range(256)}
    vocabulary |= {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
    merges: list[tuple[str, str]] = []
    for text in extra:
        characters = [to_character[byte] for byte in text.encode()]
        merged = characters[0]
        for character in characters[1:]:
            if (pair := (merged, character)) not in merges:
                merges.append(pair)
            merged += character
            vocabulary.setdefault(merged, len(vocabulary))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        eos_ids=[vocabulary["<|endoftext|>"]],
        chat_template=CHATML if chat else None,
    )


def sentencepiece_tokenizer(*, extra: Sequence[str] = (), prepend: bool = True) -> Tokenizer:
    """Build a SentencePiece-style BPE tokenizer with byte fallback: ids 3..258 are the bytes.

    Args:
        extra: texts that become one token each, a space written as a space.
        prepend: begin each text with a space, as Llama 2 does.
    """
    vocabulary = {token: index for index, token in enumerate(("<unk>", "<s>", "</s>"))}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for text in ("\u2581", *"abcdefghijklmnopqrstuvwxyz<>|/_", *extra):
        marked = text.replace(" ", "\u2581")
        merged = marked[0]
        vocabulary.setdefault(merged, len(vocabulary))
        for character in marked[1:]:
            vocabulary.setdefault(character, len(vocabulary))
            if (pair := (merged, character)) not in merges:
                merges.append(pair)
            merged += character
            vocabulary.setdefault(merged, len(vocabulary))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    marks = [normalizers.Replace(" ", "\u2581")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *marks] if prepend else marks)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(
        backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, add_bos=True
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `Tokenizer.from_folder` reads back."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.serialized(), encoding="utf-8")
    config: dict[str, object] = {**tokenizer.special_tokens}
    if tokenizer.chat is not None:
        config["chat_template"] = tokenizer.chat.source
    if tokenizer.add_bos is not None:
        config["add_bos_token"] = tokenizer.add_bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(tokenizer.eos_ids)}), encoding="utf-8"
    )
