"""Read a JSON Schema: bound it, resolve its references, sort its keywords, refuse what no mask can enforce."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from radixrt.config import GrammarConfig
from radixrt.errors import GrammarTooCostly, InvalidRequest, UnsupportedGrammar, first_line
from radixrt.grammar.matcher import Enforcement
from radixrt.grammar.schema import keywords as kw
from radixrt.grammar.schema.finite import is_finite
from radixrt.grammar.schema.formats import PATTERNS
from radixrt.grammar.schema.validator import SchemaValidator

MAX_PROPERTIES = 4096  # of one object: the engine's time grows with their square


@dataclass(frozen=True, slots=True)
class ParsedSchema:
    """A schema ready for the engine.

    Attributes:
        schema: rewritten without what constrains nothing; same meaning, same key order.
        nodes: JSON Pointer -> subschema, for all that can be reached from the root, in order.
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


def parse_schema(text: str, config: GrammarConfig) -> ParsedSchema:
    """Read a schema.

    Raises:
        GrammarTooCostly: nested deeper than config.max_grammar_depth.
        InvalidRequest: not JSON, or not a JSON Schema.
        UnsupportedGrammar: a keyword that cannot be enforced exactly; `parameter` is its JSON Pointer.
    """
    raw = _load(text, config)
    validator = SchemaValidator.build(raw)
    root = _load(text, config)  # rewritten below; the validator keeps the original
    if isinstance(root, bool):
        if not root:
            raise UnsupportedGrammar("the schema false accepts no value", parameter="", value=False)
        root = {}
    walk = _Walk(root)
    walk.run()
    if not is_finite(walk.nodes, walk.targets):
        pointer, target = next(iter(walk.targets.items()))
        raise UnsupportedGrammar(
            f"the recursion through $ref at {pointer}/$ref has no end: every value would be infinite",
            parameter=f"{pointer}/$ref",
            value=target,
        )
    for node in walk.nodes.values():
        if isinstance(node, dict):
            _spell_out_format(node)
    return ParsedSchema(root, walk.nodes, MappingProxyType(walk.keywords), validator)


def _load(text: str, config: GrammarConfig) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _too_deep(config: GrammarConfig) -> GrammarTooCostly:
    return GrammarTooCostly(
        f"a schema may be nested at most {config.max_grammar_depth} levels deep (max_grammar_depth)",
        parameter="grammar",
        value=config.max_grammar_depth,
    )


def escape_pointer(key: str) -> str:
    """Give a key as a part of a JSON Pointer. Pure."""
    return key.replace("~", "~0").replace("/", "~1")


class _Walk:
    """One pass over the subschemas that count, through references; rewrites them in place.

    Attributes:
        nodes: JSON Pointer -> subschema.
        targets: JSON Pointer of a subschema with $ref -> JSON Pointer that it refers to.
        keywords: JSON Pointer of a keyword -> how it is enforced.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.nodes: dict[str, Any] = {}
        self.targets: dict[str, str] = {}
        self.keywords: dict[str, Enforcement] = {}
        self._anchors: dict[str, str] | None = None
        self._inner_id: str | None = None

    def run(self) -> None:
        """Visit every subschema that the root reaches, in document order, referenced ones last."""
        self.root.pop("x-guidance", None)  # the engine would take options from it
        pending, referenced = [("", self.root)], deque[tuple[str, Any]]()
        while pending or referenced:
            pointer, node = pending.pop() if pending else referenced.popleft()
            if pointer in self.nodes:
                continue
            self.nodes[pointer] = node
            if isinstance(node, dict):
                self._sort_keywords(pointer, node)
                pending += reversed(_children(pointer, node))
                if "$ref" in node:
                    target = self._resolve(pointer, node["$ref"])
                    self.targets[pointer] = target
                    referenced.append((target, self._at(pointer, target)))
        if self._inner_id is not None and self.targets:
            raise UnsupportedGrammar(
                f"$id at {self._inner_id}/$id is not supported below the root of a schema with $ref",
                parameter=f"{self._inner_id}/$id",
            )

    def _sort_keywords(self, pointer: str, node: dict[str, Any]) -> None:
        for keyword, value in list(node.items()):
            place = f"{pointer}/{escape_pointer(keyword)}"
            if keyword == "properties" and len(value) > MAX_PROPERTIES:
                raise GrammarTooCostly(
                    f"properties at {place} may have at most {MAX_PROPERTIES} members, got {len(value)}",
                    parameter=place,
                    value=len(value),
                )
            if keyword == "$id" and pointer and self._inner_id is None:
                self._inner_id = pointer
            if _constrains_nothing(keyword, value, node):
                self.keywords[place] = "annotation"
                node.pop(keyword, None)
            elif keyword in kw.REFUSED:
                raise UnsupportedGrammar(
                    f"the keyword {keyword} at {place} cannot be enforced while generating",
                    parameter=place,
                    value=value,
                )
            else:
                self.keywords[place] = "mask" if keyword in kw.ENFORCED else "annotation"
                if keyword in kw.COUNTS and isinstance(value, float):
                    node[keyword] = int(value)

    def _resolve(self, pointer: str, reference: str) -> str:
        """Give the JSON Pointer that a reference means."""
        if not reference.startswith("#"):
            raise UnsupportedGrammar(
                f"$ref at {pointer}/$ref must be local (#...), got {reference[:200]!r}: nothing is fetched",
                parameter=f"{pointer}/$ref",
                value=reference,
            )
        fragment = unquote(reference[1:])
        if fragment == "" or fragment.startswith("/"):
            return fragment
        if self._anchors is None:
            self._anchors = dict(_anchors(self.root))
        if fragment not in self._anchors:
            raise _dangling(pointer, reference)
        return self._anchors[fragment]

    def _at(self, pointer: str, target: str) -> Any:
        """Give the subschema at a JSON Pointer."""
        node: Any = self.root
        for part in target.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isascii() and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise _dangling(pointer, f"#{target}")
        if not isinstance(node, dict | bool):
            raise _dangling(pointer, f"#{target}")
        return node


def _dangling(pointer: str, reference: str) -> InvalidRequest:
    return InvalidRequest(
        f"$ref at {pointer}/$ref refers to {reference[:200]!r}, where no subschema stands",
        parameter=f"{pointer}/$ref",
        value=reference,
    )


def _children(pointer: str, node: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Give the subschemas that stand directly in a schema, with their pointers. Pure."""
    found: list[tuple[str, Any]] = []
    for keyword, value in node.items():
        place = f"{pointer}/{escape_pointer(keyword)}"
        if keyword in kw.SCHEMA_MAPS:
            found += [(f"{place}/{escape_pointer(key)}", child) for key, child in value.items()]
        elif keyword in kw.SCHEMA_LISTS or (keyword == "items" and isinstance(value, list)):
            found += [(f"{place}/{index}", child) for index, child in enumerate(value)]
        elif keyword in kw.SCHEMAS:
            found.append((place, value))
    return found


def _constrains_nothing(keyword: str, value: Any, node: Mapping[str, Any]) -> bool:
    """Tell whether a keyword that looks like a constraint is none here. Pure."""
    if keyword == "format":
        return value not in kw.FORMATS
    if keyword == "uniqueItems":
        return value is False
    if keyword == "additionalItems":
        return not isinstance(node.get("items"), list)
    return keyword in kw.NEEDS_COMPANION and not kw.NEEDS_COMPANION[keyword] & node.keys()


def _spell_out_format(node: dict[str, Any]) -> None:
    """Put a pattern in the place of a format that we know better than the engine."""
    pattern = PATTERNS.get(node.get("format", ""))
    if pattern is None:
        return
    del node["format"]
    if "pattern" in node:
        node["allOf"] = [*node.get("allOf", ()), {"pattern": pattern}]
    else:
        node["pattern"] = pattern


def _anchors(root: Any) -> Iterator[tuple[str, str]]:
    """Give each $anchor and the pointer of its schema."""
    pending = [("", root)]
    while pending:
        pointer, value = pending.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$anchor"), str):
                yield value["$anchor"], pointer
            pending += [(f"{pointer}/{escape_pointer(key)}", child) for key, child in value.items()]
        elif isinstance(value, list):
            pending += [(f"{pointer}/{index}", child) for index, child in enumerate(value)]
