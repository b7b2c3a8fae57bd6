"""A tokenizer's vocabulary as the grammar engines need it; built once, shared by all constraints."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache

import llguidance
import numpy as np
from numpy.typing import NDArray

from radixrt.grammar.closing import ClosingRanks
from radixrt.grammar.matcher import MaskRow
from radixrt.grammar.trie import TokenTrie
from radixrt.text.tokenizer import Tokenizer

MAX_FORCED_BYTES = 4096
MAX_KNOWN_TEXTS, MAX_KNOWN_CHARACTERS = 4096, 128  # forced texts whose tokens are remembered: 10 MiB at most


def pack_mask(bits: NDArray[np.uint8]) -> MaskRow:
    """Pack one byte per token (a multiple of 32 tokens) into a mask row. Pure."""
    return np.packbits(bits, bitorder="little").view(np.int32)


def split_names(text: str, names: Sequence[str]) -> list[str]:
    """Cut a text at names, the longest first; give names and what stands between them. Pure."""
    if not names:
        return [text] if text else []
    ordered = sorted(names, key=len, reverse=True)
    return [part for part in re.split(f"({'|'.join(map(re.escape, ordered))})", text) if part]


def engine_name(name: str) -> str:
    """Give what llguidance's grammars call a token without bytes, whatever its id in a vocabulary. Pure."""
    return f"<x{name.encode().hex()}>"


class GrammarVocabulary:
    """The tokenizer, its trie and the engine's own view of it. The latter two are built when first needed.

    Attributes:
        tokenizer: whose tokens the masks are about.
        vocab_size: columns of the masks; at least tokenizer.vocab_size, since models pad their logits.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")

    @cached_property
    def vocab_bytes(self) -> tuple[bytes, ...]:
        """Give the bytes of the tokens that masks can hold; a model may have fewer logits than its tokenizer ids."""
        return self.tokenizer.vocab_bytes[: self.vocab_size]

    @cached_property
    def num_words(self) -> int:
        """Give how many words of a mask the tokens fill."""
        return (len(self.vocab_bytes) + 31) // 32

    @cached_property
    def trie(self) -> TokenTrie:
        return TokenTrie.build(self.vocab_bytes)

    @cached_property
    def llguidance_tokenizer(self) -> llguidance.LLTokenizer:
        wrapper = llguidance.TokenizerWrapper(_EngineView(self))
        return llguidance.LLTokenizer(wrapper, eos_token=self._end_ids)

    @property
    def _end_ids(self) -> list[int]:
        ids = [token_id for token_id in self.tokenizer.eos_ids if token_id < len(self.vocab_bytes)]
        return ids or sorted(self.tokenizer.special_ids)[:1]

    @cached_property
    def text_flags(self) -> NDArray[np.uint8]:
        """Give 1 for every token that has bytes, else 0."""
        return np.array([token != b"" for token in self.vocab_bytes], dtype=np.uint8)

    @cached_property
    def text_bits(self) -> MaskRow:
        """Give the mask of all tokens that have bytes."""
        flags = np.zeros((self.vocab_size + 31) // 32 * 32, dtype=np.uint8)
        flags[: len(self.vocab_bytes)] = self.text_flags
        return pack_mask(flags)

    @cached_property
    def closing_ranks(self) -> ClosingRanks:
        return ClosingRanks.build(self.vocab_bytes)

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Give the token id of each byte that is a token by itself."""
        return {token[0]: token_id for token_id, token in enumerate(self.vocab_bytes) if len(token) == 1}

    @cached_property
    def control_ids(self) -> dict[str, int]:
        """Give the control tokens that do not end a sequence, by name."""
        tokenizer = self.tokenizer
        ids = [item for item in sorted(tokenizer.special_ids) if item < len(self.vocab_bytes)]
        return {tokenizer.token_text(item): item for item in ids if item not in tokenizer.eos_ids}

    def split_marked(self, text: str, control_ids: Mapping[str, int]) -> list[str | int]:
        """Cut a text at the names of control tokens: pieces of text and token ids. Pure."""
        return [control_ids.get(part, part) for part in split_names(text, tuple(control_ids))]

    def encode_marked(self, text: str, control_ids: Mapping[str, int]) -> list[int]:
        """Encode a text in the middle of an output in which some control tokens stand for themselves."""
        ids: list[int] = []
        for part in self.split_marked(text, control_ids):
            ids += [part] if isinstance(part, int) else self.encode(part)
        return ids

    def encode(self, text: str) -> list[int]:
        """Encode plain text in the middle of an output as the model writes it.

        Control tokens count as text, but for those of the template that have text: what a prompt's content must not
        forge is the model's own to write.
        """
        names = self.tokenizer.template_tokens
        if not any(name in text for name in names):
            return self.tokenizer.encode_continuation(text)
        ids: list[int] = []
        for part in split_names(text, tuple(names)):
            ids += [names[part]] if part in names else self.tokenizer.encode_continuation(part)
        return ids

    def rests_of(self, run: Sequence[int], token_id: int) -> Iterator[list[int]]:
        """Give what may still end a text after a token, where `run` would have ended it before. Pure.

        The run's text goes on behind the token; or the token opened what the run's first token closes at once, as
        `"Ann` does where the run has `""`.
        """
        given, spelled = self.vocab_bytes[token_id], b""
        for place, item in enumerate(run, start=1):
            spelled += self.vocab_bytes[item]
            if not spelled.startswith(given[: len(spelled)]):
                break
            if len(spelled) >= len(given):
                yield [*self._encode_bytes(spelled[len(given) :]), *run[place:]]
                break
        if run and len(self.vocab_bytes[run[0]]) > 1:
            yield [*self._encode_bytes(self.vocab_bytes[run[0]][-1:]), *run[1:]]

    def _encode_bytes(self, data: bytes) -> list[int]:
        """Encode bytes; [] for none, and for what is not a text."""
        try:
            return self.encode(data.decode()) if data else []
        except UnicodeDecodeError:
            return []

    def shown(self, token_id: int) -> bytes:
        """Give the bytes of a token, or the name of one without bytes."""
        return self.vocab_bytes[token_id] or self.tokenizer.token_text(token_id).encode()

    def is_text(self, token_id: int) -> bool:
        """Tell whether the token has bytes, so that a constraint can allow it."""
        return 0 <= token_id < len(self.vocab_bytes) and self.vocab_bytes[token_id] != b""

    def tokenize(self, data: bytes) -> list[int]:
        """Give the canonical tokens of bytes in the middle of an output.

        A character that `data` breaks off is left out. [] if `data` begins inside a character, or if the encoder
        does not give back the same bytes.
        """
        text = data.decode("utf-8", "ignore")
        ids = self.encode(text)
        is_exact = all(map(self.is_text, ids)) and data.startswith(b"".join(self.vocab_bytes[i] for i in ids))
        return ids if is_exact else []

    def canonical_run(self, data: bytes, *, is_end: bool) -> list[int]:
        """Give the tokens of forced bytes that no later byte can change.

        Args:
            data: what must come next.
            is_end: nothing can follow `data`. Otherwise tokens are dropped from the first byte on from which a
                longer token could begin.
        """
        keep = len(data) if is_end else self._stable_length(data)
        ids, length = [], 0
        for token_id in self.tokenize(data):
            length += len(self.vocab_bytes[token_id])
            if length > keep:
                break
            ids.append(token_id)
        return ids

    def _stable_length(self, data: bytes) -> int:
        for position in range(max(0, len(data) - self._max_token_bytes), len(data)):
            if self.trie.has_longer(data[position:]):
                return position
        return len(data)

    @cached_property
    def _max_token_bytes(self) -> int:
        return max(map(len, self.vocab_bytes), default=0)


class _EngineView:
    """The attributes that llguidance reads from a tokenizer."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens: Sequence[bytes] = [
            # Tokens without bytes need a name that no text can be.
            token or b"\xff" + engine_name(vocabulary.tokenizer.token_text(token_id)).encode()
            for token_id, token in enumerate(vocabulary.vocab_bytes)
        ]
        self.special_token_ids = [
            token_id for token_id, token in enumerate(vocabulary.vocab_bytes) if not token
        ]
        self.eos_token_id = vocabulary._end_ids[0]
        self.bos_token_id = vocabulary.tokenizer.bos_id
        self._encode = vocabulary.encode
        # As lists of integers they would be five times as large.
        self._known = lru_cache(MAX_KNOWN_TEXTS)(lambda text: array("i", vocabulary.encode(text)))

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode what a grammar forces: the same few texts, over and over."""
        plain = text if isinstance(text, str) else text.decode("utf-8")
        return self._known(plain).tolist() if len(plain) <= MAX_KNOWN_CHARACTERS else self._encode(plain)
