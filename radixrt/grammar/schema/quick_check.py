"""A fast way to see that a schema keeps the rules of its draft; `jsonschema` needs a third of a compilation for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_BOOLEAN_SINCE_4 = frozenset(
    {"additionalItems", "additionalProperties"}
)  # elsewhere true and false came with draft 6


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_type(value: Any) -> bool:
    if isinstance(value, str):
        return value in _TYPES
    return (
        isinstance(value, list)
        and value != []
        and all(isinstance(name, str) and name in _TYPES for name in value)
    )


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(name, str) for name in value)


# What every draft from 4 on says, or more.
_PLAIN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("title", "description", "$comment", "$schema", "$ref", "id", "format", "pattern"), _is_string
    ),
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count
    ),
    **dict.fromkeys(("uniqueItems", "readOnly", "writeOnly"), _is_boolean),
    "$id": lambda value: isinstance(value, str) and "#" not in value,
    "multipleOf": lambda value: _is_number(value) and value > 0,
    "type": _is_type,
    "required": _is_names,
    "enum": lambda value: isinstance(value, list) and value != [],
    "examples": lambda value: isinstance(value, list),
    **dict.fromkeys(("default", "const"), lambda _: True),
}
_ONE = frozenset({"items", "not", "if", "then", "else", "contains", "propertyNames", *_BOOLEAN_SINCE_4})
_LISTS = frozenset({"allOf", "anyOf", "oneOf"})
_MAPS = frozenset({"properties", "patternProperties", "definitions", "$defs"})
# Keywords of some draft with rules that are not told here.
_OTHERS = frozenset(
    {
        *("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "$vocabulary"),
        *(
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "prefixItems",
            "minContains",
            "maxContains",
        ),
        *("unevaluatedItems", "unevaluatedProperties", "deprecated"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    }
)


def is_plainly_valid(schema: Any, draft: int) -> bool:
    """Tell whether a schema surely keeps the rules of its draft; False says nothing. Pure. Cost: linear."""
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        place, node = pending.pop()
        if isinstance(node, bool):
            if draft < 6 and place not in _BOOLEAN_SINCE_4:
                return False
            continue
        if not isinstance(node, dict):
            return False
        for name, value in node.items():
            if name in _PLAIN:
                is_fine = _PLAIN[name](value)
            elif name in _ONE and not isinstance(value, list):
                pending.append((name, value))
                continue
            elif name in _LISTS or (name == "items" and draft < 2020):
                is_fine = isinstance(value, list) and value != []
                pending += [("", item) for item in value] if is_fine else []
            elif name in _MAPS:
                is_fine = isinstance(value, dict)
                pending += [("", item) for item in value.values()] if is_fine else []
            elif name in ("exclusiveMinimum", "exclusiveMaximum"):
                is_fine = draft >= 6 and _is_number(value)
            else:
                is_fine = name not in _OTHERS and name not in _ONE
            if not is_fine:
                return False
    return True
