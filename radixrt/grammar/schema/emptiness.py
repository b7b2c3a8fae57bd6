"""Whether several schemas together provably accept no value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from radixrt.errors import GrammarTooCostly, UnsupportedGrammar
from radixrt.grammar.regex_algebra import Language, automaton, both, contains, lengths
from radixrt.grammar.regex_parse import search_language

# "fraction": numbers that are no integers. "number" means both.
ATOMIC_TYPES = ("null", "boolean", "object", "array", "string", "integer", "fraction")
_MAX_DEPTH = 5
_MAX_FACTS = 200
_MAX_STEPS = 1_500  # schemas looked at for one question
_MAX_PATTERN_STATES = 300
Resolve = Callable[[str], Any]


def atomic_types(node: Mapping[str, Any]) -> frozenset[str]:
    """Give the types that the keyword `type` of a schema allows, as atomic ones. Pure."""
    names = node.get("type", ATOMIC_TYPES)
    names = {names} if isinstance(names, str) else set(names)
    return frozenset(names - {"number"} | ({"integer", "fraction"} if "number" in names else set()))


def type_of(value: Any) -> str:
    """Give the atomic type of a JSON value. Pure."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def same(one: Any, other: Any) -> bool:
    """Tell whether two JSON values are equal: numbers by value, but never to booleans. Pure."""
    if type_of(one) != type_of(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def values_of(node: Mapping[str, Any]) -> list[Any] | None:
    """Give the values that `const` and `enum` allow, None if neither is there. Pure."""
    if "const" in node:
        value = node["const"]
        return [value] if "enum" not in node or any(same(value, other) for other in node["enum"]) else []
    return list(node["enum"]) if "enum" in node else None


class Emptiness:
    """Decides with the schemas that references lead to."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._num_steps = 0

    def is_empty(self, schemas: Iterable[Any], *, depth: int = 0) -> bool:
        """Tell whether no value is valid under all schemas; False may also mean: not known.

        Cost: bounded: at most 1,500 schemas are looked at, five levels deep.
        """
        self._num_steps = 0 if depth == 0 else self._num_steps
        if depth > _MAX_DEPTH or (facts := self._flatten(schemas)) is None:
            return False
        self._num_steps += len(facts)
        if self._num_steps > _MAX_STEPS:
            return False
        if any(fact is False for fact in facts):
            return True
        nodes = [fact for fact in facts if isinstance(fact, dict)]
        for values in filter(lambda found: found is not None, map(values_of, nodes)):
            return not any(
                all(self.admits(node, value) is not False for node in nodes) for value in values or ()
            )
        for node in nodes:
            for keyword in ("anyOf", "oneOf"):
                options = node.get(keyword)
                rest = _without(nodes, node, keyword) if options else []
                if options and all(self.is_empty([*rest, option], depth=depth + 1) for option in options):
                    return True
        types = frozenset.intersection(frozenset(ATOMIC_TYPES), *map(atomic_types, nodes))
        return all(self._excludes(name, nodes, depth) for name in types)

    def _flatten(self, schemas: Iterable[Any]) -> list[Any] | None:
        """Give the schemas with those under allOf and behind references beside them; None if there are too many."""
        found: list[Any] = []
        pending, seen = list(schemas), set[str]()
        while pending:
            schema = pending.pop()
            if len(found) > _MAX_FACTS:
                return None
            found.append(schema)
            if isinstance(schema, dict):
                pending += schema.get("allOf", ())
                if "$ref" in schema and schema["$ref"] not in seen:
                    seen.add(schema["$ref"])
                    pending.append(self._resolve(schema["$ref"]))
        return found

    def _excludes(self, name: str, nodes: Sequence[Mapping[str, Any]], depth: int) -> bool:
        if name == "string":
            return _no_string(nodes)
        if name in ("integer", "fraction"):
            return _no_number(nodes, is_integer=name == "integer")
        if name == "array":
            return self._no_array(nodes, depth)
        return name == "object" and self._no_object(nodes, depth)

    def _no_array(self, nodes: Sequence[Mapping[str, Any]], depth: int) -> bool:
        low = max((node.get("minItems", 0) for node in nodes), default=0)
        if low > min((node["maxItems"] for node in nodes if "maxItems" in node), default=low):
            return True
        longest = max((len(node.get("prefixItems", ())) for node in nodes), default=0)
        return any(
            self.is_empty([item_schema(node, index) for node in nodes], depth=depth + 1)
            for index in range(min(low, longest + 1))
        )

    def _no_object(self, nodes: Sequence[Mapping[str, Any]], depth: int) -> bool:
        required = {name for node in nodes for name in node.get("required", ())}
        most = min(
            (node["maxProperties"] for node in nodes if "maxProperties" in node), default=len(required)
        )
        if len(required) > most:
            return True
        return any(
            self.is_empty(
                [schema for node in nodes for schema in property_schemas(node, name)], depth=depth + 1
            )
            for name in required
        )

    def admits(self, schema: Any, value: Any, *, depth: int = 0) -> bool | None:
        """Tell whether a value is valid; None: not known."""
        if isinstance(schema, bool):
            return schema
        if type_of(value) not in atomic_types(schema):
            return False
        allowed = values_of(schema)
        if allowed is not None and not any(same(value, other) for other in allowed):
            return False
        verdicts: list[bool | None] = []
        if depth <= _MAX_DEPTH:
            parts = [*schema.get("allOf", ()), *([self._resolve(schema["$ref"])] if "$ref" in schema else ())]
            verdicts += [self.admits(part, value, depth=depth + 1) for part in parts]
            if "anyOf" in schema:
                options = [self.admits(option, value, depth=depth + 1) for option in schema["anyOf"]]
                verdicts.append(True if True in options else None if None in options else False)
        verdicts += [self._admits_inside(schema, value, depth), *_checks(schema, value)]
        if False in verdicts:
            return False
        return None if None in verdicts or schema.keys() - _KNOWN or depth > _MAX_DEPTH else True

    def _admits_inside(self, schema: Mapping[str, Any], value: Any, depth: int) -> bool | None:
        if isinstance(value, dict):
            if not set(schema.get("required", ())) <= value.keys():
                return False
            parts = [(part, item) for name, item in value.items() for part in property_schemas(schema, name)]
        elif isinstance(value, list):
            parts = [(item_schema(schema, index), item) for index, item in enumerate(value)]
        else:
            return True
        verdicts = [self.admits(part, item, depth=depth + 1) for part, item in parts]
        return False if False in verdicts else None if None in verdicts else True


_KNOWN = frozenset(
    {
        *("type", "enum", "const", "allOf", "anyOf", "$ref", "required", "properties", "patternProperties"),
        *("additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength"),
        *("pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minProperties"),
        "maxProperties",
    }
)
_SIZES: dict[tuple[str, type], int] = {
    **{("minLength", str): 1, ("maxLength", str): -1, ("minItems", list): 1, ("maxItems", list): -1},
    **{("minProperties", dict): 1, ("maxProperties", dict): -1},
}


def _checks(schema: Mapping[str, Any], value: Any) -> Iterable[bool | None]:
    """Give the verdicts of the keywords that look at no part of a value. Pure."""
    for (keyword, kind), sign in _SIZES.items():
        if keyword in schema and isinstance(value, kind) and isinstance(value, str | list | dict):
            yield sign * len(value) >= sign * schema[keyword]
    if isinstance(value, str) and "pattern" in schema:
        yield matches(schema["pattern"], value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
        yield schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)


def _without(nodes: Sequence[Mapping[str, Any]], node: Mapping[str, Any], keyword: str) -> list[Any]:
    """Give the schemas, one of them without one of its keywords. Pure."""
    bare = {name: value for name, value in node.items() if name != keyword}
    return [*(other for other in nodes if other is not node), bare]


def item_schema(node: Mapping[str, Any], index: int) -> Any:
    """Give the schema of an item. Pure."""
    heads = node.get("prefixItems", ())
    return heads[index] if index < len(heads) else node.get("items", True)


def property_schemas(node: Mapping[str, Any], name: str) -> list[Any]:
    """Give the schemas that a property's value must satisfy; where a pattern cannot be read, it is left out. Pure."""
    found = [node["properties"][name]] if name in node.get("properties", {}) else []
    verdicts = {pattern: matches(pattern, name) for pattern in node.get("patternProperties", {})}
    found += [node["patternProperties"][pattern] for pattern, verdict in verdicts.items() if verdict]
    if not found and None not in verdicts.values() and "additionalProperties" in node:
        return [node["additionalProperties"]]
    return found


def matches(pattern: str, text: str) -> bool | None:
    """Tell whether a pattern matches somewhere in a text; None: it cannot be read."""
    try:
        return contains(search_language(pattern), text)
    except (UnsupportedGrammar, GrammarTooCostly):
        return None


def string_language(nodes: Iterable[Mapping[str, Any]]) -> Language:
    """Give the strings that pattern, minLength and maxLength of all schemas allow.

    Raises:
        GrammarTooCostly, UnsupportedGrammar: a pattern cannot be read.
    """
    parts = [search_language(node["pattern"]) for node in nodes if "pattern" in node]
    parts += [
        lengths(node.get("minLength", 0), node.get("maxLength"))
        for node in nodes
        if "minLength" in node or "maxLength" in node
    ]
    return both(*parts)


def _no_string(nodes: Sequence[Mapping[str, Any]]) -> bool:
    low = max((node.get("minLength", 0) for node in nodes), default=0)
    if low > min((node["maxLength"] for node in nodes if "maxLength" in node), default=low):
        return True
    if not any("pattern" in node for node in nodes):
        return False
    try:
        return automaton(string_language(nodes), max_states=_MAX_PATTERN_STATES).is_empty
    except (UnsupportedGrammar, GrammarTooCostly):
        return False


def _no_number(nodes: Sequence[Mapping[str, Any]], *, is_integer: bool) -> bool:
    low = max((node.get("minimum", -math.inf) for node in nodes), default=-math.inf)
    high = min((node.get("maximum", math.inf) for node in nodes), default=math.inf)
    above = max((node.get("exclusiveMinimum", -math.inf) for node in nodes), default=-math.inf)
    below = min((node.get("exclusiveMaximum", math.inf) for node in nodes), default=math.inf)
    least, most = max(low, above), min(high, below)
    if not is_integer or math.inf in (-least, most):
        is_point = least == most and (above == least or below == most or float(least).is_integer())
        return least > most or is_point
    first = max(
        *(math.ceil(value) for value in (low,) if value > -math.inf),
        *(math.floor(value) + 1 for value in (above,) if value > -math.inf),
        -(1 << 1100),
    )
    last = min(
        *(math.floor(value) for value in (high,) if value < math.inf),
        *(math.ceil(value) - 1 for value in (below,) if value < math.inf),
        1 << 1100,
    )
    return first > last
