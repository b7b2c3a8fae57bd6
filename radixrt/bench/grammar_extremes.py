"""The worst masks of constraints made to be slow, for `radixrt bench grammar`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import llguidance
import numpy as np

from radixrt.constraints import GrammarKind, GrammarSpec
from radixrt.errors import GrammarDeadEnd, RequestError
from radixrt.grammar.compile import DEFAULT_LIMITS, compile_for
from radixrt.grammar.engines.llg import LLGrammar
from radixrt.grammar.matcher import CompiledGrammar, EnforcementReport
from radixrt.grammar.regex_cost import whole_match
from radixrt.grammar.vocabulary import GrammarVocabulary

NUM_MASKS = 40
_WORDS = "|".join(f"w{number * 7919 % 100_003:x}" for number in range(2000))

# Backtracking traps, large repeats, wide classes, many alternatives, ambiguity: whatever is not refused outright.
HOSTILE: dict[str, GrammarSpec] = {
    "nested stars": GrammarSpec.regex(r"(a+)+b"),
    "same by two ways": GrammarSpec.regex(r"(a|aa)+b"),
    "twins": GrammarSpec.regex(r"(x+x+)+y"),
    "optional, then all": GrammarSpec.regex(r"(a?){60}a{60}"),
    "any text, nine times": GrammarSpec.regex(r"(.*a){9}"),
    "any text around signs": GrammarSpec.regex(r".*.*=.*;.*"),
    "a letter long ago": GrammarSpec.regex(r"(a|b)*a(a|b){14}"),
    "long any": GrammarSpec.regex(r".{0,5000}"),
    "long after long": GrammarSpec.regex(r".{1000,2000}x.{1000,2000}"),
    "words": GrammarSpec.regex(r"(\w{1,40} ){1,40}\w+"),
    "addresses": GrammarSpec.regex(r"\w{1,64}(\.\w{1,64}){0,8}@\w{1,64}(\.\w{2,24}){1,8}"),
    "letters of all scripts": GrammarSpec.regex(r"(\p{L}|\d){1,200}[^\p{L}]{1,200}"),
    "control to symbols": GrammarSpec.regex(r"[\x00-\u2e7f]+"),
    "nothing or anything": GrammarSpec.regex(r"^(|.*)$"),
    "strings with escapes": GrammarSpec.regex(r'"([^"\\]|\\.){0,100}"(,"([^"\\]|\\.){0,100}"){0,20}'),
    "two thousand words": GrammarSpec.regex(_WORDS),
    "two thousand words twice": GrammarSpec.regex(f"({_WORDS[:5000]}) ({_WORDS[:5000]})"),
    "four numbers": GrammarSpec.regex(r"(([0-9]{1,3}\.){1,30}[0-9]{1,3},){1,30}"),
    "many choices": GrammarSpec.choice([f"word{number}" for number in range(8000)]),
    "sums of sums": GrammarSpec.lark('start: start start | "a" | "(" start ")"'),
    "runs of two letters": GrammarSpec.lark("start: /a+/ /b+/+"),
    "three ways to read": GrammarSpec.lark('start: (a | b | c)+\na: "x"+\nb: "x" "x"\nc: "x" "x" "x" "y"?'),
    "optional keys": GrammarSpec.json_schema({"properties": {f"key {number}": {"type": "integer"} for number in range(400)}}),
    "many shapes": GrammarSpec.json_schema({"anyOf": [{"properties": {f"k{number}": {"const": number}}, "required": [f"k{number}"]} for number in range(60)]}),
    "patterned keys": GrammarSpec.json_schema({"patternProperties": {"^[a-m]{1,30}$": {"type": "string", "pattern": "^(a|b)*a(a|b){9}$"}}}),
}  # fmt: skip

Make = Callable[[GrammarSpec, GrammarVocabulary], CompiledGrammar | None]


def compile_here(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> CompiledGrammar | None:
    """Compile as this package does."""
    return compile_for(spec, vocabulary, DEFAULT_LIMITS)


def compile_bare(spec: GrammarSpec, vocabulary: GrammarVocabulary) -> CompiledGrammar | None:
    """Give a regular expression to llguidance as it is; None for the rest."""
    if spec.kind is not GrammarKind.REGEX:
        return None
    text = llguidance.LLMatcher.grammar_from_regex(whole_match(spec.text))
    return LLGrammar(spec, vocabulary, grammar=text, report=EnforcementReport(engine="llguidance"))


def measure_hostile(make: Make, vocabulary: GrammarVocabulary) -> Mapping[str, Any]:
    """Fill masks along random walks; give the worst time of each constraint, and why others gave none."""
    worst_ms, refused = {}, {}
    for name, spec in HOSTILE.items():
        try:
            grammar = make(spec, vocabulary)
            if grammar is not None:
                worst_ms[name] = round(1e3 * _worst_s(grammar, vocabulary), 3)
        except (RequestError, GrammarDeadEnd) as error:
            refused[name] = str(error)
    return {"worst_ms": max(worst_ms.values(), default=None), "masks_ms": worst_ms, "refused": refused}


def _worst_s(grammar: CompiledGrammar, vocabulary: GrammarVocabulary) -> float:
    matcher, draw, worst_s = grammar.start(), random.Random(0), 0.0
    row = np.zeros((vocabulary.vocab_size + 31) // 32, dtype=np.int32)
    for _ in range(NUM_MASKS):
        started = time.thread_time()
        matcher.fill_mask(row)
        worst_s = max(worst_s, time.thread_time() - started)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not allowed.size or not matcher.accept(int(draw.choice(allowed.tolist()))):
            break
    return worst_s
