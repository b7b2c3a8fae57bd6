"""What a schema does not allow, as other schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from radixrt.errors import GrammarTooCostly, UnsupportedGrammar
from radixrt.grammar.regex_algebra import complement, is_empty, to_pattern, words
from radixrt.grammar.regex_parse import search_language
from radixrt.grammar.schema.emptiness import ATOMIC_TYPES, atomic_types, type_of

_MAX_VALUES = 1000
_MAX_NUMBERS = 16
_MAX_OPEN_PROPERTIES = 3
_MAX_CASES = 256


@dataclass(frozen=True, slots=True)
class Opaque:
    """Values that no schema for the engine describes: those in `bound` that break a keyword.

    Attributes:
        bound: a schema that all of these values satisfy.
        keyword: what they break.
    """

    bound: Any
    keyword: str


Case = Any  # a schema, or Opaque; the union of the cases is the complement


def type_schema(types: Sequence[str] | frozenset[str]) -> dict[str, Any]:
    """Give the schema of some atomic types. Pure."""
    names = set(types)
    if {"integer", "fraction"} <= names:
        names = names - {"integer", "fraction"} | {"number"}
    return {"type": sorted(names)}


class Negation:
    """Writes complements, with the schemas that references lead to."""

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve
        self._open: list[str] = []  # references that are being followed

    def cases(self, schema: Any) -> list[Case]:
        """Give schemas that together allow exactly what `schema` does not.

        Raises:
            GrammarTooCostly: there are more than 256 of them.
        """
        if isinstance(schema, bool):
            return [] if schema else [True]
        found = [case for keyword in schema for case in self._keyword(keyword, schema)]
        if len(found) > _MAX_CASES:
            raise GrammarTooCostly(
                f"the complement of a schema has more than {_MAX_CASES} cases", parameter="grammar"
            )
        return found

    def all_of(self, parts: Sequence[list[Case]]) -> list[Case]:
        """Give the cases of the conjunction of several unions. Pure."""
        clear = [[case for case in part if not isinstance(case, Opaque)] for part in parts]
        found: list[Case] = []
        if all(clear):
            found.append({"allOf": [_union(part) for part in clear]})
        for index, part in enumerate(parts):
            others = [_union([_bound(case) for case in other]) for i, other in enumerate(parts) if i != index]
            found += [
                Opaque({"allOf": [case.bound, *others]}, case.keyword)
                for case in part
                if isinstance(case, Opaque)
            ]
        return found

    def _keyword(self, keyword: str, node: Mapping[str, Any]) -> Iterator[Case]:
        value = node[keyword]
        if simple := _SIMPLE.get(keyword):
            yield from simple(value)
        elif keyword == "$ref":
            if value in self._open or len(self._open) > 8:
                yield Opaque(True, keyword)
                return
            self._open.append(value)
            yield from self.cases(self._resolve(value))
            self._open.pop()
        elif keyword == "allOf":
            for part in value:
                yield from self.cases(part)
        elif keyword == "anyOf":
            yield from self.all_of([self.cases(part) for part in value])
        elif keyword == "oneOf":
            yield from self.all_of([self.cases(part) for part in value])
            for index, part in enumerate(value):
                yield from ({"allOf": [part, other]} for other in value[index + 1 :])
        elif keyword == "if":
            yield from self.all_of([[value], self.cases(node.get("then", True))])
            yield from self.all_of([self.cases(value), self.cases(node.get("else", True))])
        elif keyword in ("then", "else", "minContains", "maxContains"):
            return
        elif keyword == "dependentSchemas":
            for name, part in value.items():
                has_it = {"type": "object", "required": [name]}
                yield from self.all_of([[has_it], self.cases(part)])
        else:
            yield from self._inside(keyword, node)

    def _inside(self, keyword: str, node: Mapping[str, Any]) -> Iterator[Case]:
        """Give the cases of the keywords that look into objects and arrays."""
        value = node[keyword]
        if keyword == "properties":
            for name, part in value.items():
                yield from (_put(case, _with_property(name)) for case in self.cases(part))
        elif keyword == "prefixItems":
            for index, part in enumerate(value):
                yield from (_put(case, _with_item(index)) for case in self.cases(part))
        elif keyword == "items":
            yield from self._items(value, len(node.get("prefixItems", ())))
        elif keyword == "additionalProperties":
            yield from self._additional(value, node)
        elif keyword == "patternProperties":
            if any(self.cases(part) for part in value.values()):
                yield Opaque({"type": "object"}, keyword)
        elif keyword == "contains":
            yield from self._contains(value, node)
        else:
            yield Opaque(True, keyword)

    def _items(self, rest: Any, num_heads: int) -> Iterator[Case]:
        longer = {"type": "array", "minItems": num_heads + 1}
        cases = self.cases(rest)
        if True in cases:
            yield longer
        elif cases:
            yield Opaque(longer, "items")

    def _contains(self, wanted: Any, node: Mapping[str, Any]) -> Iterator[Case]:
        low = node.get("minContains", 1)
        cases = self.cases(wanted)
        if low == 1 and not any(isinstance(case, Opaque) for case in cases):
            yield {"type": "array", "items": _union(cases)}
        elif low > 0:
            yield Opaque({"type": "array"}, "contains")
        if "maxContains" in node:
            yield Opaque({"type": "array"}, "maxContains")

    def _additional(self, rest: Any, node: Mapping[str, Any]) -> Iterator[Case]:
        cases = self.cases(rest)
        names = list(node.get("properties", {}))
        if not cases:
            return
        if True not in cases or "patternProperties" in node or len(names) > _MAX_OPEN_PROPERTIES:
            yield Opaque({"type": "object", "minProperties": 1}, "additionalProperties")
            return
        for choice in range(1 << len(names)):
            present = [name for index, name in enumerate(names) if choice >> index & 1]
            properties = {name: name in present for name in names}
            yield {"type": "object", "properties": properties, "required": present, "minProperties": len(present) + 1}  # fmt: skip


def _union(cases: Sequence[Any]) -> Any:
    return cases[0] if len(cases) == 1 else {"anyOf": list(cases)} if cases else False


def _bound(case: Case) -> Any:
    return case.bound if isinstance(case, Opaque) else case


def _put(case: Case, place: Callable[[Any], Any]) -> Case:
    return Opaque(place(case.bound), case.keyword) if isinstance(case, Opaque) else place(case)


def _with_property(name: str) -> Callable[[Any], Any]:
    return lambda inner: {"type": "object", "required": [name], "properties": {name: inner}}


def _with_item(index: int) -> Callable[[Any], Any]:
    return lambda inner: {
        "type": "array",
        "minItems": index + 1,
        "prefixItems": [True] * index + [inner],
    }


def _type(value: Any) -> Iterator[Case]:
    others = frozenset(ATOMIC_TYPES) - atomic_types({"type": value})
    if "fraction" in others and "integer" not in others:
        yield Opaque({"type": "fraction"}, "type")
        others -= {"fraction"}
    if others:
        yield type_schema(others)


def _values(values: list[Any]) -> Iterator[Case]:
    if len(values) > _MAX_VALUES:
        raise GrammarTooCostly(f"an enum to exclude has more than {_MAX_VALUES} values", parameter="grammar")
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of(value).replace("fraction", "number").replace("integer", "number"), []).append(value)  # fmt: skip
    yield type_schema(frozenset(ATOMIC_TYPES) - by_type.keys() - ({"integer", "fraction"} if "number" in by_type else set()))  # fmt: skip
    if "string" in by_type:
        yield from _without_words(sorted(set(by_type["string"])))
    if "boolean" in by_type and len(set(by_type["boolean"])) == 1:
        yield {"const": not by_type["boolean"][0]}
    if "number" in by_type:
        yield from _between(sorted(set(by_type["number"])))
    for kind in ("object", "array"):
        found = by_type.get(kind, [])
        if len(found) == 1:
            yield from _not_object(found[0]) if kind == "object" else _not_array(found[0])
        elif found:
            yield Opaque({"type": kind}, "enum")


def _without_words(texts: Sequence[str]) -> Iterator[Case]:
    try:
        yield {"type": "string", "pattern": to_pattern(complement(words(texts)))}
    except GrammarTooCostly:
        yield Opaque({"type": "string"}, "enum")


def _between(numbers: list[Any]) -> Iterator[Case]:
    if len(numbers) > _MAX_NUMBERS:
        yield Opaque({"type": "number"}, "enum")
        return
    yield {"type": "number", "exclusiveMaximum": numbers[0]}
    for low, high in pairwise(numbers):
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {"type": "number", "exclusiveMinimum": numbers[-1]}


def _not_object(value: Mapping[str, Any]) -> Iterator[Case]:
    for name, item in value.items():
        yield {"type": "object", "properties": {name: False}}
        yield {"type": "object", "properties": {name: {"not": {"const": item}}}, "required": [name]}
    yield {"type": "object", "properties": dict.fromkeys(value, True), "required": list(value), "minProperties": len(value) + 1}  # fmt: skip


def _not_array(value: Sequence[Any]) -> Iterator[Case]:
    if value:
        yield {"type": "array", "maxItems": len(value) - 1}
    yield {"type": "array", "minItems": len(value) + 1}
    for index, item in enumerate(value):
        yield {"type": "array", "minItems": index + 1, "prefixItems": [True] * index + [{"not": {"const": item}}]}  # fmt: skip


def _pattern(pattern: str) -> Iterator[Case]:
    try:
        outside = complement(search_language(pattern, is_wide=True))
        if not is_empty(outside):
            yield {"type": "string", "pattern": to_pattern(outside)}
    except (UnsupportedGrammar, GrammarTooCostly):
        yield Opaque({"type": "string"}, "pattern")


def _fewer(kind: str, keyword: str) -> Callable[[int], Iterator[Case]]:
    def cases(count: int) -> Iterator[Case]:
        if count > 0:
            yield {"type": kind, keyword: count - 1}

    return cases


def _opaque(kind: str, keyword: str) -> Callable[[Any], Iterator[Case]]:
    return lambda _: iter([Opaque({"type": kind}, keyword)])


_SIMPLE: dict[str, Callable[[Any], Iterator[Case]]] = {
    "type": _type,
    "const": lambda value: _values([value]),
    "enum": _values,
    "pattern": _pattern,
    "not": lambda value: iter([value]),
    "format": _opaque("string", "format"),
    "multipleOf": _opaque("number", "multipleOf"),
    "propertyNames": _opaque("object", "propertyNames"),
    "unevaluatedProperties": _opaque("object", "unevaluatedProperties"),
    "unevaluatedItems": _opaque("array", "unevaluatedItems"),
    "uniqueItems": lambda _: iter([Opaque({"type": "array", "minItems": 2}, "uniqueItems")]),
    "minLength": _fewer("string", "maxLength"),
    "minItems": _fewer("array", "maxItems"),
    "minProperties": _fewer("object", "maxProperties"),
    "maxLength": lambda count: iter([{"type": "string", "minLength": count + 1}]),
    "maxItems": lambda count: iter([{"type": "array", "minItems": count + 1}]),
    "maxProperties": lambda count: iter([{"type": "object", "minProperties": count + 1}]),
    "minimum": lambda limit: iter([{"type": "number", "exclusiveMaximum": limit}]),
    "maximum": lambda limit: iter([{"type": "number", "exclusiveMinimum": limit}]),
    "exclusiveMinimum": lambda limit: iter([{"type": "number", "maximum": limit}]),
    "exclusiveMaximum": lambda limit: iter([{"type": "number", "minimum": limit}]),
    "required": lambda names: ({"type": "object", "properties": {name: False}} for name in names),
    "dependentRequired": lambda members: (
        {"type": "object", "required": [name], "properties": {other: False}}
        for name, others in members.items()
        for other in others
        if other != name
    ),
}
