"""Bound the size of a regular expression's automaton before anything is built from it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from radixrt.config import GrammarConfig
from radixrt.errors import GrammarTooCostly, UnsupportedGrammar

_LIMIT = 1 << 62  # counts saturate here

# An atom that is not a group: an escape (with its braces), a class, or a single character.
_ATOM = re.compile(r"\\[pPxuU]\{[^}]*\}|\\x[0-9A-Fa-f]{2}|\\.|[^\[\](){}*+?|\\]", re.DOTALL)
_REPEAT = re.compile(r"(?:([*+?])|\{(\d+)(,?)(\d*)\})\??")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_][A-Za-z0-9_]*>)?")


@dataclass(frozen=True, slots=True)
class _Size:
    """Atoms after writing out the repeats, and how many of them stand at or after the first choice."""

    num_atoms: int
    num_open: int | None  # None: there is no choice

    def then(self, other: _Size) -> _Size:
        num_atoms = min(self.num_atoms + other.num_atoms, _LIMIT)
        if self.num_open is not None:
            return _Size(num_atoms, min(self.num_open + other.num_atoms, _LIMIT))
        return _Size(num_atoms, other.num_open)

    def as_choice(self) -> _Size:
        return _Size(self.num_atoms, self.num_atoms)

    def repeated(self, times: int) -> _Size:
        num_atoms = min(self.num_atoms * times, _LIMIT)
        num_open = None if self.num_open is None else num_atoms
        return _Size(num_atoms, num_open)


def whole_match(pattern: str) -> str:
    """Drop a leading ^ and a trailing $: the pattern must match the whole text anyway. Pure."""
    body = pattern.removeprefix("^")
    if body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\")) - 1) % 2 == 0:
        body = body[:-1]
    return body


def max_states(pattern: str) -> int | None:
    """Bound the characters-level states of the pattern's automaton; None when it cannot be told cheaply.

    Up to the first choice (a repeat of variable length, an optional part, an alternation) there is one state per
    atom; after it a subset of the atoms to come, so at most two to their number.

    Raises:
        UnsupportedGrammar: the parentheses or brackets do not match.
    """
    size, position = _alternation(pattern, 0, depth=0)
    if position is None or size is None:
        return None
    if position < len(pattern):
        raise UnsupportedGrammar(
            f"the regular expression has an unmatched parenthesis at character {position}",
            parameter="grammar",
            value=pattern[:200],
        )
    num_open = size.num_open or 0
    return int(min(size.num_atoms + 2 ** min(num_open, 62), _LIMIT))


def check_regex(pattern: str, config: GrammarConfig, *, parameter: str = "grammar") -> None:
    """Raise unless a pattern is small enough to build anything from it. Pure.

    Raises:
        GrammarTooCostly: over config.max_grammar_atoms.
        UnsupportedGrammar: the parentheses do not match.
    """
    is_long = len(pattern) > 4 * config.max_grammar_atoms
    if (size := len(pattern) if is_long else num_atoms(pattern)) > config.max_grammar_atoms:
        raise GrammarTooCostly(
            f"a regular expression may have at most {config.max_grammar_atoms} characters (max_grammar_atoms) once "
            f"its repeats are written out, got {size}",
            parameter=parameter,
            value=pattern[:200],
        )


def num_atoms(pattern: str) -> int:
    """Bound the characters and classes of a pattern once its repeats are written out.

    Where the syntax is not a simple one, all repeats are taken as if they stood inside each other.

    Raises:
        UnsupportedGrammar: the parentheses do not match.
    """
    size, position = _alternation(pattern, 0, depth=0)
    if size is not None and position == len(pattern):
        return size.num_atoms
    product = len(pattern)
    for repeat in re.finditer(r"\{(\d+)(?:,(\d*))?\}", pattern):
        product = min(product * max(int(repeat[1][:18]), int((repeat[2] or "1")[:18]), 1), _LIMIT)
    return product


_MAX_DEPTH = 50


def _alternation(pattern: str, position: int, *, depth: int) -> tuple[_Size | None, int | None]:
    """Read branches up to a closing parenthesis or the end; (None, None) if the syntax is not a simple one."""
    total, branch, num_branches = _Size(0, None), _Size(0, None), 1
    while position < len(pattern) and pattern[position] != ")":
        if pattern[position] == "|":
            total, branch = total.then(branch), _Size(0, None)
            num_branches += 1
            position += 1
            continue
        atom, after = _atom(pattern, position, depth=depth)
        if atom is None or after is None:
            return None, None
        if repeat := _REPEAT.match(pattern, after):
            atom, after = _repeated(atom, repeat), repeat.end()
        branch, position = branch.then(atom), after
    total = total.then(branch)
    return (total.as_choice() if num_branches > 1 else total), position


def _atom(pattern: str, position: int, *, depth: int) -> tuple[_Size | None, int | None]:
    if pattern[position] == "(":
        group = _GROUP.match(pattern, position)
        assert group is not None
        if pattern.startswith("?", group.end()) or depth >= _MAX_DEPTH:  # flags, look-around
            return None, None
        size, end = _alternation(pattern, group.end(), depth=depth + 1)
        if end is None or end >= len(pattern):
            return None, None
        return size, end + 1
    if pattern[position] == "[":
        end = _class_end(pattern, position)
        return (None, None) if end is None else (_Size(1, None), end)
    atom = _ATOM.match(pattern, position)
    return (None, None) if atom is None else (_Size(1, None), atom.end())


def _class_end(pattern: str, position: int) -> int | None:
    """Give the position after a character class; None for nested classes and set operations."""
    position += 1 + pattern.startswith("^", position + 1)
    position += pattern.startswith("]", position)
    while position < len(pattern) and pattern[position] != "]":
        if pattern[position] == "[":
            return None
        position += 2 if pattern[position] == "\\" else 1
    return position + 1 if position < len(pattern) else None


def _repeated(size: _Size, repeat: re.Match[str]) -> _Size:
    if repeat[1]:
        return size.as_choice()
    low = int(repeat[2][:18])
    high = int(repeat[4][:18]) if repeat[4] else low
    is_fixed = low == high and (not repeat[3] or bool(repeat[4]))
    written = size.repeated(max(low, high, 1))
    return written if is_fixed else written.as_choice()
