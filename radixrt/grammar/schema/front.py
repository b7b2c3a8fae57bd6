"""Read a JSON Schema: bound it, resolve its references, bring all drafts into one form, sort its keywords."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from radixrt.config import GrammarConfig
from radixrt.errors import GrammarTooCostly, InvalidRequest, UnsupportedGrammar, first_line
from radixrt.grammar.matcher import Enforcement
from radixrt.grammar.regex_cost import check_regex
from radixrt.grammar.schema import keywords as kw
from radixrt.grammar.schema.finite import is_finite
from radixrt.grammar.schema.formats import PATTERNS
from radixrt.grammar.schema.references import References, children, escape_pointer
from radixrt.grammar.schema.rewrite import Rewriter
from radixrt.grammar.schema.validator import SchemaValidator

_LARGEST_PLAIN = 1 << 53
_WORD = 1 << 63
_LARGEST_DOUBLE = 10**308

MAX_PROPERTIES = 4096  # of one object: the engine's time grows with their square


@dataclass(frozen=True, slots=True)
class ParsedSchema:
    """A schema ready for the engine.

    Attributes:
        schema: rewritten into the keywords that the engine takes; same meaning, same key order.
        nodes: JSON Pointer -> subschema as rewritten, for all that can be reached from the root.
        keywords: JSON Pointer of each keyword -> how it is enforced.
        validator: judges finished values under the schema as it was written.
    """

    schema: Mapping[str, Any]
    nodes: Mapping[str, Any]
    keywords: Mapping[str, Enforcement]
    validator: SchemaValidator

    def pointers_of(self, keyword: str) -> list[str]:
        """Give the pointers of all subschemas that have a keyword, the deepest first."""
        found = [
            pointer for pointer, node in self.nodes.items() if isinstance(node, dict) and keyword in node
        ]
        return sorted(found, key=lambda pointer: -pointer.count("/"))


@dataclass(frozen=True, slots=True)
class RawSchema:
    """A schema as it was written, and who judges finished values under it."""

    value: Any
    validator: SchemaValidator


def read_schema(text: str, config: GrammarConfig) -> RawSchema:
    """Read a schema's text.

    Raises:
        GrammarTooCostly: nested deeper than config.max_grammar_depth.
        InvalidRequest: not JSON, or not a JSON Schema.
    """
    value = _load(text, config)
    return RawSchema(value, SchemaValidator.build(value))


def parse_schema(
    raw: RawSchema, config: GrammarConfig, *, weakened: frozenset[str] = frozenset()
) -> ParsedSchema:
    """Bring a schema into the engine's terms.

    Args:
        weakened: JSON Pointers of keywords to leave out; a oneOf among them is read as anyOf.
    Raises:
        GrammarTooCostly: too large once rewritten.
        UnsupportedGrammar: a keyword that cannot be enforced exactly; `parameter` is its JSON Pointer.
    """
    validator = raw.validator
    if raw.value is False:
        raise UnsupportedGrammar("the schema false accepts no value", parameter="", value=False)
    walk = _Walk(raw.value, validator.draft, config, weakened)
    root = walk.run()
    rewriter = Rewriter(walk.nodes)
    schema = rewriter.rewrite(root)
    if walk.targets:
        _check_finite(schema, walk.targets)
    return ParsedSchema(schema, rewriter.emitted, MappingProxyType(walk.keywords), validator)


def _check_finite(schema: Mapping[str, Any], targets: Mapping[str, tuple[str, str]]) -> None:
    nodes, references = dict[str, Any](), dict[str, str]()
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        pointer, node = pending.pop()
        nodes[pointer] = node
        if isinstance(node, dict):
            pending += children(pointer, node)
            if "$ref" in node:
                references[pointer] = node["$ref"][1:]
    if not is_finite(nodes, references):
        pointer, (keyword, target) = next(iter(targets.items()))
        raise UnsupportedGrammar(
            f"the recursion through $ref at {pointer}/{keyword} has no end: every value would be infinite",
            parameter=f"{pointer}/{keyword}",
            value=target,
        )


def _load(text: str, config: GrammarConfig) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep(config) from None
    except ValueError as error:
        raise InvalidRequest(
            f"the schema is not valid JSON: {first_line(error)}", parameter="grammar", value=text[:200]
        ) from error
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > config.max_grammar_depth:
            raise _too_deep(config)
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(
            "the schema must be valid Unicode (it holds a lone surrogate)", parameter="grammar"
        ) from None
    if not isinstance(value, dict | bool):
        raise InvalidRequest(
            f"a schema must be an object or a boolean, got {type(value).__name__}", parameter="grammar"
        )
    return value


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _too_deep(config: GrammarConfig) -> GrammarTooCostly:
    return GrammarTooCostly(
        f"a schema may be nested at most {config.max_grammar_depth} levels deep (max_grammar_depth)",
        parameter="grammar",
        value=config.max_grammar_depth,
    )


class _Walk:
    """One pass over the subschemas that count, through references; gives them in the form of draft 2020-12.

    Attributes:
        nodes: JSON Pointer -> subschema with the constraints alone; references are absolute pointers ("#...").
        targets: JSON Pointer of a subschema with a reference -> its keyword and the JSON Pointer it refers to.
        keywords: JSON Pointer of a keyword -> how it is enforced.
    """

    def __init__(self, root: Any, draft: int, config: GrammarConfig, weakened: frozenset[str]) -> None:
        self._config = config
        self._weakened = weakened
        self.nodes: dict[str, Any] = {}
        self.targets: dict[str, tuple[str, str]] = {}
        self.keywords: dict[str, Enforcement] = {}
        self._draft = draft
        self._references = References(root, draft)
        self._pending = deque[tuple[str, Any]]()

    def run(self) -> Any:
        """Visit every subschema that the root reaches, in document order, referenced ones last."""
        root = self._visit("", self._references.root)
        while self._pending:
            pointer, node = self._pending.popleft()
            if pointer not in self.nodes:
                self._visit(pointer, node)
        return root

    def _visit(self, pointer: str, raw: Any) -> Any:
        if pointer in self.nodes:
            return self.nodes[pointer]
        if not isinstance(raw, dict):
            self.nodes[pointer] = raw
            return raw
        node: dict[str, Any] = {}
        self.nodes[pointer] = node
        is_reference = self._draft <= 7 and "$ref" in raw
        for keyword, value in raw.items():
            place = f"{pointer}/{escape_pointer(keyword)}"
            self._check_size(keyword, value, place)
            if place in self._weakened:
                self.keywords[place] = "checked"
                if keyword == "oneOf":
                    cases = [self._visit(f"{place}/{index}", child) for index, child in enumerate(value)]
                    _conjoin(node, {"anyOf": cases})
                continue
            if keyword in kw.REFUSED:
                raise UnsupportedGrammar(
                    f"the keyword {keyword} at {place} cannot be enforced while generating",
                    parameter=place,
                    value=value,
                )
            if (is_reference and keyword != "$ref") or _constrains_nothing(keyword, value, raw):
                is_known = keyword in kw.KNOWN or keyword.startswith("x-")
                self.keywords[place] = "annotation" if is_known else "annotation (unknown)"
                continue
            self.keywords[place] = "mask"
            self._take(pointer, place, keyword, value, node)
        _finish(node)
        return node

    def _check_size(self, keyword: str, value: Any, place: str) -> None:
        if keyword == "pattern":
            check_regex(value, self._config, parameter=place)
        if keyword == "patternProperties":
            for pattern in value:
                check_regex(pattern, self._config, parameter=f"{place}/{escape_pointer(pattern)}")
        if keyword == "properties" and len(value) > MAX_PROPERTIES:
            raise GrammarTooCostly(
                f"properties at {place} may have at most {MAX_PROPERTIES} members, got {len(value)}",
                parameter=place,
                value=len(value),
            )

    def _take(self, pointer: str, place: str, keyword: str, value: Any, node: dict[str, Any]) -> None:
        """Put one constraint into the new form of its subschema."""
        if keyword in ("$ref", "$dynamicRef"):
            target = self._references.resolve(pointer, keyword, value)
            self.targets.setdefault(pointer, (keyword, target))
            self._pending.append((target, self._references.at(pointer, keyword, target)))
            _conjoin(node, {"$ref": f"#{target}"})
        elif keyword == "dependencies":
            for key, child in value.items():
                if isinstance(child, list):
                    node.setdefault("dependentRequired", {})[key] = child
                else:
                    visited = self._visit(f"{place}/{escape_pointer(key)}", child)
                    node.setdefault("dependentSchemas", {})[key] = visited
        elif keyword in kw.SCHEMA_MAPS:
            found = {
                key: self._visit(f"{place}/{escape_pointer(key)}", child) for key, child in value.items()
            }
            node[keyword] = {**node.get(keyword, {}), **found}
        elif isinstance(value, list) and (keyword in kw.SCHEMA_LISTS or keyword == "items"):
            name = "prefixItems" if keyword == "items" else keyword
            visited_all = [self._visit(f"{place}/{index}", child) for index, child in enumerate(value)]
            node[name] = [*node.get(name, ()), *visited_all]
        elif keyword in kw.SCHEMAS:
            node["items" if keyword == "additionalItems" else keyword] = self._visit(place, value)
        else:
            node[keyword] = int(value) if keyword in kw.COUNTS and isinstance(value, float) else value
            _check_numbers(keyword, node[keyword], place)


def _check_numbers(keyword: str, value: Any, place: str) -> None:
    """Raise UnsupportedGrammar if a constraint holds a number that the engine would take for another one."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict | list):
            pending.extend(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, int | float) and not _is_exact(item, is_bound=keyword in kw.BOUNDS):
            raise UnsupportedGrammar(
                f"the keyword {keyword} at {place} holds a number that cannot be enforced: the engine would round it",
                parameter=place,
                value=keyword,
            )


def _is_exact(number: int | float, *, is_bound: bool) -> bool:
    """Tell whether a number keeps its value in the engine. Pure.

    The engine takes numbers for doubles and writes their shortest digits: beyond 2**53 often those of another number.
    And the constant -2**63 ends the process (llguidance 1.9.1). Bounds, fractions too, it cuts to words of 64 bits: a
    range below -2**63 ends the process in the same way, and one above gives 2**63 - 1.
    """
    if abs(number) <= _LARGEST_PLAIN:
        return True
    limit = _WORD if is_bound else _LARGEST_DOUBLE
    return abs(number) < limit and int(Decimal(repr(float(number)))) == number


def _conjoin(node: dict[str, Any], constraint: dict[str, Any]) -> None:
    """Add a constraint to a schema whose keyword may be taken."""
    if node.keys() & constraint.keys():
        node["allOf"] = [*node.get("allOf", ()), constraint]
    else:
        node.update(constraint)


def _finish(node: dict[str, Any]) -> None:
    """Spell out what older drafts and formats say in other words."""
    for limit in ("Minimum", "Maximum"):
        is_exclusive = node.get(f"exclusive{limit}")
        if isinstance(is_exclusive, bool):
            del node[f"exclusive{limit}"]
            if is_exclusive and limit.lower() in node:
                node[f"exclusive{limit}"] = node.pop(limit.lower())
    if (pattern := PATTERNS.get(node.get("format", ""))) is not None:
        del node["format"]
        _conjoin(node, {"pattern": pattern})


def _constrains_nothing(keyword: str, value: Any, node: Mapping[str, Any]) -> bool:
    """Tell whether a keyword is no constraint here. Pure."""
    if keyword == "format":
        return value not in kw.FORMATS
    if keyword == "uniqueItems":
        return value is False
    if keyword == "additionalItems":
        return not isinstance(node.get("items"), list)
    if keyword in kw.NEEDS_COMPANION:
        return not kw.NEEDS_COMPANION[keyword] & node.keys()
    return keyword in kw.DEFINITIONS or keyword not in kw.EASY | {*kw.HARD} | kw.RENAMED
