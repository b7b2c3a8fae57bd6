"""Load a user's Lark grammar with Lark itself: imports, templates, %override and %extend are resolved here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lark import Token, Tree
from lark.exceptions import LarkError, UnexpectedInput, VisitError
from lark.grammar import NonTerminal, Symbol
from lark.load_grammar import PrepareLiterals, TerminalTreeToPattern, load_grammar

from radixrt.errors import GrammarTooCostly, UnsupportedGrammar, first_line

MAX_RULES = 2_000
MAX_NODES = 50_000
_RELATIVE_IMPORT = re.compile(r"^[ \t]*%import[ \t]+\.", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Expr:
    """A part of a rule.

    Attributes:
        kind: "seq", "alt", "repeat", "rule" or "terminal".
        parts: operands; of "repeat" one.
        name: of a rule or terminal.
        low, high: of "repeat"; high None is without limit.
    """

    kind: str
    parts: tuple[Expr, ...] = ()
    name: str = ""
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A context-free grammar over terminals.

    Attributes:
        rules: name -> right side. "start" is among them.
        terminals: name -> regular expression in Python's syntax, flags as (?i:...).
        places: terminal or rule -> where it stands in the user's text, as "line 3, column 7".
        ignored: terminals that may stand between all others.
    """

    rules: Mapping[str, Expr]
    terminals: Mapping[str, str]
    places: Mapping[str, str]
    ignored: tuple[str, ...]


def load(text: str) -> LarkGrammar:
    """Read a grammar.

    Raises:
        GrammarTooCostly: more than 2,000 rules or 50,000 parts once the templates are written out.
        UnsupportedGrammar: not a grammar, or it asks for what is not supported; says line and column if known.
    """
    if found := _RELATIVE_IMPORT.search(text):
        raise refusal("files next to a grammar are not imported", _place_at(text, found.end()))
    try:
        grammar, _ = load_grammar(text, "<grammar>", [], False)
        return _Loader(grammar, text).run()
    except UnexpectedInput as error:
        seen = getattr(error, "token", None)
        what = f"unexpected {str(seen)[:50]!r}" if seen else "unexpected characters"
        raise refusal(what, f"line {error.line}, column {error.column}") from None
    except VisitError as error:
        raise _located(text, first_line(error.orig_exc)) from None
    except (LarkError, OSError, RecursionError) as error:
        raise _located(text, first_line(error)) from None


def _located(text: str, reason: str) -> UnsupportedGrammar:
    """Make the error for a complaint that names a rule or terminal: at its last occurrence."""
    name = re.search(r"'(\w+)'|\b(\w+) defined more", reason)
    places = [found.start() for found in re.finditer(rf"\b{name[1] or name[2]}\b", text)] if name else []
    return refusal(reason, _place_at(text, places[-1]) if places else "")


def refusal(reason: str, place: str) -> UnsupportedGrammar:
    """Make the error for something that stands at a place. Pure."""
    where = f" at {place}" if place else ""
    return UnsupportedGrammar(f"the grammar is not supported{where}: {reason}", parameter="grammar")


def _place_at(text: str, offset: int) -> str:
    line = text.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - text.rfind(chr(10), 0, offset)}"


class _Loader:
    """Turns Lark's trees into expressions; writes out templates."""

    def __init__(self, grammar: Any, text: str) -> None:
        self._grammar = grammar
        self._lines = text.split("\n")
        self._templates = {str(name): (params, tree) for name, params, tree, _ in grammar.rule_defs if params}
        self._rules: dict[str, Expr] = {}
        self._terminals: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._instances: dict[tuple[str, tuple[Expr, ...]], str] = {}
        self._num_nodes = 0
        self._pending: list[tuple[str, Any, Mapping[str, Expr]]] = []
        self._declared = {str(name) for name, (tree, _) in grammar.term_defs if tree is None}

    def run(self) -> LarkGrammar:
        to_pattern = PrepareLiterals() * TerminalTreeToPattern()
        for name, (tree, _) in self._grammar.term_defs:
            if tree is not None:
                self._places[str(name)] = self._place(tree)
                self._terminals[str(name)] = to_pattern.transform(tree).to_regexp()
        for name, params, tree, _ in self._grammar.rule_defs:
            if not params:
                self._places[str(name)] = self._place(tree) or self._definition(str(name))
                self._pending.append((str(name), tree, {}))
        if not any(name == "start" for name, _, _ in self._pending):
            raise refusal("there is no rule named start", "")
        while self._pending:
            name, tree, bound = self._pending.pop()
            self._rules[name] = self._expr(tree, bound)
            if len(self._rules) > MAX_RULES:
                raise _too_large()
        return LarkGrammar(
            self._rules, self._terminals, self._places, tuple(dict.fromkeys(map(str, self._grammar.ignore)))
        )

    def _definition(self, name: str) -> str:
        """Give where a rule is defined; "" if that is in an imported file."""
        begins = re.compile(rf"[ \t]*[?!]*{re.escape(name)}\b")
        lines = [number for number, line in enumerate(self._lines, 1) if begins.match(line)]
        return f"line {lines[0]}, column 1" if lines else ""

    def _place(self, tree: Any) -> str:
        """Give where the first token of a tree stands; "" if that is in an imported file."""
        for token in _tokens(tree):
            if token.line and token.column:
                line = self._lines[token.line - 1] if token.line <= len(self._lines) else ""
                is_ours = line.startswith(str(token).split("\n")[0], token.column - 1)
                return _place_of(token) if is_ours else ""
        return ""

    def _expr(self, node: Any, bound: Mapping[str, Expr]) -> Expr:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _too_large()
        if isinstance(node, Symbol):
            return self._symbol(node, bound)
        assert isinstance(node, Tree)
        if node.data in ("literal", "range"):
            return self._literal(node)
        if node.data == "template_usage":
            return self._template(node, bound)
        if node.data in ("value", "alias"):
            return self._expr(node.children[0], bound)
        if node.data == "expr":
            return self._repeat(node.children, bound)
        if node.data == "maybe":
            return Expr("repeat", (self._expr(node.children[0], bound),), low=0, high=1)
        if node.data not in ("expansions", "expansion"):
            raise refusal(f"{node.data} is not known here", self._place(node))
        parts = tuple(self._expr(child, bound) for child in node.children)
        return parts[0] if len(parts) == 1 else Expr("alt" if node.data == "expansions" else "seq", parts)

    def _symbol(self, symbol: Symbol, bound: Mapping[str, Expr]) -> Expr:
        name = str(symbol.name)
        if name in bound:
            return bound[name]
        if isinstance(symbol, NonTerminal):
            return Expr("rule", name=name)
        if name in self._declared:
            raise refusal(f"the terminal {name} is only declared", "")
        return Expr("terminal", name=name)

    def _literal(self, node: Tree[Any]) -> Expr:
        prepared = PrepareLiterals().transform(Tree("expansions", [node])).children[0]
        pattern = (
            TerminalTreeToPattern().transform(Tree("expansions", [Tree("expansion", [prepared])])).to_regexp()
        )
        name = "..".join(map(str, node.children))
        self._terminals.setdefault(name, pattern)
        self._places.setdefault(name, self._place(node))
        return Expr("terminal", name=name)

    def _template(self, node: Tree[Any], bound: Mapping[str, Expr]) -> Expr:
        name = str(node.children[0].name)
        arguments = [self._expr(child, bound) for child in node.children[1:]]
        if name not in self._templates:
            raise refusal(f"{name} is no template", self._place(node))
        params, tree = self._templates[name]
        if len(params) != len(arguments):
            raise refusal(f"{name} takes {len(params)} arguments, got {len(arguments)}", self._place(node))
        key = name, tuple(arguments)
        if key not in self._instances:
            self._instances[key] = f"{name}#{len(self._instances)}"
            self._places[self._instances[key]] = self._place(tree)
            bindings = dict(zip(map(str, params), arguments, strict=True))
            self._pending.append((self._instances[key], tree, bindings))
            if len(self._instances) > MAX_RULES:
                raise _too_large()
        return Expr("rule", name=self._instances[key])

    def _repeat(self, children: Sequence[Any], bound: Mapping[str, Expr]) -> Expr:
        inner, operator, *limits = children
        part = (self._expr(inner, bound),)
        if operator in _OPERATORS:
            low, high = _OPERATORS[operator]
            return Expr("repeat", part, low=low, high=high)
        numbers = [int(limit) for limit in limits]
        if numbers[0] > numbers[-1] or numbers[0] < 0:
            raise refusal(f"a repeat from {numbers[0]} to {numbers[-1]}", _place_of(operator))
        return Expr("repeat", part, low=numbers[0], high=numbers[-1])


_OPERATORS: dict[str, tuple[int, int | None]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}


def _too_large() -> GrammarTooCostly:
    return GrammarTooCostly(
        f"the Lark grammar has more than {MAX_RULES} rules or {MAX_NODES} parts once its templates are written out",
        parameter="grammar",
    )


def _tokens(tree: Any) -> Iterator[Token]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, Token):
            yield node
        elif isinstance(node, Tree):
            pending += reversed(node.children)
        elif isinstance(node, Symbol) and isinstance(node.name, Token):
            yield node.name


def _place_of(token: Token) -> str:
    return f"line {token.line}, column {token.column}" if token.line else ""
