"""Read a grammar in GBNF, the notation of llama.cpp (its grammars/README.md describes it).

    root  ::= "yes" | item ("," item){0,3}     # a comment
    item  ::= [a-z0-9]+ | "\\"" [^"\\n]* "\\""

A grammar over characters: nothing is read greedily, nothing is skipped. Rules may call themselves at any place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from radixrt.errors import GrammarTooCostly, UnsupportedGrammar
from radixrt.grammar.regex_algebra import ALL_CHARS, Chars, char_set, invert

ROOT = "root"
MAX_NODES = 50_000
MAX_NESTING = 100
MAX_DEPTH = 300  # of parts in parts
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_LIMITS = re.compile(r"\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{0,9})[ \t]*)?\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ENDS = frozenset("|)")


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a rule.

    Attributes:
        kind: "chars" (one character), "seq", "alt", "repeat" or "rule".
        parts: operands; of "repeat" one.
        chars: of "chars".
        name: of "rule".
        low, high: of "repeat"; high None is without limit.
        offset: where it begins in the text.
        depth: 1 + that of its deepest part.
        is_nullable: it allows the empty text, whatever its rules do.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    chars: Chars = ()
    name: str = ""
    low: int = 0
    high: int | None = None
    offset: int = field(default=0, compare=False)
    depth: int = field(default=1, compare=False)
    is_nullable: bool = field(default=False, compare=False)


def load_ebnf(text: str) -> Mapping[str, Node]:
    """Give the rules by name; "root" is among them.

    Raises:
        GrammarTooCostly: more than 50,000 parts, parentheses deeper than 100, or parts in parts deeper than 300.
        UnsupportedGrammar: it is not GBNF or asks for what is not translated; says line and column.
    """
    return _Reader(text).run()


def place_at(text: str, offset: int) -> str:
    """Give a place as "line 3, column 7". Pure."""
    line = text.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - text.rfind(chr(10), 0, offset)}"


class _Reader:
    """One pass over the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._num_nodes = 0
        self._rules: dict[str, Node] = {}

    def run(self) -> Mapping[str, Node]:
        self._skip(_SPACE)
        while self._position < len(self._text):
            self._rule()
            self._skip(_SPACE)
        if ROOT not in self._rules:
            raise UnsupportedGrammar(
                "the EBNF grammar has no rule named root", parameter="grammar", value=self._text[:200]
            )
        for node in self._nodes():
            if node.kind == "rule" and node.name not in self._rules:
                self._fail(f"the rule {node.name} is not defined", node.offset)
        return self._rules

    def _nodes(self) -> list[Node]:
        found, pending = [], list(self._rules.values())
        while pending:
            node = pending.pop()
            found.append(node)
            pending += node.parts
        return found

    def _rule(self) -> None:
        start = self._position
        name = self._match(_NAME)
        if name is None:
            self._fail("the name of a rule must stand here")
        self._skip(_BLANK)
        if not self._text.startswith("::=", self._position):
            self._fail("::= must stand here")
        self._position += 3
        self._skip(_SPACE)
        if name in self._rules:
            self._fail(f"the rule {name} is defined twice", start)
        self._rules[name] = self._alternatives(0)
        if self._position < len(self._text) and self._text[self._position] not in "\r\n":
            self._fail(f"unexpected {self._text[self._position]!r}")

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            raise GrammarTooCostly(
                f"parentheses may be nested at most {MAX_NESTING} deep", parameter="grammar"
            )
        start = self._position
        parts = [self._sequence(depth)]
        while self._next_is("|", depth):
            self._position += 1
            self._skip(_SPACE)
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else self._node("alt", start, parts=tuple(parts))

    def _next_is(self, sign: str, depth: int) -> bool:
        """Tell whether a sign comes next; it may stand on the next line. Moves there if it does."""
        found = _SPACE.match(self._text, self._position)
        assert found is not None
        if self._text.startswith(sign, found.end()):
            self._position = found.end()
            return True
        if depth:
            self._position = found.end()
        return False

    def _sequence(self, depth: int) -> Node:
        start = self._position
        parts: list[Node] = []
        while True:
            self._skip(_SPACE if depth else _BLANK)
            if self._position >= len(self._text) or self._text[self._position] in _ENDS:
                break
            if self._text[self._position] in "\r\n":
                break
            parts.append(self._item(depth))
        return parts[0] if len(parts) == 1 else self._node("seq", start, parts=tuple(parts))

    def _item(self, depth: int) -> Node:
        start, sign = self._position, self._text[self._position]
        if sign == '"':
            node = self._literal()
        elif sign == "[":
            node = self._class()
        elif sign == ".":
            self._position += 1
            node = self._node("chars", start, chars=ALL_CHARS)
        elif sign == "(":
            self._position += 1
            node = self._alternatives(depth + 1)
            if not self._text.startswith(")", self._position):
                self._fail("the parenthesis is never closed", start)
            self._position += 1
        elif sign in "<!":
            self._fail("tokens of a vocabulary (<...>, !<...>) are not translated")
        elif name := self._match(_NAME):
            node = self._node("rule", start, name=name)
        else:
            self._fail(f"unexpected {sign!r}")
        return self._repeated(node, start)

    def _repeated(self, node: Node, start: int) -> Node:
        while self._position < len(self._text) and self._text[self._position] in "*+?{":
            sign = self._text[self._position]
            if sign != "{":
                self._position += 1
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            else:
                found = _LIMITS.match(self._text, self._position)
                if found is None:
                    self._fail("a repeat is written {2}, {2,} or {2,5}")
                low = int(found[1])
                high = int(found[3]) if found[3] else None if found[2] else low
                if high is not None and high < low:
                    self._fail(f"a repeat from {low} to {high}")
                self._position = found.end()
            node = self._node("repeat", start, parts=(node,), low=low, high=high)
        return node

    def _literal(self) -> Node:
        start = self._position
        self._position += 1
        parts = []
        while not self._text.startswith('"', self._position):
            at = self._position
            code = self._character(start, "the string is never closed")
            parts.append(self._node("chars", at, chars=((code, code),)))
        self._position += 1
        return parts[0] if len(parts) == 1 else self._node("seq", start, parts=tuple(parts))

    def _class(self) -> Node:
        start = self._position
        self._position += 1
        is_inverted = self._text.startswith("^", self._position)
        self._position += is_inverted
        ranges = []
        while not self._text.startswith("]", self._position):
            at = self._position
            low = high = self._character(start, "the class is never closed")
            if self._text.startswith("-", self._position) and not self._text.startswith("-]", self._position):
                self._position += 1
                high = self._character(start, "the class is never closed")
            if high < low:
                self._fail("a range that ends before it begins", at)
            ranges.append((low, high))
        self._position += 1
        chars = char_set(ranges)
        return self._node("chars", start, chars=invert(chars) if is_inverted else chars)

    def _character(self, start: int, complaint: str) -> int:
        """Read one character of a string or class, escaped or not."""
        if self._position >= len(self._text) or self._text[self._position] in "\r\n":
            self._fail(complaint, start)
        at = self._position
        if self._text[at] != "\\":
            self._position += 1
            return ord(self._text[at])
        sign = self._text[at + 1 : at + 2]
        if sign in _ESCAPES:
            self._position += 2
            return ord(_ESCAPES[sign])
        if sign not in _HEX_DIGITS:
            self._fail(f"the escape \\{sign} is not known")
        digits = self._text[at + 2 : at + 2 + _HEX_DIGITS[sign]]
        if len(digits) != _HEX_DIGITS[sign] or not re.fullmatch("[0-9A-Fa-f]+", digits):
            self._fail(f"the escape \\{sign} needs {_HEX_DIGITS[sign]} hexadecimal digits")
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            self._fail(f"\\{sign}{digits} is no character")
        self._position += 2 + len(digits)
        return code

    def _node(
        self,
        kind: str,
        offset: int,
        *,
        parts: tuple[Node, ...] = (),
        chars: Chars = (),
        name: str = "",
        low: int = 0,
        high: int | None = None,
    ) -> Node:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise GrammarTooCostly(f"an EBNF grammar may have at most {MAX_NODES} parts", parameter="grammar")
        depth = 1 + max((part.depth for part in parts), default=0)
        if depth > MAX_DEPTH:
            raise GrammarTooCostly(
                f"an EBNF grammar may have parts nested at most {MAX_DEPTH} deep", parameter="grammar"
            )
        is_nullable = {
            "seq": all(part.is_nullable for part in parts),
            "alt": any(part.is_nullable for part in parts),
            "repeat": low == 0 or all(part.is_nullable for part in parts),
        }
        return Node(kind, parts, chars, name, low, high, offset, depth, is_nullable.get(kind, False))

    def _skip(self, what: re.Pattern[str]) -> None:
        found = what.match(self._text, self._position)
        assert found is not None
        self._position = found.end()

    def _match(self, what: re.Pattern[str]) -> str | None:
        found = what.match(self._text, self._position)
        if found is None:
            return None
        self._position = found.end()
        return found[0]

    def _fail(self, reason: str, offset: int | None = None) -> NoReturn:
        place = place_at(self._text, self._position if offset is None else offset)
        raise UnsupportedGrammar(f"the grammar is not supported at {place}: {reason}", parameter="grammar")
