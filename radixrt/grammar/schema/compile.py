"""JSON Schema to a running grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarKind, GrammarSpec
from radixrt.errors import GrammarTooCostly, RequestError, UnsupportedGrammar, first_line
from radixrt.grammar.engines.byte_dfa import ByteDFA
from radixrt.grammar.prepared import Prepared
from radixrt.grammar.regex_cost import max_states, whole_match
from radixrt.grammar.schema.front import ParsedSchema, parse_schema, read_schema
from radixrt.grammar.schema.weaken import Weakening

_WHITESPACE: dict[str, dict[str, Any]] = {
    "compact": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"},
    "none": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "flexible": {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"},
}
_MAX_PROBES = 64
_MAX_WEAKENINGS = 64
_NO_VALUE = "Unsatisfiable"  # in the engine's complaint about a schema that accepts nothing
_MAX_HINTED_PATTERNS = 32
_MAX_HINT_CHARACTERS = 32
_MAX_HINT_STATES = 600

_CLASS = re.compile(r"\\[pP]\{\w{1,20}\}|\\.", re.DOTALL)
_MEMBERS = {
    **{r"\w": "a", r"\d": "0", r"\s": " ", r"\W": " ", r"\D": "a", r"\S": "a"},
    **{r"\p{Lu}": "A", r"\p{L": "a", r"\p{N": "0", r"\p{P": ".", r"\p{Z": " "},
}

# What the engine's complaints are about: a part of the message -> the keywords to look at.
_COMPLAINTS = (
    ("oneOf", ("oneOf",)),
    ("patternProperty", ("patternProperties",)),
    ("min/maxProperties", ("minProperties", "maxProperties")),
    ("multipleOf", ("multipleOf",)),
    ("look-around", ("pattern", "patternProperties")),
    ("lookaround", ("pattern", "patternProperties")),
    ("regex", ("pattern", "patternProperties")),
    ("format", ("format",)),
    ("range", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
)


def schema_text(spec: GrammarSpec) -> str:
    """Give the schema of a constraint of the kinds json_schema and json_object."""
    return '{"type": "object"}' if spec.kind is GrammarKind.JSON_OBJECT else spec.text


def prepare(spec: GrammarSpec, config: GrammarConfig) -> Prepared:
    """Write a JSON Schema, or any JSON object for the kind json_object, in the engine's terms.

    Raises:
        GrammarTooCostly, InvalidRequest, UnsupportedGrammar: see `parse_schema`; a refused keyword is named by
            its JSON Pointer.
    """
    parsed, grammar = prepare_schema(spec, config)
    return Prepared(
        grammar=grammar,
        keywords=parsed.keywords,
        draft=parsed.validator.draft,
        hints=tuple(string_hints(parsed)),
    )


def prepare_schema(spec: GrammarSpec, config: GrammarConfig) -> tuple[ParsedSchema, str]:
    """Read a schema and write it in the engine's format; raises what `prepare` raises."""
    raw = read_schema(schema_text(spec), config)
    weakening = Weakening(raw.value, raw.validator.draft)
    for _ in range(_MAX_WEAKENINGS):
        error: RequestError
        try:
            parsed = parse_schema(raw, config, weakened=weakening.places)
            grammar = _engine_grammar(parsed.schema, spec.whitespace)
            complaint = _complaint(grammar)
            if not complaint:
                if weakening.places:
                    raw.validator.check_patterns(config)
                return parsed, grammar
            error = _refusal(parsed, complaint, spec.whitespace)
        except (UnsupportedGrammar, GrammarTooCostly) as found:
            error, complaint = found, ""
        is_hopeless = spec.on_unsupported == "refuse" or _NO_VALUE in complaint
        if is_hopeless or not raw.validator.is_bounded or not weakening.add(error.parameter):
            raise error
    raise GrammarTooCostly(
        f"more than {_MAX_WEAKENINGS} keywords cannot be enforced while generating", parameter="grammar"
    )


def string_hints(parsed: ParsedSchema) -> list[str]:
    """Give short texts that satisfy the patterns, and their ends, as they stand in JSON; the longer first."""
    patterns = [parsed.nodes[pointer]["pattern"] for pointer in parsed.pointers_of("pattern")]
    found: dict[str, None] = {}
    for pattern in list(dict.fromkeys(patterns))[:_MAX_HINTED_PATTERNS]:
        for branch in (pattern, pattern.partition("|")[0]):  # ^a$|^b$ has anchors inside
            if text := shortest_match(branch):
                escaped = json.dumps(text, ensure_ascii=False)[1:-1]
                found |= dict.fromkeys(
                    escaped[start:] for start in range(min(len(escaped), _MAX_HINT_CHARACTERS))
                )
                break
    return sorted(found, key=len, reverse=True)


def shortest_match(pattern: str) -> str | None:
    """Give a text that a pattern probably matches, about as short as there is; None if that would cost too much. Pure.

    Only probably: classes of Unicode, which take hundreds of states a character, are read as one of their characters.
    """
    body = _CLASS.sub(_member, whole_match(pattern))
    try:
        num_states = max_states(body)
        if num_states is None or num_states > _MAX_HINT_STATES:
            return None
        data = ByteDFA.from_regex(body).shortest()
    except UnsupportedGrammar:
        return None
    return None if data is None else data.decode("utf-8", "ignore")


def _member(escape: re.Match[str]) -> str:
    """Give a character of a class; another escape stays as it is."""
    return _MEMBERS.get(escape[0]) or _MEMBERS.get(escape[0][:4]) or escape[0]


def _engine_grammar(schema: Mapping[str, Any], whitespace: str) -> str:
    options = {"lenient": False, "coerce_one_of": False, **_WHITESPACE[whitespace]}
    try:
        grammar: str = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False), overrides=options
        )
    except ValueError as error:  # it reads no number beyond those of 64 bits
        raise UnsupportedGrammar(
            f"the schema is not supported: {first_line(error)}", parameter="grammar", value=str(schema)[:200]
        ) from None
    return grammar


def _complaint(grammar: str) -> str:
    """Give what the engine finds wrong, "" if nothing."""
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return (messages[0] if messages else "unknown reason") if is_error else ""


def _refusal(parsed: ParsedSchema, complaint: str, whitespace: str) -> UnsupportedGrammar:
    """Name the keyword that the engine's complaint is about."""
    place = _locate(parsed, complaint, whitespace)
    reason = " ".join(complaint.split())[:300]
    if _NO_VALUE in complaint:
        text = f"the schema accepts no value: {reason}"
    elif place:
        text = (
            f"the keyword {place.rpartition('/')[2]} at {place} cannot be enforced while generating: {reason}"
        )
    else:
        text = f"the schema is not supported: {reason}"
    return UnsupportedGrammar(text, parameter=place, value=reason)


def _locate(parsed: ParsedSchema, complaint: str, whitespace: str) -> str:
    """Find the smallest subschema that gets the same complaint; "" if it cannot be told."""
    for part, names in _COMPLAINTS:
        if part not in complaint:
            continue
        places = [(pointer, name) for name in names for pointer in parsed.pointers_of(name)]
        for pointer, name in places[:_MAX_PROBES]:
            definitions = {
                key: parsed.schema[key] for key in ("$defs", "definitions", "$schema") if key in parsed.schema
            }
            probe = {**definitions, **parsed.nodes[pointer]}
            if len(places) == 1 or _complaint(_engine_grammar(probe, whitespace)) == complaint:
                return f"{pointer}/{name}"
        if places:
            return "/".join(places[-1])
    return ""
