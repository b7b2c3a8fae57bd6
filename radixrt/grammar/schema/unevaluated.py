"""unevaluatedProperties and unevaluatedItems: split a schema until it is known which parts look at what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from radixrt.errors import GrammarTooCostly, UnsupportedGrammar

_MAX_CASES = 64
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class _Split:
    """One way in which a schema can hold.

    Attributes:
        parts: schemas that all hold.
        names, patterns: of the properties that they evaluate.
        num_items: leading items that they evaluate.
        has_all: they evaluate every property (or item).
    """

    parts: tuple[Any, ...] = ()
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    num_items: int = 0
    has_all: bool = False

    def with_(self, other: _Split) -> _Split:
        return _Split(
            self.parts + other.parts,
            self.names | other.names,
            self.patterns | other.patterns,
            max(self.num_items, other.num_items),
            self.has_all or other.has_all,
        )

    @property
    def evaluates(self) -> bool:
        return self.has_all or bool(self.names or self.patterns or self.num_items)


class Evaluation:
    """Knows what each way to satisfy a schema evaluates."""

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve

    def close(self, rest: Any, node: Mapping[str, Any], keyword: str) -> Any:
        """Give a schema that means `node` with `rest` for whatever its other keywords leave unevaluated.

        Raises:
            UnsupportedGrammar: what is evaluated depends on the value in ways that no case split tells.
        """
        open_node = {name: value for name, value in node.items() if name != keyword}
        is_object = keyword == "unevaluatedProperties"
        cases = []
        for split in self._splits(open_node, is_object, 0):
            parts = list(split.parts)
            if not split.has_all and is_object:
                members: dict[str, Any] = {"additionalProperties": rest}
                if split.names:
                    members["properties"] = dict.fromkeys(sorted(split.names), True)
                if split.patterns:
                    members["patternProperties"] = dict.fromkeys(sorted(split.patterns), True)
                parts.append(members)
            elif not split.has_all:
                heads = {"prefixItems": [True] * split.num_items} if split.num_items else {}
                parts.append({**heads, "items": rest})
            cases.append({"allOf": parts} if len(parts) != 1 else parts[0])
        return cases[0] if len(cases) == 1 else {"anyOf": cases}

    def _splits(self, node: Any, is_object: bool, depth: int) -> list[_Split]:
        if isinstance(node, bool):
            return [_Split((node,))]
        if depth > _MAX_DEPTH:
            raise UnsupportedGrammar("it stands beside a recursive reference", parameter="")
        own = {name: value for name, value in node.items() if name not in _APPLICATORS}
        factors = [[_Split((own,)).with_(_own(node, is_object))]]
        for keyword in _APPLICATORS:
            if keyword in node:
                factors += self._factors(keyword, node, is_object, depth + 1)
        combined = [_Split()]
        for factor in factors:
            combined = [one.with_(other) for one, other in product(combined, factor)]
            if len(combined) > _MAX_CASES:
                raise GrammarTooCostly(f"it has more than {_MAX_CASES} cases", parameter="grammar")
        return combined

    def _factors(
        self, keyword: str, node: Mapping[str, Any], is_object: bool, depth: int
    ) -> Iterator[list[_Split]]:
        value = node[keyword]
        if keyword == "$ref":
            yield self._splits(self._resolve(value), is_object, depth)
        elif keyword == "allOf":
            yield from (self._splits(part, is_object, depth) for part in value)
        elif keyword == "anyOf":
            yield self._any_of(value, is_object, depth)
        elif keyword == "oneOf":
            yield [
                split.with_(_Split(tuple({"not": other} for j, other in enumerate(value) if j != i)))
                for i, part in enumerate(value)
                for split in self._splits(part, is_object, depth)
            ]
        elif keyword == "if":
            fails = _Split(({"not": value},))
            holds = self._splits(value, is_object, depth)
            after = self._splits(node.get("then", True), is_object, depth)
            otherwise = self._splits(node.get("else", True), is_object, depth)
            yield [
                *(one.with_(other) for one, other in product(holds, after)),
                *map(fails.with_, otherwise),
            ]
        elif keyword == "dependentSchemas":
            for name, part in value.items():
                has_it, lacks_it = (
                    _Split(({"type": "object", "required": [name]},)),
                    _Split(({"properties": {name: False}},)),
                )
                yield [lacks_it, *(has_it.with_(split) for split in self._splits(part, is_object, depth))]

    def _any_of(self, options: Sequence[Any], is_object: bool, depth: int) -> list[_Split]:
        """Give every set of options that hold, but for those that evaluate nothing."""
        splits = [self._splits(option, is_object, depth) for option in options]
        if not any(split.evaluates for found in splits for split in found):
            return [_Split(({"anyOf": list(options)},))]
        if 2 ** len(options) > _MAX_CASES:
            raise GrammarTooCostly(f"it has more than {_MAX_CASES} cases", parameter="grammar")
        found = []
        for choice in product((True, False), repeat=len(options)):
            if any(choice):
                factors = [
                    taken if is_taken else [_Split(({"not": option},))]
                    for is_taken, taken, option in zip(choice, splits, options, strict=True)
                ]
                for way in product(*factors):
                    split = _Split()
                    for part in way:
                        split = split.with_(part)
                    found.append(split)
        return found


_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "then", "else")


def _own(node: Mapping[str, Any], is_object: bool) -> _Split:
    """Give what the keywords of a schema itself evaluate. Pure."""
    if is_object:
        has_all = "additionalProperties" in node or "unevaluatedProperties" in node
        names = frozenset(node.get("properties", ()))
        return _Split((), names, frozenset(node.get("patternProperties", ())), 0, has_all)
    if "contains" in node:
        raise UnsupportedGrammar("it depends on which items contains finds", parameter="")
    has_all = "items" in node or "unevaluatedItems" in node
    return _Split((), num_items=len(node.get("prefixItems", ())), has_all=has_all)
