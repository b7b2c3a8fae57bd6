"""Which keywords to leave out of the mask so that it allows at least what the schema allows.

Leaving a constraint out makes a schema weaker, except below `not`, `if`, `oneOf` and a bounded `contains`: there the
keyword itself gives way. `oneOf` gives way to `anyOf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from radixrt.errors import InvalidRequest, UnsupportedGrammar
from radixrt.grammar.schema import keywords as kw
from radixrt.grammar.schema.references import References, children

# Those say which members `additionalProperties` and the like are about: these go together.
_COMPANIONS = {
    "properties": ("additionalProperties",),
    "patternProperties": ("additionalProperties",),
    "prefixItems": ("items", "additionalItems"),
    "items": ("additionalItems",),
    "if": ("then", "else"),
    "contains": ("minContains", "maxContains"),
}
_ALWAYS_KEPT = frozenset({"$ref", "type"})
_EVALUATING = frozenset(
    {*kw.SCHEMA_MAPS, *kw.SCHEMA_LISTS, *kw.SCHEMAS, "$ref", "$dynamicRef", "dependencies"} - kw.DEFINITIONS
)


class Weakening:
    """The keywords that one schema's mask leaves out, as they become known.

    Attributes:
        places: JSON Pointers of these keywords; of a oneOf: it is read as anyOf.
    """

    def __init__(self, root: Any, draft: int) -> None:
        self.places: frozenset[str] = frozenset()
        self._root = root
        self._references = References(root, draft)
        self._leaves_unevaluated = False
        self._nodes: dict[str, Any] = {}
        self._blockers: dict[
            str, set[str]
        ] = {}  # subschema -> "", or the outermost keyword that forbids weakening

    def add(self, place: str) -> bool:
        """Leave out what the keyword at a place says; False if that cannot be done, or changes nothing.

        Args:
            place: of a keyword, of something in its value, or of a whole subschema.
        """
        self._survey()
        before = self.places
        pointer, keyword = self._keyword_at(place)
        holder = self._nodes.get(pointer)
        if isinstance(holder, dict) and keyword in holder:
            if keyword in _ALWAYS_KEPT:
                return False
            self._leave_out(pointer, keyword)
            if keyword == "uniqueItems":
                self._leave_out_alike()
        elif isinstance(node := self._nodes.get(place), dict):
            for name in node.keys() - _ALWAYS_KEPT:
                self._leave_out(place, name)
        if self._leaves_unevaluated and self.places != before:
            self._leave_out_unevaluated()
        return self.places != before

    def _leave_out_unevaluated(self) -> None:
        """Leave out all that is about members which nothing evaluated: more of them look like that now."""
        before = None
        while before != self.places:  # a oneOf that gave way forbids no more
            before = self.places
            self._survey()
            for pointer, node in self._nodes.items():
                for name in ("unevaluatedItems", "unevaluatedProperties"):
                    if isinstance(node, dict) and name in node:
                        self._leave_out(pointer, name)

    def _leave_out_alike(self) -> None:
        """Leave out all uniqueItems over many values: they would be found one by one otherwise."""
        for pointer, node in self._nodes.items():
            items = node.get("items", {}) if isinstance(node, dict) else {}
            is_small = isinstance(items, dict) and not items.keys().isdisjoint({"enum", "const"})
            if isinstance(node, dict) and node.get("uniqueItems") is True and not is_small:
                self._leave_out(pointer, "uniqueItems")

    def _keyword_at(self, place: str) -> tuple[str, str]:
        """Give the subschema and the keyword that a place belongs to."""
        while place:
            pointer, _, keyword = place.rpartition("/")
            if pointer in self._nodes:
                node = self._nodes[pointer]
                if keyword == "pattern" and isinstance(node, dict) and "pattern" not in node:
                    keyword = "format"  # some formats are enforced as patterns
                return pointer, keyword
            place = pointer
        return "", ""

    def _leave_out(self, pointer: str, keyword: str) -> None:
        blockers = self._blockers[pointer] - {""}
        for blocker in blockers:
            self._note(*self._keyword_at(blocker))
        if not blockers:
            self._note(pointer, keyword)

    def _note(self, pointer: str, keyword: str) -> None:
        names = {keyword, *_COMPANIONS.get(keyword, ())} & self._nodes[pointer].keys()
        self.places |= {f"{pointer}/{name}" for name in names}
        self._leaves_unevaluated |= keyword in _EVALUATING and keyword != "oneOf"

    def _survey(self) -> None:
        """Find all subschemas that the root reaches, and what forbids weakening them."""
        self._nodes, self._blockers = {}, {}
        pending = [("", self._root, "")]
        while pending:
            pointer, node, blocker = pending.pop()
            known = self._blockers.setdefault(pointer, set())
            if blocker in known:
                continue
            known.add(blocker)
            self._nodes[pointer] = node
            if isinstance(node, dict):
                pending += self._below(pointer, node, blocker)

    def _below(self, pointer: str, node: Mapping[str, Any], blocker: str) -> Iterator[tuple[str, Any, str]]:
        for place, child in children(pointer, node):
            keyword = place[len(pointer) + 1 :].partition("/")[0]
            if keyword in kw.DEFINITIONS or f"{pointer}/{keyword}" in self.places - _any_places(self.places):
                continue
            yield (
                place,
                child,
                blocker or (f"{pointer}/{keyword}" if self._blocks(pointer, keyword, node) else ""),
            )
        for keyword in ("$ref", "$dynamicRef"):
            if isinstance(value := node.get(keyword), str):
                try:
                    target = self._references.resolve(pointer, keyword, value)
                    yield target, self._references.at(pointer, keyword, target), blocker
                except (InvalidRequest, UnsupportedGrammar):
                    continue  # refused where it counts

    def _blocks(self, pointer: str, keyword: str, node: Mapping[str, Any]) -> bool:
        if keyword == "oneOf":
            return f"{pointer}/oneOf" not in self.places
        return keyword in ("not", "if") or (keyword == "contains" and "maxContains" in node)


def _any_places(places: frozenset[str]) -> frozenset[str]:
    """Give those that are read as anyOf: what is below them still counts."""
    return frozenset(place for place in places if place.endswith("/oneOf"))
