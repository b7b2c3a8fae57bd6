"""Hostile constraints: each is refused within its limit, and the next one works as if nothing had been."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarKind, GrammarSpec, StructuralTag
from radixrt.errors import RequestError
from radixrt.grammar import GrammarCache
from radixrt.grammar.ebnf_front import ebnf_to_engine
from radixrt.grammar.lark_front import to_engine
from radixrt.grammar.vocabulary import MAX_KNOWN_CHARACTERS, MAX_KNOWN_TEXTS, GrammarVocabulary, _EngineView
from radixrt.grammar.worker import is_plainly_small
from tests.support.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
JSON = GrammarKind.JSON_SCHEMA


def tagged(grammar: GrammarSpec) -> GrammarSpec:
    return GrammarSpec.structural([StructuralTag("<f>", grammar, "</f>")], triggers=["<f>"])


HOSTILE: dict[str, Callable[[], GrammarSpec]] = {
    "nesting": lambda: GrammarSpec(JSON, '{"type":"array","items":' * 1000 + "{}" + "}" * 1000),
    "deep nesting": lambda: GrammarSpec(JSON, '{"items":' * 100_000 + "{}" + "}" * 100_000),
    "ten megabytes": lambda: GrammarSpec(JSON, json.dumps({"title": "x" * 10_000_000})),
    "nested repeats": lambda: GrammarSpec.regex("((a{1,50}){1,50}){1,20}"),
    "nested repeats in a pattern": lambda: GrammarSpec.json_schema({"pattern": "^((a{1,50}){1,50}){1,20}$"}),
    "nested repeats in a key": lambda: GrammarSpec.json_schema({"patternProperties": {"((a{1,50}){1,50}){1,20}": True}}),
    "nested repeats in a token": lambda: GrammarSpec.lark("start: /((a{1,50}){1,50}){1,20}/"),
    "long repeat": lambda: GrammarSpec.regex(".{0,100000}"),
    "many words": lambda: GrammarSpec.regex("|".join(f"word{number}" for number in range(50_000))),
    "many choices": lambda: GrammarSpec(GrammarKind.CHOICE, json.dumps([f"word{number}" for number in range(50_000)])),
    "endless recursion": lambda: GrammarSpec.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "remote reference": lambda: GrammarSpec.json_schema({"$ref": "https://example.com/schema"}),
    "file reference": lambda: GrammarSpec.json_schema({"$ref": "file:///etc/passwd"}),
    "open parenthesis": lambda: GrammarSpec.regex("(a"),
    "backward range": lambda: GrammarSpec.regex("[z-a]"),
    "no character": lambda: GrammarSpec.regex(r"[^\s\S]"),
    "no end in lark": lambda: GrammarSpec.lark('start: a\na: "x" a'),
    "NUL in lark": lambda: GrammarSpec.lark('start: "a\0b'),
    "nested repeats in ebnf": lambda: GrammarSpec.ebnf('root ::= ((("a"{1,50}){1,50}){1,50}){1,50}'),
    "no end in ebnf": lambda: GrammarSpec.ebnf('root ::= "x" root'),
    "nested repeats in a tag": lambda: tagged(GrammarSpec.regex("((a{1,50}){1,50}){1,20}")),
    "endless recursion in a tag": lambda: tagged(
        GrammarSpec.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    ),
    "many splits": lambda: GrammarSpec.json_schema(
        {"anyOf": [{"properties": {f"k{number}": {"type": "null"}}} for number in range(30)], "unevaluatedProperties": False}
    ),
    "a product of cases": lambda: GrammarSpec.json_schema(
        {"allOf": [{"anyOf": [{"required": [f"k{i}{j}"], "properties": {f"k{i}{j}": {}}} for j in range(8)]} for i in range(10)]}
    ),
    "many dependencies": lambda: GrammarSpec.json_schema({"dependentRequired": {f"k{number}": ["z"] for number in range(100)}}),
    "complement without end": lambda: GrammarSpec.json_schema({"type": "string", "not": {"pattern": "^(a|b)*a(a|b){30}$"}}),
    "a huge number": lambda: GrammarSpec.json_schema({"type": "integer", "minimum": 10**400}),
    "an infinite number": lambda: GrammarSpec(JSON, '{"type": "number", "minimum": 1e999}'),
    "an infinite constant": lambda: GrammarSpec(JSON, '{"not": {"enum": [1e999]}}'),
    "a reference that is none": lambda: GrammarSpec.json_schema({"$ref": 5}),
    "a reference that is no URI": lambda: GrammarSpec.json_schema({"$ref": "http://[::1"}),
    "an identifier that is no URI": lambda: GrammarSpec.json_schema({"$id": "http://[::1", "$ref": "x"}),
    "parentheses in lark": lambda: GrammarSpec.lark("start: " + "(" * 3000 + '"a"' + ")" * 3000),
    "parentheses in a regex": lambda: GrammarSpec.regex("(" * 3000 + "a" + ")" * 3000),
    "negated recursion": lambda: GrammarSpec.json_schema({"not": {"$ref": "#"}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def cache() -> Iterator[GrammarCache]:
    cache = GrammarCache(TOKENIZER)
    yield cache
    cache.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_is_refused_in_time(cache: GrammarCache, name: str) -> None:
    started = time.process_time()
    with pytest.raises(RequestError):
        cache.get(HOSTILE[name]())
    assert time.process_time() - started < 2
    assert cache.get(GrammarSpec.regex("[a-z]{3}")).check("abc")


@pytest.mark.parametrize("kind", ["lark", "ebnf"])
def test_a_long_chain_of_rules_is_read_in_time(kind: str) -> None:
    text = (
        "start: r0\n" + "\n".join(f'r{number}: "a" r{number + 1}' for number in range(1500)) + '\nr1500: "b"'
    )
    config = GrammarConfig()
    started = time.process_time()
    if kind == "lark":
        found = to_engine(text, config)
    else:
        found = ebnf_to_engine(text.replace("start", "root").replace(": ", " ::= "), config)
    assert "r1500" in found.text
    assert time.process_time() - started < 3


def test_a_nul_is_a_character_like_any_other(cache: GrammarCache) -> None:
    grammar = cache.get(GrammarSpec.regex("a\0b"))
    assert grammar.check("a\0b")
    assert not grammar.check("ab")


def test_what_looks_small_is_short_and_has_few_repeats() -> None:
    assert is_plainly_small(GrammarSpec.regex("[a-z]{1,20}"))
    assert is_plainly_small(GrammarSpec.json_schema({"type": "object", "oneOf": [{"required": ["a"]}]}))
    assert is_plainly_small(tagged(GrammarSpec.regex("[a-z]{1,20}")))
    assert not is_plainly_small(tagged(GrammarSpec.regex(".{0,5000}")))
    assert not is_plainly_small(tagged(GrammarSpec.json_schema({"pattern": "a{100,2000}"})))
    assert not is_plainly_small(GrammarSpec.regex(".{0,5000}"))
    assert not is_plainly_small(GrammarSpec.json_schema({"pattern": "a{100,2000}"}))
    assert not is_plainly_small(GrammarSpec.json_schema({"enum": [str(number) for number in range(5000)]}))


def test_forced_texts_that_are_remembered_take_10_mib_at_most():
    letters = [chr(number) for number in range(0x400, 0x480)]  # each a token of its own
    view = _EngineView(GrammarVocabulary(byte_tokenizer(extra=letters)))
    rng = random.Random(1)
    texts = ["".join(rng.choices(letters, k=MAX_KNOWN_CHARACTERS)) for _ in range(200)]
    expected = [view(text) for text in texts]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        more = [text[::-1] for text in texts]
        for text in more:
            view(text)
        num_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert num_bytes < (10 << 20) / MAX_KNOWN_TEXTS * len(texts)
    view(texts[0]).clear()  # what a caller does with its list is its own affair
    assert [view(text) for text in texts] == expected
