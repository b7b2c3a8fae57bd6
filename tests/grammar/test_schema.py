"""JSON Schema: what is enforced is exact, what is not is refused by name."""

from __future__ import annotations

import json
import random
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarKind, GrammarSpec
from radixrt.errors import GrammarTooCostly, InvalidRequest, UnsupportedGrammar
from radixrt.grammar import CompiledGrammar, GrammarCache, compile
from radixrt.grammar.schema.keywords import KNOWN
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer

TOKENIZER = byte_tokenizer(extra=JSON_MERGES)
CACHE = GrammarCache(TOKENIZER)


def accepts(
    schema: Any, text: str, *, whitespace: Literal["compact", "flexible", "none"] = "compact"
) -> bool:
    """Tell whether the masks let this text through, byte by byte where no run is forced."""
    grammar = CACHE.get(GrammarSpec.json_schema(schema, whitespace=whitespace))
    matcher = grammar.start()
    data = text.encode()
    while data:
        forced = matcher.forced_tokens()
        token = TOKENIZER.vocab_bytes[forced[0]] if forced else data[:1]
        if not data.startswith(token) or not matcher.accept(forced[0] if forced else data[0]):
            return False
        data = data[len(token) :]
    return matcher.is_accepting


def complete(grammar: CompiledGrammar, seed: int, num_steps: int = 400) -> str | None:
    """Give a random text that the masks lead to, None if it did not end in time.

    Short tokens that close something are drawn more often, so that most texts end.
    """
    generator = random.Random(seed)
    matcher, data = grammar.start(), b""
    row = np.zeros((TOKENIZER.vocab_size + 31) // 32, dtype=np.int32)
    for _ in range(num_steps):
        if matcher.is_accepting and (matcher.is_terminated or generator.random() < 0.5):
            return data.decode()
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        assert allowed, f"seed {seed}: dead end after {data!r}"
        closing = [
            token_id for token_id in allowed if set(TOKENIZER.vocab_bytes[token_id]) <= set(b'"]}:,tfn0')
        ]
        token_id = generator.choice(closing if closing and generator.random() < 0.7 else allowed)
        assert matcher.accept(token_id)
        data += TOKENIZER.vocab_bytes[token_id]
    return None


def refusal(schema: Any) -> UnsupportedGrammar:
    with pytest.raises(UnsupportedGrammar) as caught:
        CACHE.get(GrammarSpec.json_schema(schema))
    return caught.value


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    """A nested model."""

    street: str = Field(min_length=1, max_length=8)
    number: int = Field(ge=1, le=999)


class Person(BaseModel):
    name: str = Field(pattern="^[A-Z][a-z]+$", description="given name")
    nickname: str | None = None
    color: Color
    kind: Literal["a", "b"] = "a"
    scores: list[float] = Field(max_length=3)
    address: Address
    friends: list[Person] = Field(default_factory=list, max_length=1)
    pair: tuple[int, bool] = (1, True)
    labels: dict[str, int] = Field(default_factory=dict)


def test_pydantic_models_work() -> None:
    grammar = CACHE.get(GrammarSpec.json_schema(Person.model_json_schema()))
    texts = [text for seed in range(40) if (text := complete(grammar, seed, 600)) is not None]
    assert len(texts) >= 10
    for text in texts:
        Person.model_validate_json(text)
        assert grammar.check(text)


SCHEMAS: dict[str, Any] = {
    "anything": True,
    "nothing declared": {},
    "object": {"type": "object", "additionalProperties": {"type": "integer"}},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20}},
    "multiples": {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "minItems": 1},
    "strings": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
    "formats": {"type": "array", "prefixItems": [{"type": "string", "format": "date"}], "items": {"format": "ipv4"}},
    "consts": {"enum": [1, "a\"b", None, {"k": [1, 2]}, "日本"]},
    "allOf": {
        "allOf": [
            {"$ref": "#/$defs/a"},
            {"properties": {"y": {"type": "integer"}}, "required": ["y"]},
        ],
        "$defs": {"a": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
    },
    "tagged": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k", "v"]},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
        ]
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    },
    "patterns": {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("whitespace", ["compact", "flexible", "none"])
def test_random_completions_are_valid(name: str, whitespace: Literal["compact", "flexible", "none"]) -> None:
    schema = SCHEMAS[name]
    grammar = CACHE.get(GrammarSpec.json_schema(schema, whitespace=whitespace))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    texts = [text for seed in range(25) if (text := complete(grammar, seed)) is not None]
    assert len(texts) >= 5
    for text in texts:
        validator.validate(json.loads(text))
        assert grammar.check(text)


PATTERNED = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "pattern": r"\.png$"},
        "url": {"type": "string", "pattern": "^https://.*/x$"},
        "kind": {"type": "string", "pattern": "^mqtt:a$|^mqtt:b$"},
        "count": {"type": "integer", "exclusiveMinimum": 0},
        "when": {"type": "string", "format": "date-time"},
        "long": {"type": "string", "minLength": 30},
    },
    "required": ["file", "url", "kind", "count", "when", "long"],
}


@pytest.mark.parametrize("name", [*SCHEMAS, "person", "patterned"])
def test_every_text_can_be_closed_and_is_valid_then(name: str) -> None:
    schema = {**SCHEMAS, "person": Person.model_json_schema(), "patterned": PATTERNED}[name]
    grammar = CACHE.get(GrammarSpec.json_schema(schema))
    generator = random.Random(8)
    row = np.zeros((TOKENIZER.vocab_size + 31) // 32, dtype=np.int32)
    for _ in range(5):
        matcher, ids = grammar.start(), []
        for _ in range(generator.randrange(25)):
            matcher.fill_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            if not allowed:
                break
            ids.append(generator.choice(allowed))
            assert matcher.accept(ids[-1])
        run = matcher.closing_run(400)
        assert run is not None
        assert grammar.check(TOKENIZER.decode([*ids, *run])), TOKENIZER.decode([*ids, *run])


def test_key_order_is_schema_order() -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    assert accepts(schema, '{"b":1,"a":2}')
    assert not accepts(schema, '{"a":2,"b":1}')


def test_whitespace_is_bounded() -> None:
    """Endless whitespace was vllm #13260."""
    schema = {"type": "array", "items": {"type": "integer"}}
    assert accepts(schema, "[1, 2]")
    assert accepts(schema, "[1,2]")
    assert not accepts(schema, "[1,  2]")
    assert not accepts(schema, "[ 1]")
    assert accepts(schema, "[1,2]", whitespace="none")
    assert not accepts(schema, "[1, 2]", whitespace="none")
    assert accepts(schema, "[\n 1 ,\t2 ]", whitespace="flexible")
    assert accepts(schema, f"[{' ' * 20}1]", whitespace="flexible")
    assert not accepts(schema, f"[{' ' * 21}1]", whitespace="flexible")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "required": ["a"]}, "{}"),  # xgrammar #104
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "additionalProperties": False,
                "anyOf": [{"required": ["a"]}, {"properties": {"a": {"type": "integer"}}}],
            },
            '{"b":1}',
        ),  # xgrammar #858
        (
            {"type": "object", "properties": {"aa": {"type": "string"}}, "patternProperties": {"^a": {"minLength": 2}}},
            '{"aa":"x"}',
        ),  # llguidance #265
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "4"),  # vllm PR 56616
        ({"type": "string"}, '"a'),  # xgrammar PR 905
    ],
)  # fmt: skip
def test_public_reports_of_accepted_invalid_values(schema: Any, text: str) -> None:
    assert not accepts(schema, text)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a/b": {"not": {"format": "date", "type": "string"}}}}, "/properties/a~1b/not"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
        ({"if": {"multipleOf": 3}, "then": {"minimum": 1}}, "/if"),
        ({"items": {"contains": {"const": 1}}}, "/items/contains"),
        ({"propertyNames": {"format": "email"}}, "/propertyNames"),
        ({"dependentSchemas": {"a": {"not": {"uniqueItems": True}}}}, "/dependentSchemas/a/not"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"not": {"format": "uri"}}]}}}, "/$defs/x/anyOf/0/not"),
        ({"contains": {"const": 1}, "unevaluatedItems": False, "maxItems": 2}, "/unevaluatedItems"),
        ({"$recursiveRef": "#"}, "/$recursiveRef"),
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}}}, "/properties/a/oneOf"),
        ({"items": {"type": "string", "pattern": "((?=a).)*"}}, "/items/pattern"),
        (
            {"properties": {"a": {"pattern": "a+"}, "b": {"items": {"pattern": r"\bfoo"}}}},
            "/properties/b/items/pattern",
        ),
        ({"properties": {"a": {"$ref": "http://example.com/s"}}}, "/properties/a/$ref"),
        ({"$ref": "other.json#/x"}, "/$ref"),
        ({"properties": {"a": {"type": "object", "properties": {"b": {}}, "minProperties": 3}}}, "/properties/a/minProperties"),
        ({"properties": {"a": {"const": 12345678901234567890123}}}, "/properties/a/const"),
        ({"items": {"enum": [1, {"a": [2**64 + 1]}]}}, "/items/enum"),
        ({"type": "integer", "maximum": 10**400}, "/maximum"),
        ({"type": "integer", "minimum": -1e30, "maximum": -1e29}, "/minimum"),  # ended the process
        ({"type": "integer", "exclusiveMinimum": 9.3e18, "maximum": 9.4e18}, "/exclusiveMinimum"),
    ],
)  # fmt: skip
def test_refused_keywords_are_named_by_pointer(schema: Any, pointer: str) -> None:
    error = refusal(schema)
    assert error.parameter == pointer
    assert pointer in str(error)
    assert pointer.rpartition("/")[2] in str(error)


@pytest.mark.parametrize(
    "number",
    [
        2**63 - 1,
        2**63 - 2,
        2**53 + 1,
        -(2**63),
        -(2**63) + 1,
        2**63,
        2**64 - 1,
        -(2**80),
        2**60,
        2.0**60,
        -1e300,
    ],
)
def test_numbers_that_the_engine_would_round_are_refused(number: int) -> None:
    # The constants at -2**63 ended the process.
    error = refusal({"properties": {"a": {"enum": [1, {"b": [number]}]}}})
    assert error.parameter == "/properties/a/enum"
    assert "round" in str(error)


@pytest.mark.parametrize("number", [2**53, -(2**53), 10**18, -(10**22), 1e22, 0.1])
def test_large_numbers_that_keep_their_value_are_taken(number: float) -> None:
    text = complete(CACHE.get(GrammarSpec.json_schema({"const": number, "default": 10**400})), seed=0)
    assert text is not None
    assert json.loads(text) == number


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "enum": [1, 2]},
        {"type": "string", "pattern": "^a$", "minLength": 2},
    ],
)
def test_schemas_that_accept_nothing_are_refused(schema: Any) -> None:
    assert "accepts no" in str(refusal(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"x/y": {"$ref": "#top"}}, "required": ["x/y"], "$anchor": "top"},
    ],
)  # fmt: skip
def test_recursion_without_an_end_is_refused(schema: Any) -> None:
    error = refusal(schema)
    assert "no end" in str(error)
    assert error.parameter.endswith("/$ref")


DRAFTS = [
    jsonschema.Draft4Validator,
    jsonschema.Draft6Validator,
    jsonschema.Draft7Validator,
    jsonschema.Draft201909Validator,
    jsonschema.Draft202012Validator,
]


def test_what_constrains_nothing_is_reported_as_such() -> None:
    schema = {
        "title": "t",
        "type": "array",
        "uniqueItems": False,
        "items": {"type": "string", "format": "flag-topic", "x-order": 1, "maxLenght": 2},
        "minItems": 1.0,
        "maxContains": 2,
    }
    report = CACHE.get(GrammarSpec.json_schema(schema)).report
    assert dict(report.keywords) == {
        "/title": "annotation",
        "/type": "mask",
        "/uniqueItems": "annotation",
        "/items": "mask",
        "/items/type": "mask",
        "/items/format": "annotation",
        "/items/x-order": "annotation",
        "/items/maxLenght": "annotation (unknown)",
        "/minItems": "mask",
        "/maxContains": "annotation",
    }
    assert report.unknown == ["/items/maxLenght"]
    assert accepts(schema, '["any text"]')
    assert not accepts(schema, "[]")


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_keyword_of_a_draft_is_called_unknown(draft: Any) -> None:
    assert {*draft.VALIDATORS, *draft.META_SCHEMA.get("properties", {})} <= KNOWN


def test_options_of_the_engine_cannot_be_smuggled_in() -> None:
    schema = {
        "x-guidance": {"lenient": True, "whitespace_flexible": True},
        "type": "array",
        "items": {"uniqueItems": True},
    }
    assert refusal(schema).parameter == "/items/uniqueItems"
    del schema["items"]
    assert not accepts(schema, "[ ]")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "strin"}, "/type"),
        ({"properties": {"a": {"minLength": -1}}}, "/properties/a/minLength"),
        ({"$ref": "#/$defs/none"}, "/$ref"),
        ({"$ref": "#nowhere"}, "/$ref"),
        ({"required": "a"}, "/required"),
    ],
)
def test_malformed_schemas_are_invalid_requests(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CACHE.get(GrammarSpec.json_schema(schema))
    assert caught.value.parameter == place


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"const": NaN}', '"a"', "{}}", '{"const": "\\ud800"}'])
def test_texts_that_are_no_schema_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        CACHE.get(GrammarSpec(GrammarKind.JSON_SCHEMA, text))


def test_depth_and_size_are_bounded_before_any_walk() -> None:
    deep = '{"items":' * 100_000 + "{}" + "}" * 100_000
    for text in (deep, '{"items":' * 70 + "{}" + "}" * 70, '{"const":' + "[" * 70 + "]" * 70 + "}"):
        with pytest.raises(GrammarTooCostly):
            CACHE.get(GrammarSpec(GrammarKind.JSON_SCHEMA, text))
    with pytest.raises(GrammarTooCostly, match="max_grammar_bytes"):
        compile(
            GrammarSpec.json_schema({"title": "x" * 100}),
            TOKENIZER,
            config=GrammarConfig(max_grammar_bytes=50),
        )


def test_wide_and_long_schemas_are_bounded() -> None:
    many = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(5000)}}
    with pytest.raises(GrammarTooCostly) as caught:
        CACHE.get(GrammarSpec.json_schema(many))
    assert caught.value.parameter == "/properties"
    some = {"type": "object", "properties": dict(list(many["properties"].items())[:500])}
    assert accepts(some, '{"p3":1,"p499":2}')
    chain = {f"d{index}": {"$ref": f"#/$defs/d{index - 1}"} for index in range(1, 3000)}
    options = [{"$ref": f"#/$defs/{name}"} for name in chain]
    refusal({"anyOf": options, "$defs": {"d0": {"$ref": "#/$defs/d0"}, **chain}})


def test_older_drafts_are_read_by_their_rules() -> None:
    draft4 = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "minimum": 1,
        "exclusiveMinimum": True,
        "type": "integer",
    }
    assert not accepts(draft4, "1")
    assert accepts(draft4, "2")
    draft7 = {"items": [{"type": "integer"}], "additionalItems": False, "type": "array"}
    assert accepts(draft7, "[1]")
    assert not accepts(draft7, "[1,2]")


def test_check_asserts_formats_and_reads_no_other_json() -> None:
    grammar = CACHE.get(GrammarSpec.json_schema({"type": ["string", "number"], "format": "date"}))
    assert grammar.check('"2024-02-29"')
    assert not grammar.check('"2023-02-29"')
    assert not grammar.check("NaN")
    assert not grammar.check("[" * 100_000)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1999-12-31"],
            ["2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01"],
        ),
        ("time", ["23:59:59Z", "00:00:00.5+23:59"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
        (
            "date-time",
            ["2024-02-29T12:00:00Z"],
            ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z", "2024-02-29"],
        ),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("ipv4", ["127.0.0.1"], ["256.0.0.1", "01.0.0.1"]),
    ],
)
def test_formats_are_asserted(form: str, good: list[str], bad: list[str]) -> None:
    for schema in (
        {"type": "string", "format": form},
        {"type": "string", "format": form, "pattern": "[0-9]"},
    ):
        assert all(accepts(schema, f'"{text}"') for text in good)
        assert not any(accepts(schema, f'"{text}"') for text in bad)


def test_repeated_values_of_an_enum_do_no_harm() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "enum": ["a", "b", "a"],
        "required": ["x", "x"],
    }
    assert accepts(schema, '"a"')


def test_a_format_beside_a_pattern_and_a_reference() -> None:
    schema = {"$ref": "#/$defs/day", "$defs": {"day": {"format": "date", "pattern": "^2", "type": "string"}}}
    assert accepts(schema, '"2024-01-01"')
    assert not accepts(schema, '"1024-01-01"')


def test_json_object_accepts_objects_only() -> None:
    grammar = CACHE.get(GrammarSpec.json_object())
    for seed in range(20):
        if (text := complete(grammar, seed)) is not None:
            assert isinstance(json.loads(text), dict)
    assert not grammar.check("[]")
    assert grammar.check('{"a": [1]}')


SUITE = Path(__file__).parents[2].parent / "shared" / "data" / "json_schema_suite"


@pytest.mark.skipif(not SUITE.is_dir(), reason="needs the JSON Schema test suite beside the checkout")
def test_the_public_suite_accepts_no_invalid_value() -> None:
    num_exact = num_groups = 0
    for path in sorted(SUITE.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            num_groups += 1
            try:
                CACHE.get(GrammarSpec.json_schema(group["schema"]))
            except (UnsupportedGrammar, InvalidRequest):
                continue
            verdicts = []
            for case in group["tests"]:
                text = json.dumps(case["data"], separators=(",", ":"), ensure_ascii=False)
                is_accepted = accepts(group["schema"], text)
                assert not is_accepted or case["valid"], (
                    path.name,
                    group["description"],
                    case["description"],
                )
                verdicts.append(is_accepted == case["valid"])
            num_exact += all(verdicts)
    assert num_exact >= 275, f"{num_exact} of {num_groups} groups exact"
