"""Whether a recursive schema has a finite value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def is_finite(nodes: Mapping[str, Any], targets: Mapping[str, str]) -> bool:
    """Tell whether the root can have a value that ends. Pure.

    Args:
        nodes: JSON Pointer -> subschema, the root at "".
        targets: JSON Pointer of a subschema with $ref -> JSON Pointer of what it refers to.

    The least fixed point of: a schema has a finite value if what it refers to and requires has one. Types are
    not intersected across allOf, so that True can be wrong; False never is.
    Cost: linear in the nodes, times the members of one node.
    """
    if not targets:
        return True
    dependents = _dependents(nodes, targets)
    finite = dict.fromkeys(nodes, False)
    pending = list(nodes)
    while pending and not finite[""]:
        pointer = pending.pop()
        if not finite[pointer] and _holds(pointer, nodes[pointer], finite, targets):
            finite[pointer] = True
            pending += dependents.get(pointer, ())
    return finite[""]


def _dependents(nodes: Mapping[str, Any], targets: Mapping[str, str]) -> dict[str, list[str]]:
    """Give, for each node, the nodes whose verdict its own may change. Pure."""
    found: dict[str, list[str]] = {}
    for pointer, target in targets.items():
        found.setdefault(target, []).append(pointer)
    for pointer in nodes:
        keyword = pointer.rpartition("/")[0]  # a member of a keyword's list or map, or the keyword itself
        for parent in {keyword, keyword.rpartition("/")[0]}:
            if pointer and parent in nodes:
                found.setdefault(pointer, []).append(parent)
    return found


def _holds(pointer: str, node: Any, finite: Mapping[str, bool], targets: Mapping[str, str]) -> bool:
    if not isinstance(node, dict):
        return True
    if "const" in node or "enum" in node:
        return True
    if pointer in targets and not finite[targets[pointer]]:
        return False
    if not all(finite[f"{pointer}/allOf/{index}"] for index in range(len(node.get("allOf", ())))):
        return False
    for keyword in ("anyOf", "oneOf"):
        options = range(len(node.get(keyword, ())))
        if options and not any(finite[f"{pointer}/{keyword}/{index}"] for index in options):
            return False
    types = node.get("type", list(_SCALARS))
    types = {types} if isinstance(types, str) else set(types)
    return (
        bool(types & _SCALARS)
        or ("object" in types and _object_holds(pointer, node, finite))
        or ("array" in types and _array_holds(pointer, node, finite))
    )


def _object_holds(pointer: str, node: Mapping[str, Any], finite: Mapping[str, bool]) -> bool:
    properties = node.get("properties", {})
    return all(
        finite[f"{pointer}/properties/{name.replace('~', '~0').replace('/', '~1')}"]
        for name in node.get("required", ())
        if name in properties
    )


def _array_holds(pointer: str, node: Mapping[str, Any], finite: Mapping[str, bool]) -> bool:
    num_items = node.get("minItems", 0)
    keyword = "items" if isinstance(node.get("items"), list) else "prefixItems"
    heads = node.get(keyword, ())
    rest = f"{pointer}/additionalItems" if keyword == "items" else f"{pointer}/items"
    return all(finite[f"{pointer}/{keyword}/{index}"] for index in range(min(num_items, len(heads)))) and (
        num_items <= len(heads) or finite.get(rest, True)
    )
