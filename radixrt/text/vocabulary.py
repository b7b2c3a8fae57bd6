"""The bytes of every token, read from a tokenizer's own description."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from radixrt.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character


def vocabulary_bytes(backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> tuple[bytes, ...]:
    """Give the exact bytes of each token id; b"" for special tokens and for ids that name no token.

    Decoding is concatenation: no space is stripped or added at the beginning.

    Raises:
        ModelLoadError: the tokenizer is neither byte-level BPE nor SentencePiece, so that the bytes of its
            tokens are not known (WordPiece and WordLevel lose spaces).
    """
    description = json.loads(backend.to_str())
    decoders = _parts(description.get("decoder"), "decoders")
    kinds = {part["type"] for part in decoders}
    added = backend.get_added_tokens_decoder()
    num_ids = 1 + max((*backend.get_vocab(with_added_tokens=True).values(), *added), default=-1)
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif "Metaspace" in kinds or any(_restores_spaces(part) for part in decoders):
        to_bytes = _sentencepiece_with_bytes if "ByteFallback" in kinds else _sentencepiece
    else:
        raise ModelLoadError(
            "the tokenizer must be byte-level BPE or SentencePiece, so that each token has exact bytes; "
            f"its decoder is {', '.join(sorted(kinds)) or 'none'}"
        )
    vocabulary = []
    for token_id in range(num_ids):
        if token_id in special_ids:
            vocabulary.append(b"")
        elif token_id in added:
            vocabulary.append(added[token_id].content.encode())
        else:
            token = backend.id_to_token(token_id)
            vocabulary.append(b"" if token is None else to_bytes(token))
    return tuple(vocabulary)


def _parts(node: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Give the node itself, or the members of a Sequence, nested ones flattened."""
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    return [part for member in node[key] for part in _parts(member, key)]


def _restores_spaces(part: dict[str, Any]) -> bool:
    wanted = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    return part == wanted


def byte_alphabet() -> dict[str, int]:
    """Give the character that byte-level BPE writes for each byte, inverted.

    Printable Latin-1 characters stand for themselves, the others for code points from 256 on, in order.
    Source: GPT-2's byte encoder.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }


_ALPHABET = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()  # as the backend's own decoder does: a token outside the alphabet is itself


def _sentencepiece(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _sentencepiece_with_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return _sentencepiece(token)
