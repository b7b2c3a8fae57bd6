"""xgrammar as an arm of `radixrt bench grammar`, where it is installed; nothing else needs it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixrt.errors import UnsupportedGrammar
from radixrt.grammar.vocabulary import GrammarVocabulary


def has_xgrammar() -> bool:
    """Tell whether xgrammar can be imported."""
    return importlib.util.find_spec("xgrammar") is not None


class XgrammarArm:
    """xgrammar with the semantics of the specification (not its strict mode), compact, compiling as it goes."""

    name = "xgrammar"

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        import xgrammar  # type: ignore[import-not-found]

        self._xgrammar = xgrammar
        self._vocabulary = vocabulary
        end_ids = [item for item in vocabulary.tokenizer.eos_ids if item < len(vocabulary.vocab_bytes)]
        self._end_id = end_ids[0]
        info = xgrammar.TokenizerInfo(
            list(vocabulary.vocab_bytes), vocab_size=vocabulary.vocab_size, stop_token_ids=end_ids[:1]
        )
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True
        )

    def compile(self, schema: Any) -> _Compiled:
        try:
            grammar = self._compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(",", ":"), strict_mode=False
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise UnsupportedGrammar(str(error)[:200], parameter="") from None
        return _Compiled(self._xgrammar, grammar, self._vocabulary, self._end_id)


@dataclass(frozen=True)
class _Compiled:
    xgrammar: Any
    grammar: Any
    vocabulary: GrammarVocabulary
    end_id: int

    def start(self) -> _Run:
        return _Run(self)

    def is_valid(self, text: str) -> bool:
        return True


class _Run:
    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._matcher = compiled.xgrammar.GrammarMatcher(compiled.grammar)
        self._row = np.zeros((1, (compiled.vocabulary.vocab_size + 31) // 32), dtype=np.int32)

    def fill(self) -> None:
        self._row[:] = -1
        self._matcher.fill_next_token_bitmask(self._row)

    def _bits(self) -> list[int]:
        return list(np.flatnonzero(np.unpackbits(self._row[0].view(np.uint8), bitorder="little")))

    @property
    def is_accepting(self) -> bool:
        if self._matcher.is_terminated():
            return True
        self.fill()
        return bool(
            self._row[0].view(np.uint32)[self._compiled.end_id // 32] >> self._compiled.end_id % 32 & 1
        )

    def allowed(self) -> Sequence[int]:
        is_text = self._compiled.vocabulary.is_text
        return [int(token_id) for token_id in self._bits() if is_text(int(token_id))]

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def forced(self) -> list[int]:
        text = self._matcher.find_jump_forward_string()
        ids = self._compiled.vocabulary.tokenize(text.encode()) if text else []
        return ids[:-1]  # the last one could merge with what follows

    def closing(self, max_tokens: int) -> list[int] | None:
        return None
