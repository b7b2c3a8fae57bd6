"""Text to token ids and back, byte-exact."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from radixrt.errors import InvalidRequest, ModelLoadError
from radixrt.text.chat import ChatTemplate, shielded
from radixrt.text.files import TokenizerFiles, read_tokenizer_files
from radixrt.text.vocabulary import vocabulary_bytes
from radixrt.types import TextPiece

_ANCHOR = "\x02"


class Tokenizer:
    """A vocabulary with its encoder; immutable after construction, so threads may share it.

    Attributes:
        vocab_bytes: the exact bytes of every id in [0, vocab_size); b"" for special tokens and unused ids.
        special_ids: control tokens: they have no text and the text of a prompt's content never becomes one.
        bos_id: id of the beginning-of-sequence token, or None.
        eos_ids: every id that ends a sequence, ascending; all are special.
        fingerprint: sha256 of the serialized backend: equal for equal tokenizers.
        chat: the model's chat template, or None.
        special_tokens: role -> token, e.g. "bos_token" -> "<s>".
        template_tokens: tokens of the chat template that are not special, by name: Qwen's "<tool_call>".
        add_bos: whether `encode` begins with BOS; None leaves it to the backend.
    Invariants: vocab_size == len(vocab_bytes); eos_ids and bos_id are in special_ids.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
    ) -> None:
        """Take over a backend; its truncation and padding are switched off.

        Args:
            special_tokens: role -> token ("bos_token", "eos_token", ...); templates can name them. All are
                special, whatever the backend says.
            eos_ids: more ids that end a sequence, besides "eos_token".
            chat_template: Jinja source.
            add_bos: whether `encode` begins with BOS. None: as the backend's post-processor does.
        Raises:
            ModelLoadError: a named token is unknown, or the bytes of the tokens cannot be known.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.add_bos = add_bos
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        named = {role: _known_id(backend, role, token) for role, token in self.special_tokens.items()}
        backend.add_special_tokens(list(self.special_tokens.values()))
        added = backend.get_added_tokens_decoder()
        self.bos_id: int | None = named.get("bos_token")
        self.eos_ids: tuple[int, ...] = tuple(sorted({*eos_ids, *_optional(named.get("eos_token"))}))
        self.special_ids: frozenset[int] = frozenset(
            {
                *(token_id for token_id, token in added.items() if token.special),
                *named.values(),
                *self.eos_ids,
            }
        )
        self.vocab_bytes: tuple[bytes, ...] = vocabulary_bytes(backend, self.special_ids)
        self.fingerprint: str = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self.chat: ChatTemplate | None = (
            None if chat_template is None else ChatTemplate(chat_template, special_tokens=self.special_tokens)
        )
        # Some models declare the tokens of their template as ordinary ones; content must not forge them.
        self.template_tokens: dict[str, int] = {
            token.content: token_id
            for token_id, token in added.items()
            if chat_template is not None and token.content in chat_template and token.content.strip()
            if token_id not in self.special_ids
        }
        self._control_tokens: dict[str, int] = {
            str(backend.id_to_token(token_id)): token_id for token_id in self.special_ids
        } | self.template_tokens
        self._control_pattern = _alternation(self._control_tokens)
        self._masked: _MaskedBackend | None = None
        self._prepends_space = self.decode(backend.encode("a", add_special_tokens=False).ids) != "a"
        self.check()

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and the files beside it.

        Raises:
            ModelLoadError: a file is missing or corrupt (names it), or the tokenizer is of an unsupported kind.
        """
        files: TokenizerFiles = read_tokenizer_files(folder)
        return cls(
            files.backend,
            special_tokens=files.special_tokens,
            eos_ids=files.eos_ids,
            chat_template=files.chat_template,
            add_bos=files.add_bos,
        )

    @property
    def vocab_size(self) -> int:
        """Give the number of ids; a model's logits may have more columns (padding)."""
        return len(self.vocab_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode text as the model's own tokenizer does; control tokens in it are parsed as themselves.

        Args:
            add_special_tokens: begin with BOS where the model wants one.
        Raises:
            InvalidRequest: the text holds a lone surrogate.
        """
        _check_unicode(text)
        if self.add_bos is None:
            return _ids(self._backend, text, add_special_tokens=add_special_tokens)
        has_bos = self.add_bos and add_special_tokens
        prefix = _optional(self.bos_id) if has_bos else []
        return [*prefix, *_ids(self._backend, text)]

    def encode_pieces(self, pieces: Sequence[TextPiece]) -> list[int]:
        """Encode template text and content as one text; control tokens count in template pieces only.

        Equals `encode(joined, add_special_tokens=False)` whenever no control token touches content. No BOS or
        EOS is added: templates bring their own.

        Raises:
            InvalidRequest: the text holds a lone surrogate.
        """
        joined = "".join(piece.text for piece in pieces)
        _check_unicode(joined)
        template_spans = _template_spans(pieces)
        wanted: list[re.Match[str]] = []
        for start, stop in template_spans:
            wanted += self._control_pattern.finditer(joined, start, stop)
        found = self._control_pattern.finditer(joined)
        if [match.span() for match in found] == [match.span() for match in wanted]:
            return _ids(self._backend, joined)
        return self._masked_backend().encode(joined, wanted)

    def encode_continuation(self, text: str) -> list[int]:
        """Encode plain text in the middle of an output: no control token, no space put before it.

        The bytes of the ids are exactly those of the text, unless the tokenizer normalizes characters.
        """
        _check_unicode(text)
        if not self._prepends_space:
            return self._encode_plain(text)
        # A character that merges with nothing takes the place of what came before; its tokens are dropped.
        ids = self._encode_plain(_ANCHOR + text)
        for num_ids in range(1, min(len(ids), 4) + 1):
            if b"".join(self.vocab_bytes[token_id] for token_id in ids[:num_ids]).endswith(_ANCHOR.encode()):
                return ids[num_ids:]
        return self._encode_plain(text)

    def _encode_plain(self, text: str) -> list[int]:
        """Encode text in which no control token counts."""
        if self._control_pattern.search(text):
            return self._masked_backend().encode(text, ())
        return _ids(self._backend, text)

    def shielded(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Put stand-ins for control tokens that strings of a JSON value spell; see `text.chat.shielded`."""
        return shielded(value, self._control_pattern)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Give the text of token ids; special tokens have none, broken UTF-8 becomes U+FFFD."""
        return b"".join(self.vocab_bytes[token_id] for token_id in token_ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """Give a readable form of one token for messages; special tokens by their name."""
        if self.vocab_bytes[token_id]:
            return self.decode([token_id])
        name: str | None = self._backend.id_to_token(token_id)
        return f"<unused {token_id}>" if name is None else name

    def serialized(self) -> str:
        """Give the backend as the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def warm(self) -> None:
        """Make now what the first text that spells a control token would wait for (half a second at 49k tokens)."""
        self._masked_backend()

    @property
    def is_warm(self) -> bool:
        """Tell whether `warm` has done its work: encoding then takes its text's length of time and no more."""
        return self._masked is not None

    def check(self) -> None:
        """Raise ModelLoadError unless the class invariants hold."""
        ends = {*self.eos_ids, *_optional(self.bos_id)}
        if outside := [token_id for token_id in ends if not 0 <= token_id < self.vocab_size]:
            raise ModelLoadError(f"bos and eos ids must be in [0, {self.vocab_size}), got {outside}")

    def _masked_backend(self) -> _MaskedBackend:
        if self._masked is None:  # threads may build it twice; the results are interchangeable
            self._masked = _MaskedBackend(self._backend, self._control_tokens)
        return self._masked


class _MaskedBackend:
    """The same tokenizer with its control tokens renamed to names that nobody can guess.

    The original names are then plain text to it, and a wanted control token is written by its new name: one
    encoding of the whole text keeps every rule of the original about spaces at the borders of tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, control_tokens: Mapping[str, int]) -> None:
        nonce = secrets.token_hex(16)
        self._names = {token: f"[{nonce}{token_id}]" for token, token_id in control_tokens.items()}
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(self._renamed(json.loads(backend.to_str()))))
        for token, token_id in control_tokens.items():
            if self._backend.token_to_id(self._names[token]) != token_id:
                raise ModelLoadError(f"the tokenizer cannot encode {token!r} as plain text")

    def encode(self, text: str, wanted: Iterable[re.Match[str]]) -> list[int]:
        """Encode text; of the control tokens in it only `wanted` are themselves."""
        parts, position = [], 0
        for match in wanted:
            parts += [text[position : match.start()], self._names[match[0]]]
            position = match.end()
        return _ids(self._backend, "".join([*parts, text[position:]]))

    def _renamed(self, description: dict[str, Any]) -> dict[str, Any]:
        names, model = self._names, description["model"]
        for token in description["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
        else:  # Unigram: a list of (token, score)
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if model.get("unk_token") is not None:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        description["post_processor"] = None  # it names control tokens, and none is added here
        return description


def _ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Encode one text as a batch of one: unlike the backend's `encode`, that lets other threads run meanwhile."""
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _template_spans(pieces: Sequence[TextPiece]) -> list[tuple[int, int]]:
    """Give the character ranges [start, stop) of runs of template pieces in the joined text."""
    spans: list[tuple[int, int]] = []
    position = 0
    for piece in pieces:
        stop = position + len(piece.text)
        if piece.is_template and stop > position:
            if spans and spans[-1][1] == position:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((position, stop))
        position = stop
    return spans


def _alternation(tokens: Iterable[str]) -> re.Pattern[str]:
    """Match any of the tokens, the longest first; with no token, match nothing."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _known_id(backend: tokenizers.Tokenizer, role: str, token: str) -> int:
    token_id: int | None = backend.token_to_id(token)
    if token_id is None:
        raise ModelLoadError(f"{role} {token!r} is not in the tokenizer's vocabulary")
    return token_id


def _optional(token_id: int | None) -> list[int]:
    return [] if token_id is None else [token_id]


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(
            "text must be valid Unicode (it holds a lone surrogate)", parameter="prompt"
        ) from None
