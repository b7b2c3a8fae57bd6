"""Sets of strings as regular expressions that can be complemented and intersected, by derivatives.

Source: Brzozowski, Derivatives of Regular Expressions (1964); Owens, Reppy and Turon, Regular-expression
derivatives re-examined (2009), for the character classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

from radixrt.errors import GrammarTooCostly

MAX_STATES = 1500
MAX_PATTERN_CHARACTERS = 20_000
_MAX_NODE_DEPTH = 400

Chars = tuple[tuple[int, int], ...]  # ascending, disjoint, inclusive ranges of code points

ALL_CHARS: Chars = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def char_set(ranges: Iterable[tuple[int, int]]) -> Chars:
    """Give the union of ranges of code points, without surrogates. Pure."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(ranges)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    for low, high in ranges:
        for first, last in ALL_CHARS:
            if max(low, first) <= min(high, last):
                yield max(low, first), min(high, last)


def invert(chars: Chars) -> Chars:
    """Give all other characters. Pure."""
    found, position = [], 0
    for low, high in chars:
        if low > position:
            found.append((position, low - 1))
        position = high + 1
    if position <= 0x10FFFF:
        found.append((position, 0x10FFFF))
    return char_set(found)


def meet(one: Chars, other: Chars) -> Chars:
    """Give the characters in both. Pure."""
    return tuple(
        (max(low, first), min(high, last))
        for low, high in one
        for first, last in other
        if max(low, first) <= min(high, last)
    )


@dataclass(frozen=True)
class Language:
    """A set of strings. Build with the functions below; equal sets may be written differently.

    Attributes:
        kind: "none", "empty", "chars", "then", "either", "both", "not" or "many".
        parts: the operands, in a fixed order.
        chars: of kind "chars".
        low, high: repeats of kind "many"; high None: any number.
        has_empty: whether the empty string is in it.
    """

    kind: str
    parts: tuple[Language, ...] = ()
    chars: Chars = ()
    low: int = 0
    high: int | None = None
    has_empty: bool = False
    depth: int = 0

    def __post_init__(self) -> None:
        depth = 1 + max((part.depth for part in self.parts), default=0)
        if depth > _MAX_NODE_DEPTH:
            raise GrammarTooCostly("a regular expression is nested too deep", parameter="grammar")
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "_hash", hash((self.kind, self.parts, self.chars, self.low, self.high)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]


NOTHING = Language("none")
EMPTY = Language("empty", has_empty=True)


def of_chars(chars: Chars) -> Language:
    return Language("chars", chars=chars) if chars else NOTHING


def many(part: Language, low: int = 0, high: int | None = None) -> Language:
    """Give `low` to `high` repeats. Pure."""
    if high == 0 or part == EMPTY:
        return EMPTY
    if part == NOTHING:
        return NOTHING if low else EMPTY
    if low == high == 1:
        return part
    if part.has_empty:
        low = 0
    return Language("many", (part,), low=low, high=high, has_empty=low == 0)


ANY_CHAR = of_chars(ALL_CHARS)
EVERYTHING = many(ANY_CHAR)


def then(*parts: Language) -> Language:
    """Give the concatenations. Pure."""
    result = EMPTY
    for part in reversed(parts):
        if NOTHING in (part, result):
            return NOTHING
        if part == EMPTY:
            continue
        if result == EMPTY:
            result = part
        elif part.kind == "then":
            result = then(part.parts[0], then(part.parts[1], result))
        else:
            result = Language("then", (part, result), has_empty=part.has_empty and result.has_empty)
    return result


def either(*parts: Language) -> Language:
    """Give the union. Pure."""
    flat = _flat("either", parts)
    if EVERYTHING in flat:
        return EVERYTHING
    flat.discard(NOTHING)
    singles = [part for part in flat if part.kind == "chars"]
    if len(singles) > 1:
        flat -= set(singles)
        flat.add(of_chars(char_set(pair for part in singles for pair in part.chars)))
    if len(flat) <= 1:
        return next(iter(flat), NOTHING)
    has_empty = any(part.has_empty for part in flat)
    return Language("either", tuple(sorted(flat, key=hash)), has_empty=has_empty)


def both(*parts: Language) -> Language:
    """Give the intersection. Pure."""
    flat = _flat("both", parts)
    flat.discard(EVERYTHING)
    if NOTHING in flat:
        return NOTHING
    if EMPTY in flat:
        return EMPTY if all(part.has_empty for part in flat) else NOTHING
    singles = [part for part in flat if part.kind == "chars"]
    if len(singles) > 1:
        flat -= set(singles)
        flat.add(of_chars(reduce(meet, (part.chars for part in singles))))
        return both(*flat)
    if len(flat) <= 1:
        return next(iter(flat), EVERYTHING)
    has_empty = all(part.has_empty for part in flat)
    return Language("both", tuple(sorted(flat, key=hash)), has_empty=has_empty)


def _flat(kind: str, parts: Iterable[Language]) -> set[Language]:
    found: set[Language] = set()
    for part in parts:
        found |= set(part.parts) if part.kind == kind else {part}
    return found


def complement(part: Language) -> Language:
    """Give all strings that are not in it. Pure."""
    if part.kind == "not":
        return part.parts[0]
    if part == NOTHING:
        return EVERYTHING
    if part == EVERYTHING:
        return NOTHING
    return Language("not", (part,), has_empty=not part.has_empty)


def word(text: str) -> Language:
    """Give the set of one string. Pure."""
    return then(*(of_chars(((ord(character), ord(character)),)) for character in text))


def words(texts: Sequence[str]) -> Language:
    """Give a set of strings, as a trie. Pure."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    return either(
        *(
            then(word(first), words(rest)) if first and len(rest) > 1 else word(first + rest[0])
            for first, rest in by_first.items()
        )
    )


def lengths(low: int, high: int | None) -> Language:
    """Give all strings of `low` to `high` characters. Pure."""
    return many(ANY_CHAR, low, high)


@lru_cache(maxsize=1 << 15)
def _derivative(language: Language, code: int) -> Language:
    """Give what may follow a character."""
    if language.kind in ("none", "empty"):
        return NOTHING
    if language.kind == "chars":
        return EMPTY if any(low <= code <= high for low, high in language.chars) else NOTHING
    if language.kind == "not":
        return complement(_derivative(language.parts[0], code))
    if language.kind == "many":
        part, low, high = language.parts[0], language.low, language.high
        rest = many(part, max(low - 1, 0), None if high is None else high - 1)
        return then(_derivative(part, code), rest)
    if language.kind == "then":
        first, rest = language.parts
        after = then(_derivative(first, code), rest)
        return either(after, _derivative(rest, code)) if first.has_empty else after
    join = either if language.kind == "either" else both
    return join(*(_derivative(part, code) for part in language.parts))


@lru_cache(maxsize=1 << 15)
def _borders(language: Language) -> frozenset[int]:
    """Give the code points where the derivative may change."""
    if language.kind == "chars":
        return frozenset(border for low, high in language.chars for border in (low, high + 1))
    if language.kind == "then" and not language.parts[0].has_empty:
        return _borders(language.parts[0])
    return frozenset().union(*map(_borders, language.parts))


def _classes(language: Language) -> list[Chars]:
    """Give classes of characters, each with one derivative."""
    borders = sorted({0, 0xE000, *_borders(language)})
    found: dict[Language, list[tuple[int, int]]] = {}
    for low, following in zip(borders, [*borders[1:], 0x110000], strict=True):
        if not 0xD800 <= low < 0xE000 and low < following:
            found.setdefault(_derivative(language, low), []).append((low, following - 1))
    return [char_set(ranges) for ranges in found.values()]


@dataclass(frozen=True, slots=True)
class Automaton:
    """A deterministic automaton over characters. State 0 is the start.

    Attributes:
        edges: per state, target -> characters; every target can still reach an accepting state.
        accepting: per state.
    """

    edges: tuple[dict[int, Chars], ...]
    accepting: tuple[bool, ...]

    @property
    def is_empty(self) -> bool:
        return not self.accepting[0] and not self.edges[0]

    @property
    def is_finite(self) -> bool:
        """Tell whether it accepts finitely many strings: no state can come back to itself."""
        done: set[int] = set()
        path: set[int] = set()
        stack: list[tuple[int, bool]] = [(0, False)]
        while stack:
            state, is_left = stack.pop()
            if is_left:
                path.discard(state)
                done.add(state)
            elif state in path:
                return False
            elif state not in done:
                path.add(state)
                stack.append((state, True))
                if any(target in path for target in self.edges[state]):
                    return False
                stack += [(target, False) for target in self.edges[state] if target not in done]
        return True


def automaton(language: Language, *, max_states: int = MAX_STATES) -> Automaton:
    """Build the automaton.

    Raises:
        GrammarTooCostly: it would have more than `max_states` states.
    """
    number = {language: 0}
    pending, edges = [language], []
    for state in pending:
        out: dict[int, Chars] = {}
        for chars in _classes(state):
            target = _derivative(state, chars[0][0])
            if target == NOTHING:
                continue
            if target not in number:
                if len(number) >= max_states:
                    raise GrammarTooCostly(
                        f"a regular expression needs more than {max_states} states", parameter="grammar"
                    )
                number[target] = len(number)
                pending.append(target)
            out[number[target]] = char_set((*out.get(number[target], ()), *chars))
        edges.append(out)
    accepting = tuple(state.has_empty for state in pending)
    live = {index for index, is_accepting in enumerate(accepting) if is_accepting}
    sources: dict[int, list[int]] = {}
    for index, out in enumerate(edges):
        for end in out:
            sources.setdefault(end, []).append(index)
    reached = list(live)
    while reached:
        for index in sources.get(reached.pop(), ()):
            if index not in live:
                live.add(index)
                reached.append(index)
    kept = [{target: chars for target, chars in out.items() if target in live} for out in edges]
    return Automaton(tuple(kept), accepting)


def is_empty(language: Language) -> bool:
    """Tell whether no string is in it.

    Raises:
        GrammarTooCostly: the automaton is too large to tell.
    """
    return language == NOTHING or automaton(language).is_empty


def contains(language: Language, text: str) -> bool:
    """Tell whether a string is in it."""
    for character in text:
        language = _derivative(language, ord(character))
    return language.has_empty


def to_pattern(language: Language) -> str:
    """Write it as a regular expression without look-around, anchored at both ends.

    Raises:
        GrammarTooCostly: it would be too long.
        ValueError: no string is in it.
    """
    machine = automaton(language)
    if machine.is_empty:
        raise ValueError("no string is in the language")
    return f"^(?:{_eliminate(machine)})$"


def _eliminate(machine: Automaton) -> str:
    """Turn an automaton into a regular expression by eliminating its states, the least connected first."""
    start, end = -1, -2
    into: dict[int, dict[int, str]] = {}  # target -> source -> expression
    out: dict[int, dict[int, str]] = {}

    def connect(source: int, target: int, text: str) -> None:
        known = out.setdefault(source, {}).get(target)
        joined = text if known is None else f"{known}|{text}"
        if len(joined) > MAX_PATTERN_CHARACTERS:
            raise GrammarTooCostly(
                f"a rewritten pattern would have more than {MAX_PATTERN_CHARACTERS} characters",
                parameter="grammar",
            )
        out[source][target] = into.setdefault(target, {})[source] = joined

    connect(start, 0, "")
    for state, edges in enumerate(machine.edges):
        for target, chars in edges.items():
            connect(state, target, class_text(chars))
        if machine.accepting[state]:
            connect(state, end, "")
    left = set(range(len(machine.edges)))
    while left:
        state = min(left, key=lambda item: (len(into.get(item, ())) * len(out.get(item, ())), -item))
        left.discard(state)
        sources, targets = into.pop(state, {}), out.pop(state, {})
        loop = targets.pop(state, None)
        sources.pop(state, None)
        middle = "" if loop is None else f"(?:{loop})*"
        for source in sources:
            out[source].pop(state, None)
        for target in targets:
            into[target].pop(state, None)
        for source, before in sources.items():
            for target, after in targets.items():
                connect(source, target, _group(before) + middle + _group(after))
    return out[start][end]


def _group(text: str) -> str:
    """Give the expression as an operand of a concatenation. Pure."""
    return f"(?:{text})" if "|" in text else text


def class_text(chars: Chars) -> str:
    """Write a class of characters. Pure."""
    if chars == ALL_CHARS:
        return r"[\s\S]"
    inverse = invert(chars)
    is_inverse = len(inverse) < len(chars)
    ranges = inverse if is_inverse else chars
    body = "".join(
        _char_text(low) if low == high else f"{_char_text(low)}-{_char_text(high)}" for low, high in ranges
    )
    if not is_inverse and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return body
    return f"[{'^' if is_inverse else ''}{body}]"


def _char_text(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    # These forms mean the same to Python and to the engines.
    if code > 0xFFFF:
        return rf"\U{code:08X}"
    return rf"\u{code:04X}" if code > 0xFF else rf"\x{code:02X}"
