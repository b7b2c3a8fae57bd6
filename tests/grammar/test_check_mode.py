"""on_unsupported="check": masks that allow at least what is valid, and a judge that is exact and always answers."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import pytest

from radixrt import GrammarSpec
from radixrt.errors import GrammarDeadEnd, GrammarTooCostly, InvalidRequest, UnsupportedGrammar
from radixrt.grammar import CompiledGrammar, GrammarCache
from radixrt.grammar.schema.validator import MAX_JUDGE_S, SchemaValidator
from tests.grammar.test_rewrite import VALUES, random_schema
from tests.support.tokenizers import byte_tokenizer

CACHE = GrammarCache(byte_tokenizer())
DISTINCT = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def compiled(schema: Any) -> CompiledGrammar:
    return CACHE.get(GrammarSpec.json_schema(schema, on_unsupported="check"))


def mask_allows(grammar: CompiledGrammar, text: str) -> bool:
    """Tell whether the masks let a text through; where a run is forced it has to be that."""
    matcher, data = grammar.start(), text.encode()
    while data:
        token_id = (matcher.forced_tokens() or [data[0]])[0]
        if token_id != data[0] or not matcher.accept(token_id):
            return False
        data = data[1:]
    return matcher.is_accepting


# schema, keywords that must be checked, valid values, values that the mask allows and the judge refuses
CASES: dict[str, tuple[Any, list[str], list[Any], list[Any]]] = {
    "unique": (DISTINCT, ["/uniqueItems"], [[], ["a", "b"]], [["a", "a"]]),
    "one of becomes any of": (
        {"oneOf": [{"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}}, {"type": "array", "items": {"enum": [2, 3]}, "maxItems": 40}]},
        ["/oneOf"],
        [[2, 1], [2, 3], []],
        [],
    ),
    "below not": (
        {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 30, "not": {"uniqueItems": True}},
        ["/not"],
        [["a", "a"]],
        [["a", "b"], []],
    ),
    "below if": (
        {"type": "array", "items": {"type": "string"}, "if": {"uniqueItems": True}, "then": {"maxItems": 1}, "else": {"minItems": 3}},
        ["/if", "/then", "/else"],
        [["a"], ["a", "a", "b"], []],
        [["a", "b"], ["a", "a"]],
    ),
    "through a reference below not": (
        {"items": {"type": "string"}, "type": "array", "not": {"$ref": "#/$defs/u"}, "$defs": {"u": {"uniqueItems": True}}},
        ["/not"],
        [["a", "a"]],
        [["a", "b"]],
    ),
    "a reference above and below": (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/u"}, "b": {"not": {"$ref": "#/$defs/u"}}}, "required": ["a", "b"], "additionalProperties": False, "$defs": {"u": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}},
        ["/$defs/u/uniqueItems", "/properties/b/not"],
        [{"a": ["x"], "b": ["x", "x"]}, {"a": ["x", "y"], "b": 1}],
        [{"a": ["x", "x"], "b": ["x", "x"]}, {"a": [], "b": []}],
    ),
    "one of with a branch that cannot be masked": (
        {"oneOf": [{"type": "array", "items": {"type": "string"}, "uniqueItems": True}, {"type": "array", "items": {"type": "string"}, "minItems": 2}]},
        ["/oneOf"],
        [["a"], ["a", "a"]],
        [["a", "b"]],
    ),
    "look-behind": ({"type": "string", "pattern": "(?<=b)$"}, ["/pattern"], ["ab"], ["ba"]),
    "back reference": ({"type": "string", "pattern": "^(a|b)\\1$"}, ["/pattern"], ["aa"], ["ab"]),
    "pattern of names": (
        {"type": "object", "patternProperties": {"^(a|b)\\1$": {"type": "integer"}}, "additionalProperties": False},
        ["/patternProperties", "/additionalProperties"],
        [{"aa": 1}, {}],
        [{"aa": "x"}, {"ab": 1}],
    ),
    "unevaluated": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "allOf": [{"dependentSchemas": {"a": {"properties": {"b": {"uniqueItems": True, "type": "array"}}}}}], "unevaluatedProperties": False},
        ["/allOf/0/dependentSchemas/a/properties/b/uniqueItems"],
        [{"a": 1, "b": [1, "a"]}, {"a": 1}],
        [{"a": 1, "b": [1, 1]}],
    ),
    "contains": (
        {"type": "array", "items": {"type": "string"}, "contains": {"pattern": "(?<=x)$"}},
        ["/contains"],
        [["ax"]],
        [["a"]],
    ),
    "at most so many": (
        {"type": "array", "items": {"type": "string"}, "contains": {"minLength": 2}, "maxContains": 1, "minContains": 0, "maxItems": 50},
        ["/contains", "/maxContains", "/minContains"],
        [["a"], ["aa", "a"]],
        [["aa", "aa"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_mask_allows_what_is_valid_and_the_judge_is_exact(name: str) -> None:
    schema, checked, valid, invalid = CASES[name]
    grammar = compiled(schema)
    assert set(checked) <= set(grammar.report.checked)
    validator = jsonschema.Draft202012Validator(schema)
    for value in valid:
        assert validator.is_valid(value)
        text = json.dumps(value, separators=(",", ":"))
        assert mask_allows(grammar, text), text
        assert grammar.check(text), text
    for value in invalid:
        assert not validator.is_valid(value)
        text = json.dumps(value, separators=(",", ":"))
        assert mask_allows(grammar, text), text
        assert not grammar.check(text), text


@pytest.mark.parametrize("seed", range(300))
def test_random_schemas_are_judged_and_their_masks_are_weaker(seed: int) -> None:
    schema = random_schema(random.Random(seed + 250), 2)
    validator = jsonschema.Draft202012Validator(schema)
    try:
        grammar = compiled(schema)
    except (GrammarTooCostly, UnsupportedGrammar) as error:
        is_called_empty = "accepts no" in str(error)
        assert not (is_called_empty and any(map(validator.is_valid, VALUES))), schema
        return
    for value in VALUES if grammar.report.checked else ():
        text, is_valid = (
            json.dumps(value, separators=(",", ":"), ensure_ascii=False),
            validator.is_valid(value),
        )
        assert grammar.check(text) == is_valid, text
        if not isinstance(value, dict) or len(value) < 2:  # keys come in the order of the schema
            assert not is_valid or mask_allows(grammar, text), text


@pytest.mark.parametrize("name", CASES)
def test_is_refused_without_check_by_its_pointer(name: str) -> None:
    schema = CASES[name][0]
    with pytest.raises(UnsupportedGrammar) as caught:
        CACHE.get(GrammarSpec.json_schema(schema))
    assert caught.value.parameter


def test_what_masks_can_enforce_is_not_checked() -> None:
    schema = {"type": "object", "properties": {"a": DISTINCT, "b": {"enum": [1, 2]}}, "required": ["b"]}
    report = compiled(schema).report
    assert report.checked == ["/properties/a/uniqueItems"]
    assert report.keywords["/properties/b/enum"] == "mask"


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"$ref": "https://example.com/schema"}, UnsupportedGrammar),
        ({"$ref": "#/nowhere"}, InvalidRequest),
        (False, UnsupportedGrammar),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, UnsupportedGrammar),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, UnsupportedGrammar),
        ({"type": "string", "pattern": "((a{1,50}){1,50}){1,20}"}, GrammarTooCostly),
        ({"type": 3}, InvalidRequest),
        (
            {"unevaluatedProperties": False, "patternProperties": {"(a|b)\\1": True}},
            UnsupportedGrammar,
        ),
    ],
)
def test_some_things_are_refused_all_the_same(schema: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        compiled(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^(a|a)*$"},
        {"patternProperties": {"^(a+)+$": {"type": "integer"}}},
        {"patternProperties": {"^(a+)+$": True}, "additionalProperties": False},
        {"propertyNames": {"pattern": "^(a|aa)+$"}},
        {"items": {"pattern": "(a*)*b"}},
    ],
)
def test_a_hostile_pattern_has_an_answer_in_time(schema: Any) -> None:
    validator, text = SchemaValidator.build(schema), "a" * 60 + "!"
    started = time.process_time()
    for value in (text, {text: "x"}, [text]):
        assert validator.judge(json.dumps(value)) in (True, False, None)
    assert time.process_time() - started < 20 * MAX_JUDGE_S


def test_a_schema_that_doubles_its_work_has_an_answer_in_time() -> None:
    definitions = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d40": {"type": "integer"}}}
    started = time.process_time()
    assert SchemaValidator.build(schema).judge("1") is None
    assert time.process_time() - started < 20 * MAX_JUDGE_S


@pytest.mark.parametrize(
    ("schema", "text", "verdict"),
    [
        ({"multipleOf": 0.5}, "1" + "0" * 400, None),
        ({"multipleOf": 0.1}, "1e400", None),
        ({"multipleOf": 10**400}, "1.5", None),
        ({"multipleOf": 3}, "1e400", False),
        ({"maximum": 10**400}, "1.5", True),
    ],
)
def test_a_huge_number_is_no_accident(schema: Any, text: str, verdict: bool | None) -> None:
    assert SchemaValidator.build(schema).judge(text) is verdict


@pytest.mark.parametrize(
    ("items", "are_unique"),
    [
        ("[[1], [true], [1]]", False),
        ('[{"a": 1, "b": [2]}, 3, {"b": [2.0], "a": 1.0}]', False),
        ('[1, true, 0, false, null, "1", [1], [true], {}, []]', True),
        ('[{"a": 1}, {"a": true}, {"b": 1}, {"a": "1"}]', True),
    ],
)
def test_items_are_told_apart_as_the_standard_does(items: str, are_unique: bool) -> None:
    assert SchemaValidator.build({"uniqueItems": True}).judge(items) is are_unique


def test_many_items_are_told_apart_in_time() -> None:
    validator = SchemaValidator.build({"uniqueItems": True})
    text = json.dumps([{"a": number} for number in range(3000)])
    started = time.process_time()
    assert validator.judge(text) is True
    assert time.process_time() - started < 20 * MAX_JUDGE_S


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        ("(a", UnsupportedGrammar),
        ("(?R)(?=b)", UnsupportedGrammar),
        ("(a)(?1)(?=b)", UnsupportedGrammar),
        ("^(?:foo){e<=2}(?<=o)$", UnsupportedGrammar),
        ("^[[:alpha:]](?<=a)$", UnsupportedGrammar),
        ("a" * 200_000 + "(?=b)", GrammarTooCostly),
        ("[" * 19_000, UnsupportedGrammar),
        (r"\Aa(?<=a)", UnsupportedGrammar),
        (r"(?x) a(?<=a)", UnsupportedGrammar),
        (r"a{,3}(?<=a)", UnsupportedGrammar),
        (r"[]a](?<=a)", UnsupportedGrammar),
    ],
)
@pytest.mark.parametrize("place", ["/pattern", "/not/pattern", "/patternProperties"])
def test_a_pattern_that_cannot_be_judged_is_refused_at_once(
    pattern: str, error: type[Exception], place: str
) -> None:
    schemas: dict[str, Any] = {
        "/pattern": {"pattern": pattern},
        "/not/pattern": {"not": {"pattern": pattern}},
        "/patternProperties": {"patternProperties": {pattern: {"type": "integer"}}},
    }
    with pytest.raises(error) as caught:
        compiled(schemas[place])
    assert caught.value.parameter.startswith(place)


@pytest.mark.parametrize(
    "pattern",
    [r"^(?!x)\p{L}{1,3}\x41?$", r"(?<y>a)(?P=y)", r"(?i)\{e<=2\}(?<=[{e<=2}])", "(?<![a-z[])b{1,2}"],
)
def test_other_patterns_are_still_judged(pattern: str) -> None:
    assert compiled({"pattern": pattern}).report.checked == ["/pattern"]


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            r"^\d$",
            r"^\D$",
            r"^\w$",
            r"^\W$",
            r"^\s$",
            r"^\S$",
            r"^.$",
            "^a$",
            "^a",
            "a$",
            r"^[\d]$",
            r"^[^\d]$",
        ),
        *(r"^[\w.]$", r"^[^\w]$", r"^[\D]$", r"^[\W]$", r"^[\s\d]$", r"^\p{L}$", r"^\u0061\x62?$", r"^\$?$"),
    ],
)
def test_the_judge_reads_patterns_as_masks_do(pattern: str) -> None:
    signs = "a1!_- $é٣²\u00a0\ufeff\u2028\u3000\u200b\x1c\x85\t\n\r\x0b日🙂ſK"
    schema = {"type": "string", "pattern": pattern}
    grammar = compiled(schema)
    assert not grammar.report.checked
    validator = SchemaValidator.build(schema)
    for text in ("", *signs, "a\n", "ab", "\na", "1\n"):
        value = json.dumps(text, ensure_ascii=False)
        assert validator.judge(value) == mask_allows(grammar, value), text


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d+$(?<!x)", ["1"], ["٣", "1\n", ""]),
        (r"^(?<!x)[\w-z]+$", ["a-z", "_"], ["é", "a\n"]),
        (r"^(?<!x)[+-\d]$", ["+", "-", "7"], [",", "٣"]),
        (r"\bé\b(?<!x)", ["aéa"], ["é", " é "]),
        (r"^\B(?<!x)", ["", "é", "-"], ["a"]),
        (r"^(?<!x)[\b]$", ["\b"], ["b"]),
    ],
)
def test_patterns_that_only_the_judge_takes_are_read_by_the_standard(
    pattern: str, good: list[str], bad: list[str]
) -> None:
    grammar = compiled({"type": "string", "pattern": pattern})
    assert grammar.report.checked == ["/pattern"]
    assert all(grammar.check(json.dumps(text, ensure_ascii=False)) for text in good)
    assert not any(grammar.check(json.dumps(text, ensure_ascii=False)) for text in bad)


def test_a_busy_machine_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(value: Any) -> Any:
        time.sleep(2 * MAX_JUDGE_S)  # others have the processor
        return repr(value)

    monkeypatch.setattr("radixrt.grammar.schema.validator._key", late)
    schema = {"uniqueItems": True, "minItems": 1, "items": {"pattern": "^a"}}
    assert SchemaValidator.build(schema).judge('["a", "ab"]') is True


def test_a_collection_of_garbage_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10))

    def key(value: Any) -> Any:
        until = time.thread_time() + 2 * MAX_JUDGE_S * (next(calls) == 0)
        while time.thread_time() < until:  # the thread's own work, and none of the judge's
            pass
        return repr(value)

    monkeypatch.setattr("radixrt.grammar.schema.validator._key", key)
    schema = {"uniqueItems": True, "minItems": 1, "items": {"pattern": "^a"}}
    assert SchemaValidator.build(schema).judge('["a", "ab"]') is True


def test_what_cannot_be_told_in_time_is_no_success() -> None:
    grammar = compiled({"type": "string", "pattern": "^(a|aa)+(?<=a)$"})
    assert grammar.check('"aaa"')
    with pytest.raises(GrammarDeadEnd, match="limit of time"):
        grammar.check(json.dumps("a" * 60 + "!"))


def test_check_and_refuse_are_two_entries_of_the_cache() -> None:
    schema = {"type": "string"}
    one = CACHE.get(GrammarSpec.json_schema(schema))
    assert CACHE.get(GrammarSpec.json_schema(schema, on_unsupported="check")) is not one


def test_on_unsupported_belongs_to_schemas() -> None:
    spec = GrammarSpec.regex("a")
    with pytest.raises(InvalidRequest, match="on_unsupported belongs to json_schema"):
        GrammarSpec(spec.kind, spec.text, "compact", "check")
    with pytest.raises(InvalidRequest, match='must be "refuse" or "check"'):
        GrammarSpec.json_schema({}, on_unsupported="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="whitespace belongs to JSON"):
        GrammarSpec(spec.kind, spec.text, "flexible")
