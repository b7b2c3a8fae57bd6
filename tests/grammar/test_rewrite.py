"""The rewriting of JSON Schema keeps its meaning: masks against the reference validator, value by value."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from radixrt.constraints import GrammarSpec
from radixrt.errors import GrammarTooCostly, UnsupportedGrammar
from radixrt.grammar.compile import DEFAULT_LIMITS, compile_for
from radixrt.grammar.vocabulary import GrammarVocabulary
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer

TOKENIZER = byte_tokenizer(extra=JSON_MERGES)
VOCABULARY = GrammarVocabulary(TOKENIZER)

SCALARS: list[Any] = [None, True, False, 0, 1, 2, -3, 0.5, "", "a", "b", "ab", "éé"]
OBJECTS: list[Any] = [
    dict(zip(names, values, strict=True))
    for count in range(3)
    for names in itertools.combinations("abc", count)
    for values in itertools.product((1, "a", None), repeat=count)
]
ARRAYS: list[Any] = [
    list(items) for length in range(4) for items in itertools.product((1, "a", True), repeat=length)
]
VALUES = [*SCALARS, *OBJECTS, *ARRAYS, {"a": {"a": 1}}, {"a": {"b": "x"}}, [[1], [1]]]


class Judge:
    """Asks the masks about texts, byte by byte where no run is forced."""

    def __init__(self, schema: Any) -> None:
        self.grammar = compile_for(GrammarSpec.json_schema(schema), VOCABULARY, DEFAULT_LIMITS)

    def accepts(self, value: Any) -> bool:
        data = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
        matcher = self.grammar.start()
        while data:
            forced = matcher.forced_tokens()
            token_id = forced[0] if forced else data[0]
            token = TOKENIZER.vocab_bytes[token_id]
            if not data.startswith(token) or not matcher.accept(token_id):
                return False
            data = data[len(token) :]
        return matcher.is_accepting


TAG = {"properties": {"a": {"const": 1}}, "required": ["a"]}
EXACT: dict[str, Any] = {
    "one of types": {"oneOf": [{"type": "string"}, {"type": "null"}, {"type": "object"}]},
    "one of tags": {"oneOf": [TAG, {"properties": {"a": {"const": "a"}}, "required": ["a"]}], "type": "object"},
    "one of required": {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
    "one of ranges": {"type": "integer", "oneOf": [{"minimum": 1}, {"maximum": -1}]},
    "one of overlapping ranges": {"type": "number", "oneOf": [{"minimum": 0}, {"maximum": 1}]},
    "one of patterns": {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
    "one of lengths": {"oneOf": [{"minLength": 2}, {"maxLength": 1, "type": "string"}]},
    "one of open objects": {
        "oneOf": [
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": False, "type": "object"},
            {"properties": {"b": {"type": "integer"}}, "additionalProperties": False, "type": "object"},
        ]
    },
    "one of boolean schemas": {"oneOf": [True, False, {"type": "string"}]},
    "not enum": {"type": ["string", "null"], "not": {"enum": ["a", "éé", None]}},
    "not number": {"type": ["integer", "string"], "not": {"enum": [0, 1]}},
    "not type": {"not": {"type": ["string", "number", "object"]}},
    "not pattern": {"type": "string", "not": {"pattern": "^[ab]+$"}},
    "not required": {"type": "object", "not": {"required": ["b"]}},
    "not property": {"not": {"type": "object", "properties": {"a": {"type": "string"}}}},
    "not object": {"type": "object", "not": {"const": {"a": 1}}},
    "not array": {"type": "array", "not": {"const": [1, "a"]}},
    "not closed object": {"type": "object", "not": {"properties": {"a": True}, "additionalProperties": False}},
    "not not": {"not": {"not": {"type": "string"}}},
    "not any": {"not": {"anyOf": [{"type": "string"}, {"required": ["a"], "type": "object"}]}},
    "not tuple": {"type": "array", "not": {"prefixItems": [{"type": "number"}, {"type": "string"}]}},
    "not contains": {"type": "array", "not": {"contains": {"const": "a"}}},
    "if then else": {"if": TAG, "then": {"required": ["b"]}, "else": {"properties": {"c": False}}, "type": "object"},
    "if type": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "if else": {"if": {"properties": {"a": {"const": 1}}}, "else": {"required": ["c"]}, "type": "object"},
    "dependent required": {"dependentRequired": {"a": ["b"], "c": ["a"]}},
    "dependent schemas": {"dependentSchemas": {"a": {"properties": {"b": {"const": 1}}}, "c": False}},
    "dependencies": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "dependencies": {"a": ["b"], "b": {"properties": {"a": {"type": "string"}}}},
    },
    "property names": {"propertyNames": {"pattern": "^[ac]"}},
    "property names by enum": {"properties": {"a": {"type": "integer"}}, "propertyNames": {"enum": ["a", "b"]}},
    "property names and patterns": {"patternProperties": {"[ab]": {"type": "integer"}}, "propertyNames": {"maxLength": 1, "not": {"const": "b"}}},
    "overlapping patterns": {"patternProperties": {"[ab]": {"type": ["integer", "null"]}, "[bc]": {"type": ["null", "string"]}}},
    "at least one": {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
    "exactly one": {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 1, "maxProperties": 1, "additionalProperties": False},
    "at most one": {"properties": {"a": {}, "b": {}}, "maxProperties": 1},
    "all of two": {"properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False},
    "none": {"properties": {"a": {}}, "maxProperties": 0},
    "contains in short": {"maxItems": 3, "contains": {"const": "a"}},
    "contains twice": {"maxItems": 3, "contains": {"type": "string"}, "minContains": 2, "maxContains": 2},
    "contains zero": {"contains": {"const": 1}, "minContains": 0},
    "contains any": {"contains": True, "minContains": 2},
    "unique enum": {"type": "array", "items": {"enum": ["a", True, 1]}, "uniqueItems": True},
    "unique boolean": {"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    "unique pair": {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "uniqueItems": True},
    "unevaluated beside all of": {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False},
    "unevaluated beside any of": {
        "type": "object",
        "anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {"const": 1}}, "required": ["b"]}],
        "unevaluatedProperties": False,
    },
    "unevaluated beside if": {"type": "object", "if": TAG, "then": {"properties": {"b": {}}}, "unevaluatedProperties": False},
    "unevaluated schema": {"properties": {"a": {}}, "unevaluatedProperties": {"type": "string"}},
    "unevaluated items": {"prefixItems": [{"type": "integer"}], "allOf": [{"prefixItems": [True, {"type": "string"}]}], "unevaluatedItems": False},
    "look-ahead": {"type": "string", "pattern": "^(?!a$).*b?$"},
    "nested identifiers": {
        "$id": "http://example.com/root", "$ref": "item#/$defs/x",
        "$defs": {"i": {"$id": "item", "$defs": {"x": {"$ref": "#y"}, "y": {"$anchor": "y", "type": "integer"}}}},
    },
    "siblings of a reference": {"$ref": "#/$defs/x", "minimum": 1, "$defs": {"x": {"type": "integer", "maximum": 1}}},
    "siblings are ignored in draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/x", "minimum": 1, "definitions": {"x": {"type": "integer"}}},
    "recursive one of": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"oneOf": [{"type": "integer"}, {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "additionalProperties": False}]}},
    },
    "unknown format": {"type": "string", "format": "color"},
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_masks_and_validator_agree_on_every_value(name: str) -> None:
    schema = EXACT[name]
    judge = Judge(schema)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    wrong = [
        (value, validator.is_valid(value))
        for value in VALUES
        if judge.accepts(value) != validator.is_valid(value)
    ]
    assert not wrong, wrong[:5]


def random_schema(draw: random.Random, depth: int) -> Any:
    """Draw a schema with a few keywords of all kinds."""
    if depth == 0 or draw.random() < 0.1:
        return draw.choice(
            [True, False, {"type": "string"}, {"type": "integer"}, {"const": 1}, {"enum": ["a", "b"]}, {"type": ["null", "object"]}, {"maxLength": 1}, {"minimum": 1}]
        )  # fmt: skip

    def part() -> Any:
        return random_schema(draw, depth - 1)

    makers: dict[str, Any] = {
        "type": lambda: draw.choice(["object", "array", "string", "number", ["object", "null"]]),
        "properties": lambda: {name: part() for name in draw.sample("abc", 2)},
        "required": lambda: draw.sample("abc", draw.randrange(3)),
        "additionalProperties": part,
        "patternProperties": lambda: {draw.choice(["^a", "[bc]", "c$"]): part()},
        "items": part,
        "prefixItems": lambda: [part() for _ in range(draw.randrange(1, 3))],
        "minItems": lambda: draw.randrange(3),
        "maxItems": lambda: draw.randrange(4),
        "minProperties": lambda: draw.randrange(3),
        "maxProperties": lambda: draw.randrange(3),
        "oneOf": lambda: [part() for _ in range(draw.randrange(1, 4))],
        "anyOf": lambda: [part() for _ in range(draw.randrange(1, 3))],
        "allOf": lambda: [part() for _ in range(draw.randrange(1, 3))],
        "not": part,
        "if": part,
        "then": part,
        "else": part,
        "dependentRequired": lambda: {draw.choice("abc"): [draw.choice("abc")]},
        "dependentSchemas": lambda: {draw.choice("abc"): part()},
        "propertyNames": lambda: draw.choice([{"pattern": "[ab]"}, {"enum": ["a", "c"]}, {"maxLength": 0}]),
        "contains": part,
        "maxContains": lambda: draw.randrange(3),
        "uniqueItems": lambda: True,
        "unevaluatedProperties": part,
        "unevaluatedItems": part,
    }
    return {name: makers[name]() for name in draw.sample(sorted(makers), draw.randrange(1, 5))}


@pytest.mark.parametrize("seed", range(250))
def test_random_schemas_are_exact_or_refused(seed: int) -> None:
    schema = random_schema(random.Random(seed), 2)
    validator = jsonschema.Draft202012Validator(schema)
    try:
        judge = Judge(schema)
    except (GrammarTooCostly, UnsupportedGrammar) as error:
        is_called_empty = "accepts no" in str(error)
        assert not (is_called_empty and any(map(validator.is_valid, VALUES))), schema
        return
    for value in VALUES:
        is_valid, is_accepted = validator.is_valid(value), judge.accepts(value)
        assert is_valid or not is_accepted, f"invalid accepted: {json.dumps(schema)} {value!r}"
        if not isinstance(value, dict) or len(value) < 2:  # keys come in the order of the schema
            assert is_accepted or not is_valid, f"valid refused: {json.dumps(schema)} {value!r}"
