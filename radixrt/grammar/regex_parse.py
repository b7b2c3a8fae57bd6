"""Read a regular expression into a `Language`: with anchors and look-ahead, which engines refuse."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from radixrt.errors import UnsupportedGrammar
from radixrt.grammar.regex_algebra import (
    ALL_CHARS,
    ANY_CHAR,
    EMPTY,
    EVERYTHING,
    NOTHING,
    Chars,
    Language,
    both,
    char_set,
    complement,
    either,
    invert,
    many,
    meet,
    of_chars,
    then,
)

_MAX_PATTERN_CHARACTERS = 5_000
_MAX_REPEAT = 5_000
_LINE_ENDS: Chars = ((0x0A, 0x0A),)


def search_language(pattern: str, *, is_wide: bool = False) -> Language:
    r"""Give the strings in which the pattern matches somewhere.

    Args:
        is_wide: take \d, \w and \s in their widest reading (all of Unicode); else ASCII. A complement that must
            hold under every reading needs the widest.
    Raises:
        UnsupportedGrammar: it is no regular expression, or has parts that are not regular or not known here.
    """
    return _Reader(is_wide).search(_parsed(pattern))


def match_language(pattern: str, *, is_wide: bool = False) -> Language:
    """Give the strings that the pattern matches as a whole. Raises: as `search_language`."""
    return _Reader(is_wide).match(_parsed(pattern))


def _parsed(pattern: str) -> Any:
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise _unsupported(f"it has more than {_MAX_PATTERN_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise _unsupported(str(error)) from None
    if tree.state.flags & ~re.UNICODE:
        raise _unsupported("it sets flags")
    return tree


def _unsupported(reason: str) -> UnsupportedGrammar:
    return UnsupportedGrammar(f"the regular expression is not supported: {reason}", parameter="grammar")


class _Reader:
    """Translates the tree of Python's own parser, each part together with the strings that may follow it."""

    def __init__(self, is_wide: bool, flags: int = 0) -> None:
        self._is_wide = is_wide
        self._flags = flags
        if flags & ~(re.UNICODE | re.IGNORECASE | re.DOTALL | re.VERBOSE):
            raise _unsupported("it sets flags other than i, s and x")

    def search(self, tree: Any) -> Language:
        inner = self._sequence(list(tree), EVERYTHING, is_start=False)
        return either(self._sequence(list(tree), EVERYTHING, is_start=True), then(many(ANY_CHAR, 1), inner))

    def match(self, tree: Any) -> Language:
        return self._sequence(list(tree), EMPTY, is_start=True)

    def _sequence(self, items: Sequence[Any], rest: Language, *, is_start: bool | None) -> Language:
        """Give the items followed by `rest`. is_start: nothing stands before them; None: it depends."""
        if not items:
            return rest
        before: list[bool | None] = []
        for item in items:
            before.append(is_start)
            if is_start is not False and _is_plain([item]):
                language = self._item(item, EMPTY, is_start=False)
                is_start = (None if language != EMPTY else is_start) if language.has_empty else False
            elif item[0] not in (codes.AT, codes.ASSERT, codes.ASSERT_NOT):
                is_start = None if is_start is not False else False
        for item, start in zip(reversed(items), reversed(before), strict=True):
            rest = self._item(item, rest, is_start=start)
        return rest

    def _item(self, item: Any, rest: Language, *, is_start: bool | None) -> Language:
        code, value = item
        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            if self._flags & re.IGNORECASE:
                return then(of_chars(self._any_case(code, value)), rest)
            return then(of_chars(self._chars(code, value)), rest)
        if code == codes.BRANCH:
            return either(*(self._sequence(list(branch), rest, is_start=is_start) for branch in value[1]))
        if code == codes.SUBPATTERN:
            _, added, removed, body = value
            if (added or removed) and not _is_plain(body):
                raise _unsupported("it sets flags around an anchor or a look-ahead")
            flags = (self._flags | added) & ~removed
            if flags == self._flags:
                return self._sequence(list(body), rest, is_start=is_start)
            inner = _Reader(self._is_wide, flags)
            return then(inner._sequence(list(body), EMPTY, is_start=False), rest)
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeat(value, rest, is_start=is_start)
        if code == codes.AT:
            return self._anchor(value, rest, is_start=is_start)
        if code in (codes.ASSERT, codes.ASSERT_NOT):
            direction, body = value
            if direction < 0:
                raise _unsupported("it looks behind")
            ahead = self._sequence(list(body), EVERYTHING, is_start=is_start)
            return both(ahead if code == codes.ASSERT else complement(ahead), rest)
        raise _unsupported(f"{str(code).lower()} is not known here")

    def _repeat(self, value: Any, rest: Language, *, is_start: bool | None) -> Language:
        low, high, body = value
        if max(low, 0 if high == codes.MAXREPEAT else high) > _MAX_REPEAT:
            raise _unsupported(f"it repeats more than {_MAX_REPEAT} times")
        most = None if high == codes.MAXREPEAT else int(high)
        if _is_plain(body):
            return then(many(self._sequence(list(body), EMPTY, is_start=False), int(low), most), rest)
        if (low, most) == (0, 1):
            return either(rest, self._sequence(list(body), rest, is_start=is_start))
        if (low, most) == (1, 1):
            return self._sequence(list(body), rest, is_start=is_start)
        raise _unsupported("it repeats an anchor or a look-ahead")

    def _anchor(self, place: Any, rest: Language, *, is_start: bool | None) -> Language:
        if place == codes.AT_END:
            return both(EMPTY, rest)
        if place != codes.AT_BEGINNING or is_start is None:
            raise _unsupported(f"{str(place).lower()} is not known here")
        return rest if is_start else NOTHING

    def _any_case(self, code: Any, value: Any) -> Chars:
        """Give the characters and their other cases; of ASCII letters alone."""
        if code == codes.NOT_LITERAL:
            return invert(self._any_case(codes.LITERAL, value))
        if code == codes.IN and value and value[0][0] == codes.NEGATE:
            return invert(self._any_case(codes.IN, value[1:]))
        chars = self._chars(code, value)
        if code == codes.ANY:
            return chars
        if any(high > 0x7F for _, high in chars):
            raise _unsupported("letters beyond ASCII in any case are not known here")
        letters = meet(chars, _ASCII_LETTERS)
        return char_set([*chars, *((low ^ 0x20, high ^ 0x20) for low, high in letters)])

    def _chars(self, code: Any, value: Any) -> Chars:
        if code == codes.LITERAL:
            return char_set([(value, value)])
        if code == codes.NOT_LITERAL:
            return invert(char_set([(value, value)]))
        if code == codes.ANY:
            return ALL_CHARS if self._flags & re.DOTALL else invert(_LINE_ENDS)
        ranges: list[tuple[int, int]] = []
        is_inverse = False
        for kind, content in value:
            if kind == codes.NEGATE:
                is_inverse = True
            elif kind == codes.LITERAL:
                ranges.append((content, content))
            elif kind == codes.RANGE:
                ranges.append(content)
            elif kind == codes.CATEGORY:
                ranges += self._category(content, is_inverse)
            else:
                raise _unsupported(f"{str(kind).lower()} is not known here")
        return invert(char_set(ranges)) if is_inverse else char_set(ranges)

    def _category(self, category: Any, is_inverse: bool) -> Chars:
        name = str(category).removeprefix("CATEGORY_").lower()
        is_negated = name.startswith("not_")
        wide = self._is_wide != (is_inverse != is_negated)
        chars = _category_chars(name.removeprefix("not_"), wide)
        return invert(chars) if is_negated else chars


def _is_plain(items: Any) -> bool:
    """Tell whether no anchor and no look-ahead stands in the items. Pure."""
    for code, value in items:
        if code in (codes.AT, codes.ASSERT, codes.ASSERT_NOT):
            return False
        if code == codes.BRANCH and not all(map(_is_plain, value[1])):
            return False
        if code == codes.SUBPATTERN and not _is_plain(value[3]):
            return False
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT) and not _is_plain(value[2]):
            return False
    return True


_ASCII_LETTERS: Chars = ((0x41, 0x5A), (0x61, 0x7A))
_ASCII: dict[str, Chars] = {
    "digit": ((0x30, 0x39),),
    "word": char_set([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
    "space": char_set([(0x09, 0x0D), (0x20, 0x20)]),
}
_WIDE = {"digit": re.compile(r"\d+"), "word": re.compile(r"\w+"), "space": re.compile(r"[\s\ufeff]+")}


@cache
def _category_chars(name: str, is_wide: bool) -> Chars:
    if name not in _ASCII:
        raise _unsupported(f"{name} is not known here")
    if not is_wide:
        return _ASCII[name]
    everything = np.arange(0x110000, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    return char_set((run.start(), run.end() - 1) for run in _WIDE[name].finditer(everything))
