"""From a GBNF grammar to the engine's dialect, exactly: any way to read the text counts, not a greedy one alone.

Every character can be a terminal of its own; then nothing is greedy. That is slow, so parts without rules become one
terminal wherever a greedy reading of it is the only one.
"""

from __future__ import annotations

from collections.abc import Mapping

from radixrt.config import GrammarConfig
from radixrt.errors import GrammarTooCostly, UnsupportedGrammar
from radixrt.grammar.ebnf_load import ROOT, Node, load_ebnf, place_at
from radixrt.grammar.lark_front import EngineGrammar, write_greedy, write_plainly
from radixrt.grammar.lark_load import Expr, LarkGrammar
from radixrt.grammar.regex_algebra import class_text

_LIMIT = 1 << 40


def ebnf_to_engine(text: str, config: GrammarConfig) -> EngineGrammar:
    """Give the grammar in the engine's dialect.

    Raises:
        GrammarTooCostly: over a limit once its repeats are written out.
        UnsupportedGrammar: see `load_ebnf`; or it accepts no text.
    """
    rules = load_ebnf(text)
    size = sum(map(_size, rules.values()))
    if size > config.max_grammar_atoms:
        raise GrammarTooCostly(
            f"an EBNF grammar may have at most {config.max_grammar_atoms} parts (max_grammar_atoms) once its repeats "
            f"are written out, got {size}",
            parameter="grammar",
            value=size,
        )
    try:
        found = write_greedy(_Translation(rules, text, is_merged=True).grammar, config)
    except (GrammarTooCostly, UnsupportedGrammar):
        found = None  # a terminal is too large, or can end in several places
    return found or write_plainly(_Translation(rules, text, is_merged=False).grammar, config)


def _size(node: Node) -> int:
    inner = sum(map(_size, node.parts)) + 1
    return min(inner * max(node.low, node.high or 1, 1), _LIMIT) if node.kind == "repeat" else inner


class _Translation:
    """The rules as a Lark grammar.

    Attributes:
        grammar: the result.
    """

    def __init__(self, rules: Mapping[str, Node], text: str, *, is_merged: bool) -> None:
        self._is_merged = is_merged
        self._text = text
        self._terminals: dict[str, str] = {}
        self._places: dict[str, str] = {"start": place_at(text, rules[ROOT].offset)}
        found = {f"rule {name}": self._expr(node) for name, node in rules.items()}
        self.grammar = LarkGrammar(
            {"start": Expr("rule", name=f"rule {ROOT}"), **found}, self._terminals, self._places, ()
        )

    def _expr(self, node: Node) -> Expr:
        if self._is_merged and (pattern := _pattern(node)) is not None:
            if not node.is_nullable:
                return self._terminal(pattern, node)
            if node.kind == "repeat" and not node.parts[0].is_nullable and node.high != 0:
                limit = "" if node.high is None else str(node.high)
                inner = _pattern(node.parts[0])
                return Expr("repeat", (self._terminal(f"(?:{inner}){{1,{limit}}}", node),), low=0, high=1)
        if node.kind == "chars":
            if not node.chars:
                return Expr("alt")
            return self._terminal(class_text(node.chars), node)
        if node.kind == "rule":
            return Expr("rule", name=f"rule {node.name}")
        parts = tuple(map(self._expr, node.parts))
        return Expr(node.kind, parts, low=node.low, high=node.high)

    def _terminal(self, pattern: str, node: Node) -> Expr:
        # Merged ones are told apart by their places: what may follow each of them is known better so.
        name = f"{pattern} {node.offset}" if self._is_merged else pattern
        self._terminals[name] = pattern
        self._places.setdefault(name, place_at(self._text, node.offset))
        return Expr("terminal", name=name)


def _pattern(node: Node) -> str | None:
    """Write a part without rules as a regular expression; None if it has rules. Pure."""
    if node.kind == "rule" or (node.kind == "chars" and not node.chars):
        return None
    if node.kind == "chars":
        return class_text(node.chars)
    parts = [_pattern(part) for part in node.parts]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if node.kind == "seq":
        return "".join(known)
    if node.kind == "alt":
        return f"(?:{'|'.join(known)})"
    return f"(?:{known[0]}){{{node.low},{'' if node.high is None else node.high}}}"
