"""The engines that `radixrt bench grammar` compares, behind one interface."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import llguidance
import numpy as np
import outlines_core
from outlines_core import json_schema as outlines_schema

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarKind, GrammarSpec
from radixrt.errors import RequestError, UnsupportedGrammar
from radixrt.grammar.cache import GrammarCache
from radixrt.grammar.engines.llg import LLGrammar
from radixrt.grammar.matcher import CompiledGrammar, EnforcementReport, GrammarMatcher
from radixrt.grammar.vocabulary import GrammarVocabulary


class Run(Protocol):
    """One text in the making."""

    @property
    def is_accepting(self) -> bool: ...

    def fill(self) -> None:
        """Compute the next mask; the call that is timed."""
        ...

    def allowed(self) -> Sequence[int]:
        """Give the tokens with text in the mask."""
        ...

    def accept(self, token_id: int) -> bool: ...

    def forced(self) -> list[int]: ...

    def closing(self, max_tokens: int) -> list[int] | None:
        """Give tokens that end the text; None where the engine knows none."""
        ...


class Compiled(Protocol):
    def start(self) -> Run: ...

    def is_valid(self, text: str) -> bool:
        """Give the engine's own last word on a finished text; True where masks are all it has."""
        ...


class Arm(Protocol):
    """One engine."""

    @property
    def name(self) -> str: ...

    def compile(self, schema: Any) -> Compiled:
        """Raise RequestError for what the engine does not take."""
        ...


@dataclass(frozen=True)
class MatcherRun:
    """A run of a matcher of ours."""

    matcher: GrammarMatcher
    row: np.ndarray[Any, np.dtype[np.int32]]

    @property
    def is_accepting(self) -> bool:
        return self.matcher.is_accepting

    def fill(self) -> None:
        self.matcher.fill_mask(self.row)

    def allowed(self) -> Sequence[int]:
        found: list[int] = np.flatnonzero(np.unpackbits(self.row.view(np.uint8), bitorder="little")).tolist()
        return found

    def accept(self, token_id: int) -> bool:
        return self.matcher.accept(token_id)

    def forced(self) -> list[int]:
        return self.matcher.forced_tokens()

    def closing(self, max_tokens: int) -> list[int] | None:
        return self.matcher.closing_run(max_tokens)


@dataclass(frozen=True)
class _CompiledMatcher:
    grammar: CompiledGrammar
    vocab_size: int

    def start(self) -> MatcherRun:
        return MatcherRun(self.grammar.start(), np.zeros((self.vocab_size + 31) // 32, dtype=np.int32))

    def is_valid(self, text: str) -> bool:
        return not self.grammar.report.checked or self.grammar.check(text)


class RadixrtArm:
    """What this package does, as in an engine: through its cache, which asks a process of its own.

    Attributes:
        first_compile_s: what the first constraint waited, the start of that process included.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        *,
        name: str = "radixrt",
        on_unsupported: Literal["refuse", "check"] = "refuse",
    ) -> None:
        self.name = name
        self._on_unsupported: Literal["refuse", "check"] = on_unsupported
        self._vocab_size = vocabulary.vocab_size
        self._cache = GrammarCache(
            vocabulary.tokenizer,
            vocab_size=vocabulary.vocab_size,
            config=GrammarConfig(grammar_cache_bytes=1 << 30),
        )
        started = time.perf_counter()
        self._cache.get(GrammarSpec.json_object())
        self.first_compile_s = time.perf_counter() - started

    def compile(self, schema: Any) -> Compiled:
        spec = GrammarSpec.json_schema(schema, on_unsupported=self._on_unsupported)
        return _CompiledMatcher(self._cache.get(spec), self._vocab_size)

    def warm_s(self, schema: Any, count: int) -> list[float]:
        """Give the times of some requests for a schema that is compiled already, each with a text of its own."""
        text = json.dumps(schema, ensure_ascii=False)
        times = []
        for _ in range(count):
            spec = GrammarSpec(
                GrammarKind.JSON_SCHEMA, "".join(list(text)), on_unsupported=self._on_unsupported
            )
            started = time.perf_counter()
            self._cache.get(spec)
            times.append(time.perf_counter() - started)
        return times

    def close(self) -> None:
        """End the processes."""
        self._cache.close()


@dataclass(frozen=True)
class LLGuidanceArm:
    """llguidance alone, strict, with the same whitespace."""

    vocabulary: GrammarVocabulary
    name: str = "llguidance"

    def compile(self, schema: Any) -> Compiled:
        options = {
            **{"lenient": False, "coerce_one_of": False, "whitespace_flexible": False},
            **{"item_separator": ", ?", "key_separator": ": ?"},
        }
        schema = {"allOf": [schema]} if isinstance(schema, bool) else schema  # options need an object
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text)
        if is_error:
            raise UnsupportedGrammar(messages[0], parameter="")
        grammar = LLGrammar(
            GrammarSpec.json_schema(True),
            self.vocabulary,
            grammar=text,
            report=EnforcementReport(engine=self.name),
        )
        return _CompiledMatcher(grammar, self.vocabulary.vocab_size)


class OutlinesArm:
    """outlines-core: the schema as a regular expression, its automaton over the whole vocabulary."""

    name = "outlines-core"

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        by_bytes: dict[bytes, list[int]] = {}
        for token_id, token in enumerate(vocabulary.vocab_bytes):
            if token:
                by_bytes.setdefault(token, []).append(token_id)
        self._vocabulary = outlines_core.Vocabulary(len(vocabulary.vocab_bytes), by_bytes)
        self._vocab_bytes = vocabulary.vocab_bytes

    def compile(self, schema: Any) -> Compiled:
        try:
            pattern = outlines_schema.build_regex_from_schema(json.dumps(schema))
            return _OutlinesIndex(outlines_core.Index(pattern, self._vocabulary), len(self._vocab_bytes))
        except (ValueError, RuntimeError, TypeError) as error:
            raise UnsupportedGrammar(str(error)[:200], parameter="") from None

    def pattern(self, schema: Any) -> re.Pattern[str]:
        """Give the regular expression alone: it judges values where the automaton would take too long."""
        try:
            return re.compile(outlines_schema.build_regex_from_schema(json.dumps(schema)))
        except (ValueError, RuntimeError, TypeError, re.error, RecursionError) as error:
            raise UnsupportedGrammar(str(error)[:200], parameter="") from None


@dataclass(frozen=True)
class _OutlinesIndex:
    index: Any
    end_id: int

    def start(self) -> _OutlinesRun:
        return _OutlinesRun(self.index, self.end_id)

    def is_valid(self, text: str) -> bool:
        return True


class _OutlinesRun:
    def __init__(self, index: Any, end_id: int) -> None:
        self._index = index
        self._end_id = end_id
        self._allowed: Sequence[int] = ()
        self._state = index.get_initial_state()

    @property
    def is_accepting(self) -> bool:
        return bool(self._index.is_final_state(self._state))

    def fill(self) -> None:
        self._allowed = self._index.get_allowed_tokens(self._state) or ()

    def allowed(self) -> Sequence[int]:
        return [token_id for token_id in self._allowed if token_id != self._end_id]

    def accept(self, token_id: int) -> bool:
        following = self._index.get_next_state(self._state, token_id)
        if following is None:
            return False
        self._state = following
        return True

    def forced(self) -> list[int]:
        self.fill()
        return list(self._allowed) if len(self._allowed) == 1 and not self.is_accepting else []

    def closing(self, max_tokens: int) -> list[int] | None:
        return None


__all__ = ["Arm", "Compiled", "LLGuidanceArm", "OutlinesArm", "RadixrtArm", "RequestError", "Run"]
