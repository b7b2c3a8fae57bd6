"""Where the references of a schema lead: pointers, anchors and nested $id, within the document alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from radixrt.errors import InvalidRequest, UnsupportedGrammar
from radixrt.grammar.schema import keywords as kw


def escape_pointer(key: str) -> str:
    """Give a key as a part of a JSON Pointer. Pure."""
    return key.replace("~", "~0").replace("/", "~1")


def children(pointer: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give the subschemas that stand directly in a schema, with their pointers. Pure."""
    for keyword, value in node.items():
        place = f"{pointer}/{escape_pointer(keyword)}"
        if keyword in kw.SCHEMA_MAPS and isinstance(value, dict):
            for key, child in value.items():
                yield f"{place}/{escape_pointer(key)}", child
        elif (keyword in kw.SCHEMA_LISTS or keyword == "items") and isinstance(value, list):
            for index, child in enumerate(value):
                yield f"{place}/{index}", child
        elif keyword in kw.SCHEMAS:
            yield place, value


class References:
    """The names that a document gives to its subschemas.

    Invariant: `resources` maps the pointer of each schema with an identifier, and the root's "", to its URI.
    """

    def __init__(self, root: Any, draft: int) -> None:
        """Read all names. Cost: linear in the document."""
        self.root = root
        self.resources: dict[str, str] = {"": ""}
        self._pointers: dict[str, str] = {"": ""}  # of each URI
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: dict[str, list[str]] = {}
        self._draft = draft
        pending: list[tuple[str, Any, str]] = [("", root, "")]
        while pending:
            pointer, node, home = pending.pop()
            if isinstance(node, dict):
                home = self._read(pointer, node, home)
                pending += [(place, child, home) for place, child in children(pointer, node)]

    def _read(self, pointer: str, node: Mapping[str, Any], home: str) -> str:
        """Note the names of one schema; give the pointer of the resource that it belongs to."""
        identifier = node.get("id" if self._draft == 4 else "$id")
        if self._draft <= 7 and "$ref" in node:
            return home  # all else is ignored there
        if isinstance(identifier, str) and identifier.startswith("#"):
            self._anchors[home, identifier[1:]] = pointer
        elif isinstance(identifier, str):
            uri = _joined(self.resources[home], identifier, f"{pointer}/$id").removesuffix("#")
            self.resources[pointer] = uri
            self._pointers.setdefault(uri, pointer)
            home = pointer
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := node.get(keyword), str):
                self._anchors[home, name] = pointer
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(name, []).append(pointer)
        return home

    def resolve(self, pointer: str, keyword: str, reference: object) -> str:
        """Give the JSON Pointer that a reference at a place means.

        Raises:
            InvalidRequest: it is no reference, or there is no subschema.
            UnsupportedGrammar: it leads out of the document, or to several places by turns.
        """
        place = f"{pointer}/{keyword}"
        if not isinstance(reference, str):  # draft 4 does not say that it must be one
            raise InvalidRequest(
                f"{keyword} at {place} must be a string, got {type(reference).__name__}",
                parameter=place,
                value=reference,
            )
        home = self._home(pointer)
        base = self.resources[home]
        whole = base + reference if reference[:1] == "#" else _joined(base, reference, place)
        uri, _, fragment = whole.partition("#")
        if uri != base and uri not in self._pointers:
            raise UnsupportedGrammar(
                f"{keyword} at {pointer}/{keyword} must be local (#...), got {reference[:200]!r}: nothing is fetched",
                parameter=f"{pointer}/{keyword}",
                value=reference,
            )
        target_home = home if uri == base else self._pointers[uri]
        fragment = unquote(fragment)
        if fragment == "" or fragment.startswith("/"):
            return target_home + fragment
        if (target_home, fragment) not in self._anchors:
            raise _dangling(pointer, keyword, reference)
        target = self._anchors[target_home, fragment]
        rivals = self._dynamic.get(fragment, [])
        if keyword == "$dynamicRef" and target in rivals and len(rivals) > 1:
            raise UnsupportedGrammar(
                f"$dynamicRef at {pointer}/$dynamicRef has several targets: {', '.join(rivals)[:200]}",
                parameter=f"{pointer}/$dynamicRef",
                value=reference,
            )
        return target

    def at(self, pointer: str, keyword: str, target: str) -> Any:
        """Give the subschema that a reference at `pointer` leads to."""
        node: Any = self.root
        for part in target.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isascii() and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise _dangling(pointer, keyword, f"#{target}")
        if not isinstance(node, dict | bool):
            raise _dangling(pointer, keyword, f"#{target}")
        return node

    def _home(self, pointer: str) -> str:
        """Give the pointer of the innermost resource around a place."""
        while pointer not in self.resources:
            pointer = pointer.rpartition("/")[0]
        return pointer


def _joined(base: str, reference: str, place: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError as error:
        raise InvalidRequest(
            f"{reference[:200]!r} at {place} is no URI: {error}", parameter=place, value=reference
        ) from None


def _dangling(pointer: str, keyword: str, reference: str) -> InvalidRequest:
    return InvalidRequest(
        f"{keyword} at {pointer}/{keyword} refers to {reference[:200]!r}, where no subschema stands",
        parameter=f"{pointer}/{keyword}",
        value=reference,
    )
