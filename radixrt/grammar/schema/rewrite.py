"""From all of JSON Schema to the keywords that the engine takes, without a change of meaning.

A keyword that the engine does not know becomes a conjunction of simpler schemas: case splits (anyOf), complements
(negation.py), or nothing where it provably constrains nothing (emptiness.py). What cannot be written this way is
refused. Related: Baazizi et al., Witness Generation for JSON Schema, VLDB 2023, for complements by keyword.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

from radixrt.errors import GrammarTooCostly, UnsupportedGrammar
from radixrt.grammar.regex_algebra import (
    Language,
    both,
    complement,
    either,
    is_empty,
    lengths,
    to_pattern,
    words,
)
from radixrt.grammar.regex_parse import search_language
from radixrt.grammar.schema import keywords as kw
from radixrt.grammar.schema.emptiness import Emptiness, same, type_of, values_of
from radixrt.grammar.schema.negation import Case, Negation, Opaque
from radixrt.grammar.schema.unevaluated import Evaluation

MAX_NODES = 20_000  # subschemas of the rewritten schema
_MAX_CASES = 64
_MAX_ARRAYS = 400
_MAX_CONTAINS_ITEMS = 8
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")


class Rewriter:
    """Writes one schema anew.

    Attributes:
        nodes: JSON Pointer -> subschema in the form that front.py gives.
        emitted: JSON Pointer -> the same subschema rewritten.
    """

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self.nodes = nodes
        self.emitted: dict[str, Any] = {}
        self._pointer_of = {id(node): pointer for pointer, node in nodes.items()}
        self._definitions: dict[str, str] = {}  # pointer of a referenced subschema -> its new name
        self._place = ""
        self._num_nodes = 0
        self._emptiness = Emptiness(self._resolve)
        self._negation = Negation(self._resolve)
        self._evaluation = Evaluation(self._resolve)

    def rewrite(self, root: Any) -> dict[str, Any]:
        """Give the whole schema, with the subschemas that references need under $defs.

        Raises:
            GrammarTooCostly: it would have more than 20,000 subschemas.
            UnsupportedGrammar: a keyword cannot be written in the engine's terms.
        """
        schema = self._positive(root)
        schema = {} if schema is True else schema
        definitions: dict[str, Any] = {}
        while missing := [item for item in self._definitions.items() if item[1] not in definitions]:
            for pointer, name in missing:
                self._place = pointer
                definitions[name] = self._positive(self.nodes[pointer])
        if definitions:
            schema = {**({"allOf": [False]} if schema is False else schema), "$defs": definitions}
        return schema if isinstance(schema, dict) else {"allOf": [False]}

    def _resolve(self, reference: str) -> Any:
        return self.nodes[reference[1:]]

    def _positive(self, node: Any) -> Any:
        """Give a schema in the engine's terms."""
        if isinstance(node, bool):
            return node
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise GrammarTooCostly(
                f"the schema has more than {MAX_NODES} subschemas once its keywords are written out",
                parameter=self._place,
                value=self._num_nodes,
            )
        outer, self._place = self._place, self._pointer_of.get(id(node), self._place)
        out = self._easy_part(node)
        base = {keyword: value for keyword, value in node.items() if keyword not in _HANDLERS}
        extra: list[Any] = []
        for keyword, handle in _HANDLERS.items():
            if keyword in node:
                extra += handle(self, node[keyword], node, base)
        for part in map(self._positive, [part for part in extra if part is not True]):
            if isinstance(part, dict) and len(extra) == 1 and not part.keys() & out.keys():
                out.update(part)
            elif part is not True:
                out["allOf"] = [*out.get("allOf", ()), part]
        self.emitted.setdefault(self._place, out)
        self._place = outer
        return out

    def _easy_part(self, node: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for keyword, value in node.items():
            is_native = keyword in _COUNTS and _counts_simply(node)
            if (keyword in _HANDLERS and not is_native) or keyword not in kw.EASY:
                continue
            if keyword == "$ref":
                out["$ref"] = self._reference(value[1:])
            elif keyword == "patternProperties":
                if "propertyNames" in node:
                    value = {**value, **self._outside(node["propertyNames"])}
                out[keyword] = {pattern: self._positive(part) for pattern, part in self._disjoint(value)}
            elif keyword in kw.SCHEMA_MAPS:
                out[keyword] = {name: self._positive(part) for name, part in value.items()}
            elif keyword in kw.SCHEMA_LISTS:
                out[keyword] = [self._positive(part) for part in value]
            elif keyword in kw.SCHEMAS:
                out[keyword] = self._positive(value)
            elif keyword == "pattern" and _LOOK_AROUND.search(value):
                out[keyword] = self._regular(value)
            else:
                out[keyword] = value
        return out

    def _reference(self, pointer: str) -> str:
        if pointer == "":
            return "#"
        name = self._definitions.setdefault(pointer, f"d{len(self._definitions)}")
        return f"#/$defs/{name}"

    def _regular(self, pattern: str) -> str:
        """Write a pattern without look-around."""
        try:
            return to_pattern(search_language(pattern))
        except (GrammarTooCostly, UnsupportedGrammar) as error:
            raise self._refusal("pattern", str(error)) from None
        except ValueError:
            raise UnsupportedGrammar(
                f"the schema accepts no value: no string matches the pattern at {self._place}/pattern",
                parameter=f"{self._place}/pattern",
                value=pattern,
            ) from None

    def _disjoint(self, patterns: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Give patternProperties so that no key matches two patterns."""
        found: list[tuple[str | None, Language, list[Any]]] = []
        try:
            for pattern, part in patterns.items():
                language = search_language(pattern)
                kept: list[tuple[str | None, Language, list[Any]]] = []
                rest = language
                for text, other, parts in found:
                    shared = both(other, language)
                    if is_empty(shared):
                        kept.append((text, other, parts))
                        continue
                    kept.append((None, shared, [*parts, part]))
                    if not is_empty(outside := both(other, complement(language))):
                        kept.append((None, outside, parts))
                    rest = both(rest, complement(other))
                if not is_empty(rest):
                    kept.append((pattern if rest is language else None, rest, [part]))
                found = kept
            if len(found) > _MAX_CASES:
                raise self._refusal("patternProperties", "too many patterns overlap")
            for text, language, parts in found:
                yield (
                    text if text is not None else to_pattern(language),
                    parts[0] if len(parts) == 1 else {"allOf": parts},
                )
        except (GrammarTooCostly, UnsupportedGrammar):
            yield from patterns.items()  # the engine may know more, or says what is wrong

    def _refusal(self, keyword: str, reason: str) -> UnsupportedGrammar:
        place = f"{self._place}/{keyword}"
        return UnsupportedGrammar(
            f"the keyword {keyword} at {place} cannot be enforced while generating: {reason}",
            parameter=place,
            value=reason,
        )

    def _without(self, cases: Sequence[Case], context: Sequence[Any], keyword: str) -> Any:
        """Give the union of cases, without those that the context excludes."""
        kept = []
        for case in cases:
            is_opaque = isinstance(case, Opaque)
            if self._emptiness.is_empty([case.bound if is_opaque else case, *context]):
                continue
            if is_opaque:
                raise self._refusal(keyword, f"the complement of {case.keyword} has no simple form")
            kept.append(case)
        return kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else False

    def _one_of(self, options: Any, node: Any, base: Any) -> list[Any]:
        alive = [option for option in options if not self._emptiness.is_empty([option, base])]
        branches = []
        for index, option in enumerate(alive):
            rivals = [
                other
                for place, other in enumerate(alive)
                if place != index and not self._emptiness.is_empty([option, other, base])
            ]
            outside = [
                self._without(self._negation.cases(other), [base, option], "oneOf") for other in rivals
            ]
            if False not in outside:
                branches.append({"allOf": [option, *outside]} if outside else option)
        return [{"anyOf": branches} if branches else False]

    def _not(self, part: Any, node: Any, base: Any) -> list[Any]:
        return [self._without(self._negation.cases(part), [base], "not")]

    def _if(self, condition: Any, node: Any, base: Any) -> list[Any]:
        if not node.keys() & {"then", "else"}:
            return []
        holds = {"allOf": [condition, node.get("then", True)]}
        outside = self._without(self._negation.cases(condition), [base], "if")
        fails = {"allOf": [outside, node.get("else", True)]}
        branches = [part for part in (holds, fails) if not self._emptiness.is_empty([part, base])]
        return [{"anyOf": branches} if branches else False]

    def _dependent_required(self, members: Any, node: Any, base: Any) -> list[Any]:
        present = set(node.get("required", ()))
        found: list[Any] = []
        for name, others in members.items():
            if missing := [other for other in others if other != name]:
                needs = {"properties": dict.fromkeys([name, *missing], True), "required": missing}
                found.append(needs if name in present else {"anyOf": [{"properties": {name: False}}, needs]})
        return self._bounded(found, "dependentRequired")

    def _dependent_schemas(self, members: Any, node: Any, base: Any) -> list[Any]:
        found: list[Any] = []
        for name, part in members.items():
            has_it = {"allOf": [{"properties": {name: True}, "required": [name]}, part]}
            cases = [case for case in ({"properties": {name: False}}, has_it) if not self._emptiness.is_empty([base, {"type": "object"}, case])]  # fmt: skip
            found.append({"anyOf": [{"type": _NOT_OBJECTS}, *cases]})
        return self._bounded(found, "dependentSchemas")

    def _bounded(self, splits: list[Any], keyword: str) -> list[Any]:
        if 2 ** len(splits) > _MAX_CASES:
            raise GrammarTooCostly(
                f"{keyword} at {self._place}/{keyword} may have at most {_MAX_CASES.bit_length() - 1} members",
                parameter=f"{self._place}/{keyword}",
                value=len(splits),
            )
        return splits

    def _property_names(self, part: Any, node: Any, base: Any) -> list[Any]:
        """Forbid the keys outside: those declared one by one, the others by a pattern."""
        names = {name: False for name in node.get("properties", {}) if not self._names_hold(part, name)}
        found: list[Any] = [{"properties": names}] if names else []
        if "patternProperties" not in node and (outside := self._outside(part)):  # else see _easy_part
            found.append({"patternProperties": outside})
        return found

    def _outside(self, part: Any) -> dict[str, Any]:
        """Give patternProperties that forbid all keys but those of a schema."""
        try:
            outside = complement(self._names(part))
            return {} if is_empty(outside) else {to_pattern(outside): False}
        except UnsupportedGrammar as error:
            raise self._refusal("propertyNames", str(error)) from None

    def _names_hold(self, part: Any, name: str) -> bool:
        return self._emptiness.admits(part, name) is not False

    def _names(self, part: Any) -> Language:
        """Give the language of the keys that a schema for strings allows."""
        if isinstance(part, bool):
            return lengths(0, None) if part else words([])
        if unknown := part.keys() - _NAME_KEYWORDS:
            raise self._refusal("propertyNames", f"it holds {min(unknown)}")
        if "string" not in ([part["type"]] if isinstance(part.get("type"), str) else part.get("type", ["string"])):  # fmt: skip
            return words([])
        found = [lengths(part.get("minLength", 0), part.get("maxLength"))]
        if "pattern" in part:
            found.append(search_language(part["pattern"]))
        if (values := values_of(part)) is not None:
            found.append(words([value for value in values if isinstance(value, str)]))
        if "$ref" in part:
            found.append(self._names(self._resolve(part["$ref"])))
        found += [self._names(inner) for inner in part.get("allOf", ())]
        if "anyOf" in part:
            found.append(either(*(self._names(inner) for inner in part["anyOf"])))
        if "not" in part:
            found.append(complement(self._names(part["not"])))
        return both(*found)

    def _num_properties(self, _: Any, node: Any, base: Any) -> list[Any]:
        """Split by which declared properties are there; a key can repeat, so only one more can be counted on."""
        if _counts_simply(node):
            return []
        low, high = node.get("minProperties", 0), node.get("maxProperties")
        declared = node.get("properties", {})
        required = list(dict.fromkeys(node.get("required", ())))
        optional = _optional(node)
        is_open = node.get("additionalProperties", True) is not False or bool(node.get("patternProperties"))
        most = len(required) + len(optional)
        if low <= len(required) and (high is None or (high >= most and not is_open)):
            return []
        if high == 0:
            return [{"maxProperties": 0, "properties": dict.fromkeys(declared, False)}]
        cases: list[Any] = []
        for count in range(len(optional) + 1):
            for chosen in combinations(optional, count):
                num_known = len(required) + count
                if high is not None and num_known > high:
                    continue
                if num_known < low - 1 or (num_known < low and not is_open):
                    if is_open:
                        raise self._refusal("minProperties", "keys may repeat, so two unknown ones cannot be counted")  # fmt: skip
                    continue
                if high is None and num_known > low:
                    continue  # more than needed: a case with fewer covers it
                cases.append(self._with_properties(chosen, optional, node, low > num_known, high))
                if len(cases) > _MAX_CASES:
                    raise GrammarTooCostly(
                        f"the number of properties at {self._place or '/'} has too many cases",
                        parameter=f"{self._place}/{'minProperties' if low else 'maxProperties'}",
                        value=len(optional),
                    )
        others = (
            [{"type": _NOT_OBJECTS}] if not self._emptiness.is_empty([base, {"type": _NOT_OBJECTS}]) else []
        )
        return [{"anyOf": [*others, *cases]}]

    def _with_properties(
        self, chosen: Sequence[str], optional: Sequence[str], node: Any, needs_more: bool, high: int | None
    ) -> dict[str, Any]:
        required = [*node.get("required", ()), *chosen]
        case: dict[str, Any] = {"type": "object", "required": required}
        if needs_more or high is not None:
            case["properties"] = {name: name in chosen for name in optional}
            case |= {"minProperties": len(required) + 1} if needs_more else {}
            case |= {} if high is None else {"maxProperties": high}
        return case

    def _contains(self, wanted: Any, node: Any, base: Any) -> list[Any]:
        low, high = node.get("minContains", 1), node.get("maxContains")
        item = node.get("items", True)
        heads = node.get("prefixItems", [])
        others = {"type": ["null", "boolean", "object", "string", "number"]}
        if low == 0 and high is None:
            return []
        always = not any(
            not self._emptiness.is_empty([case.bound if isinstance(case, Opaque) else case, part])
            for part in [*heads, item]
            for case in self._negation.cases(wanted)
        )
        if always:
            return [{"minItems": low, **({} if high is None else {"maxItems": high})}]
        if all(self._emptiness.is_empty([wanted, part]) for part in [*heads, item]):
            return [others] if low else []
        num_items = min(node.get("maxItems", 1 << 30), len(heads) if item is False else 1 << 30)
        if num_items > _MAX_CONTAINS_ITEMS:
            raise self._refusal("contains", f"only arrays of at most {_MAX_CONTAINS_ITEMS} items can be split into cases")  # fmt: skip
        if high is None and low == 1:
            return [{"anyOf": [others, *({"minItems": i + 1, "prefixItems": [True] * i + [wanted]} for i in range(num_items))]}]  # fmt: skip
        unwanted = {"not": wanted}
        cases: list[Any] = [others]
        for length in range(num_items + 1):
            for count in range(low, min(length, length if high is None else high) + 1):
                for places in combinations(range(length), count):
                    cases.append({"minItems": length, "maxItems": length, "prefixItems": [wanted if i in places else unwanted for i in range(length)]})  # fmt: skip
        if len(cases) > _MAX_CASES:
            raise self._refusal("contains", "it has too many cases")
        return [{"anyOf": cases}]

    def _unique_items(self, _: Any, node: Any, base: Any) -> list[Any]:
        heads, item = node.get("prefixItems", []), node.get("items", True)
        low, high = node.get("minItems", 0), node.get("maxItems", 1 << 30)
        if item is False:
            high = min(high, len(heads))
        if high <= 1:
            return []
        if high <= len(heads) and all(
            self._emptiness.is_empty(pair) for pair in combinations(heads[:high], 2)
        ):
            return []
        values = self._finite_values(item)
        if heads or values is None or sum(_num_sequences(len(values), length) for length in range(min(high, len(values)) + 1)) > _MAX_ARRAYS:  # fmt: skip
            raise self._refusal("uniqueItems", "equal items can be told only where few values are possible")
        arrays = [list(items) for length in range(low, min(high, len(values)) + 1) for items in permutations(values, length)]  # fmt: skip
        return [{"anyOf": [{"type": ["null", "boolean", "object", "string", "number"]}, {"enum": arrays}]}]

    def _finite_values(self, node: Any) -> list[Any] | None:
        """Give the values of an enum, a boolean or null; None for other schemas."""
        for _ in range(8):
            if isinstance(node, dict) and "$ref" in node and len(node) == 1:
                node = self._resolve(node["$ref"])
        if not isinstance(node, dict):
            return None
        values = values_of(node)
        if values is None:
            types = node.get("type")
            values = _FEW_VALUES.get(types) if isinstance(types, str) else None
        if values is None:
            return None
        verdicts = [self._emptiness.admits(node, value) for value in values]
        kept = [value for value, verdict in zip(values, verdicts, strict=True) if verdict]
        distinct = [
            value for i, value in enumerate(kept) if not any(same(value, other) for other in kept[:i])
        ]
        simple = all(type_of(value) not in ("object", "array") for value in distinct)
        return distinct if simple and None not in verdicts else None

    def _unevaluated_properties(self, part: Any, node: Any, base: Any) -> list[Any]:
        return self._unevaluated(part, node, "unevaluatedProperties")

    def _unevaluated_items(self, part: Any, node: Any, base: Any) -> list[Any]:
        return self._unevaluated(part, node, "unevaluatedItems")

    def _unevaluated(self, part: Any, node: Any, keyword: str) -> list[Any]:
        if part is True or part == {}:
            return []
        try:
            return [self._evaluation.close(part, node, keyword)]
        except (GrammarTooCostly, UnsupportedGrammar) as error:
            raise self._refusal(keyword, str(error)) from None


def _optional(node: Mapping[str, Any]) -> list[str]:
    """Give the declared properties that may be left out. Pure."""
    declared, required = node.get("properties", {}), node.get("required", ())
    return [name for name in declared if name not in required and declared[name] is not False]


def _counts_simply(node: Mapping[str, Any]) -> bool:
    """Tell whether the engine can count the properties: those declared are all there, and one more is enough. Pure."""
    return not _optional(node) and node.get("minProperties", 0) <= len(set(node.get("required", ()))) + 1


def _num_sequences(num_values: int, length: int) -> int:
    product = 1
    for factor in range(num_values - length + 1, num_values + 1):
        product *= factor
    return product


_FEW_VALUES: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
_COUNTS = ("minProperties", "maxProperties")
_NOT_OBJECTS = ["null", "boolean", "array", "string", "number"]
_NAME_KEYWORDS = frozenset(
    {"type", "minLength", "maxLength", "pattern", "enum", "const", "$ref", "allOf", "anyOf", "not"}
)

# In the order in which they are written out.
_HANDLERS: dict[str, Callable[[Rewriter, Any, Any, Any], list[Any]]] = {
    "oneOf": Rewriter._one_of,
    "not": Rewriter._not,
    "if": Rewriter._if,
    "dependentRequired": Rewriter._dependent_required,
    "dependentSchemas": Rewriter._dependent_schemas,
    "propertyNames": Rewriter._property_names,
    "minProperties": Rewriter._num_properties,
    "maxProperties": lambda self, limit, node, base: (
        [] if "minProperties" in node else self._num_properties(limit, node, base)
    ),
    "contains": Rewriter._contains,
    "uniqueItems": Rewriter._unique_items,
    "unevaluatedProperties": Rewriter._unevaluated_properties,
    "unevaluatedItems": Rewriter._unevaluated_items,
}
