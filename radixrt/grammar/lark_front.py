"""From a user's Lark grammar to the engine's dialect, so that masks agree with Lark's own Earley parser.

Both read tokens greedily, each terminal as far as it goes. But the engine reads all terminals that are possible at a
place together, and where one of them goes on it forgets that another could have ended. Where that can matter the
terminals are written as rules over single characters; where it cannot be helped, or a terminal swallows whatever
must follow it (`/a+/ /a/`), the grammar is refused.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from radixrt.config import GrammarConfig
from radixrt.errors import GrammarTooCostly, UnsupportedGrammar
from radixrt.grammar.endings import endings
from radixrt.grammar.lark_load import Expr, LarkGrammar, load, refusal
from radixrt.grammar.regex_algebra import (
    ANY_CHAR,
    EVERYTHING,
    Automaton,
    Chars,
    Language,
    automaton,
    both,
    char_set,
    class_text,
    complement,
    invert,
    is_empty,
    many,
    meet,
    of_chars,
    then,
    to_pattern,
)
from radixrt.grammar.regex_cost import check_regex
from radixrt.grammar.regex_parse import match_language

END = ""  # in a follow set: the text may end there
MAX_CHARACTER_RULES = 3_000
_MAX_TERMINALS = 400
_NUM_SAMPLES = 40
# Lark's common.ESCAPED_STRING looks behind; in a greedy reading it means this.
_ESCAPED_STRING_BODY = r".*?(?<!\\)(\\\\)*?" + '"'
_ESCAPED_STRING_PLAIN = r"(?:[^\"\\\n]|\\[^\n])*" + '"'
_LAZY = re.compile(r"[*+?}]\?")
_NOT_RUST = re.compile(r"\(\?[^:]|[*+?}]\?")


@dataclass(frozen=True, slots=True)
class EngineGrammar:
    """A grammar in the engine's dialect.

    Attributes:
        endings: texts that may end a text of it; see `radixrt.grammar.endings`.
    """

    text: str
    endings: tuple[str, ...]


def to_engine(text: str, config: GrammarConfig) -> EngineGrammar:
    """Give the grammar in the engine's dialect.

    Raises:
        GrammarTooCostly: a terminal or the whole is over a limit.
        UnsupportedGrammar: see `radixrt.grammar.lark_load.load`, and above; says line and column if known.
    """
    grammar = load(text)
    terminals, flow = _analyzed(grammar, config)
    for name in terminals:
        _check_ends(terminals[name], flow.follow(name), terminals, grammar)
    conflict = _conflict(grammar, flow, terminals)
    writer = _Writer(grammar, flow, terminals, by_character=conflict is not None)
    if conflict is not None:
        _check_splits(grammar, flow, terminals, conflict)
    return writer.write()


def write_greedy(grammar: LarkGrammar, config: GrammarConfig) -> EngineGrammar | None:
    """Write a grammar with its terminals as they are; None unless a greedy reading of them is the only one.

    Raises: as `to_engine`.
    """
    terminals, flow = _analyzed(grammar, config, is_ordered=False)
    if _conflict(grammar, flow, terminals) is not None or any(
        _can_end_early(terminals[name], flow.follow(name), terminals) for name in terminals
    ):
        return None
    return _Writer(grammar, flow, terminals, by_character=False).write()


def write_plainly(grammar: LarkGrammar, config: GrammarConfig) -> EngineGrammar:
    """Write a grammar whose terminals are single characters. Raises: as `to_engine`."""
    terminals, flow = _analyzed(grammar, config)
    return _Writer(grammar, flow, terminals, by_character=False).write()


def _analyzed(
    grammar: LarkGrammar, config: GrammarConfig, *, is_ordered: bool = True
) -> tuple[dict[str, _Terminal], _Flow]:
    terminals = {
        name: _Terminal.build(name, grammar, config, is_ordered=is_ordered) for name in _used(grammar)
    }
    flow = _Flow(grammar)
    if "start" not in flow.productive:
        raise refusal("it accepts no text at all", grammar.places.get("start", ""))
    return terminals, flow


def _can_end_early(terminal: _Terminal, follow: Iterable[str], terminals: Mapping[str, _Terminal]) -> bool:
    """Tell whether a string of the terminal goes on where it could have ended, with what can follow it."""
    after = of_chars(_chars_of(follow, terminals))
    return not is_empty(both(terminal.language, then(terminal.language, after, EVERYTHING)))


def _used(grammar: LarkGrammar) -> list[str]:
    """Give the terminals that rules reach from the start, and the ignored ones."""
    found = dict.fromkeys(grammar.ignored)
    for name in _reached(grammar):
        found |= {part.name: None for part in _parts(grammar.rules[name]) if part.kind == "terminal"}
    if len(found) > _MAX_TERMINALS:
        raise GrammarTooCostly(f"a grammar may have at most {_MAX_TERMINALS} terminals", parameter="grammar")
    return list(found)


def _reached(grammar: LarkGrammar) -> list[str]:
    """Give the rules that can be reached from the start."""
    pending, seen = ["start"], {"start": None}
    while pending:
        for part in _parts(grammar.rules[pending.pop()]):
            if part.kind == "rule" and part.name not in seen:
                if part.name not in grammar.rules:
                    raise refusal(f"the rule {part.name} is not defined", "")
                seen[part.name] = None
                pending.append(part.name)
    return list(seen)


def _parts(expr: Expr) -> Iterable[Expr]:
    pending = [expr]
    while pending:
        node = pending.pop()
        yield node
        pending += node.parts


@dataclass(frozen=True)
class _Terminal:
    """A terminal with the strings that a greedy reader can take for it."""

    name: str
    pattern: str
    place: str
    language: Language

    @classmethod
    def build(
        cls, name: str, grammar: LarkGrammar, config: GrammarConfig, *, is_ordered: bool = True
    ) -> _Terminal:
        """Read a terminal; is_ordered: as Lark does, which takes the first alternative that fits."""
        place = grammar.places.get(name, "")
        pattern = grammar.terminals[name].replace(_ESCAPED_STRING_BODY, _ESCAPED_STRING_PLAIN)
        check_regex(pattern, config)
        try:
            language = match_language(pattern, is_wide=True)
            if _LAZY.search(pattern):  # the first end is taken
                language = both(language, complement(then(language, many(ANY_CHAR, 1))))
            machine = automaton(language)
        except UnsupportedGrammar as error:
            raise refusal(f"the terminal {name}: {error}", place) from None
        if language.has_empty:
            raise refusal(f"the terminal {name} matches the empty string", place)
        if machine.is_empty:
            raise refusal(f"the terminal {name} matches nothing", place)
        found = cls(name, pattern, place, language)
        if is_ordered and not found._is_longest(machine):
            raise refusal(f"the terminal {name} does not always match as far as it could: put longer alternatives first", place)  # fmt: skip
        return found

    @cached_property
    def machine(self) -> Automaton:
        return automaton(self.language)

    @cached_property
    def first(self) -> Chars:
        return _out(self.machine, 0)

    def _is_longest(self, machine: Automaton) -> bool:
        """Try some of its strings with Python's matching, which takes the first alternative that fits."""
        draw = random.Random(0)
        compiled = re.compile(self.pattern)
        for _ in range(_NUM_SAMPLES):
            state, text = 0, ""
            for _ in range(12):
                if not machine.edges[state] or (machine.accepting[state] and draw.random() < 0.2):
                    break
                state, chars = draw.choice(list(machine.edges[state].items()))
                low, high = draw.choice(chars)
                text += chr(draw.choice((low, high)))
            if machine.accepting[state] and (
                (found := compiled.match(text)) is None or found.end() != len(text)
            ):
                return False
        return True


def _out(machine: Automaton, state: int) -> Chars:
    return char_set(pair for chars in machine.edges[state].values() for pair in chars)


class _Flow:
    """What can begin, end and follow what; the least fixed points of the usual equations."""

    def __init__(self, grammar: LarkGrammar) -> None:
        self._grammar = grammar
        # What only stands in rules that nobody uses follows nothing.
        self._rules = {name: grammar.rules[name] for name in _reached(grammar)}
        self.nullable: set[str] = set()
        self.productive: set[str] = set()
        self._first: dict[str, frozenset[str]] = dict.fromkeys(self._rules, frozenset())
        self._follow: dict[str, set[str]] = {}
        self._after: dict[str, frozenset[str]] = dict.fromkeys(self._rules, frozenset())
        self._solve()

    @property
    def start(self) -> frozenset[str]:
        """Give the terminals that can come first."""
        return self._first["start"] | frozenset(self._grammar.ignored)

    def follow(self, terminal: str) -> frozenset[str]:
        """Give the terminals that can follow a terminal, and END."""
        ignored = frozenset(self._grammar.ignored)
        if terminal in ignored:
            return frozenset().union(*self._follow.values(), self._first["start"], ignored, {END})
        return frozenset(self._follow.get(terminal, ())) | ignored

    def is_productive(self, expr: Expr) -> bool:
        if expr.kind == "rule":
            return expr.name in self.productive
        if expr.kind == "repeat" and expr.low == 0:
            return True
        join = any if expr.kind == "alt" else all
        return join(map(self.is_productive, expr.parts))

    def _solve(self) -> None:
        rules = self._rules
        is_changed = True
        while is_changed:
            before = len(self.nullable), len(self.productive), sum(map(len, self._first.values()))
            for name, expr in reversed(rules.items()):  # those that others use first: fewer rounds
                if self._is_nullable(expr):
                    self.nullable.add(name)
                if self.is_productive(expr):
                    self.productive.add(name)
                self._first[name] |= self._first_of(expr)
            is_changed = before != (
                len(self.nullable),
                len(self.productive),
                sum(map(len, self._first.values())),
            )
        self._after["start"] = frozenset({END})
        is_changed = True
        while is_changed:
            before_follow = sum(map(len, self._follow.values())), sum(map(len, self._after.values()))
            for name, expr in rules.items():
                self._walk(expr, self._after[name])
            is_changed = before_follow != (
                sum(map(len, self._follow.values())),
                sum(map(len, self._after.values())),
            )

    def _is_nullable(self, expr: Expr) -> bool:
        if expr.kind in ("rule", "terminal"):
            return expr.name in self.nullable
        if expr.kind == "repeat":
            return expr.low == 0 or self._is_nullable(expr.parts[0])
        return (any if expr.kind == "alt" else all)(map(self._is_nullable, expr.parts))

    def _first_of(self, expr: Expr) -> frozenset[str]:
        if expr.kind == "terminal":
            return frozenset({expr.name})
        if expr.kind == "rule":
            return self._first[expr.name]
        found: frozenset[str] = frozenset()
        for part in expr.parts:
            found |= self._first_of(part)
            if expr.kind == "seq" and not self._is_nullable(part):
                break
        return found

    def _walk(self, expr: Expr, after: frozenset[str]) -> None:
        """Note what follows each part of an expression that `after` follows."""
        if expr.kind == "terminal":
            self._follow.setdefault(expr.name, set()).update(after)
        elif expr.kind == "rule":
            self._after[expr.name] |= after
        elif expr.kind == "alt":
            for part in expr.parts:
                self._walk(part, after)
        elif expr.kind == "repeat":
            again = self._first_of(expr.parts[0]) if expr.high is None or expr.high > 1 else frozenset()
            self._walk(expr.parts[0], after | again)
        else:
            for part in reversed(expr.parts):
                self._walk(part, after)
                after = self._first_of(part) | (after if self._is_nullable(part) else frozenset())


def _chars_of(names: Iterable[str], terminals: Mapping[str, _Terminal]) -> Chars:
    return char_set(pair for name in names if name != END for pair in terminals[name].first)


def _check_ends(
    terminal: _Terminal, follow: frozenset[str], terminals: Mapping[str, _Terminal], grammar: LarkGrammar
) -> None:
    """Raise if a greedy reader can get to where the terminal never ends: what must follow would continue it."""
    machine = terminal.machine
    following = _chars_of(follow, terminals)
    ends = [
        state
        for state, is_accepting in enumerate(machine.accepting)
        if is_accepting and (END in follow or meet(following, invert(_out(machine, state))))
    ]
    sources: dict[int, set[int]] = {}
    for state, edges in enumerate(machine.edges):
        for target in edges:
            sources.setdefault(target, set()).add(state)
    reached, pending = set(ends), list(ends)
    while pending:
        for state in sources.get(pending.pop(), set()) - reached:
            reached.add(state)
            pending.append(state)
    live = {0} | {target for edges in machine.edges for target in edges}
    if not live <= reached:
        raise refusal(
            f"the terminal {terminal.name} takes every character that can follow it, so that it never ends",
            terminal.place,
        )


def _conflict(
    grammar: LarkGrammar, flow: _Flow, terminals: Mapping[str, _Terminal]
) -> tuple[_Terminal, _Terminal] | None:
    """Find a terminal that can end where another one, possible at the same place, goes on."""
    ignored = frozenset(grammar.ignored)
    together: set[tuple[str, str]] = set()
    for group in {flow.start, *(flow.follow(name) | ignored for name in terminals)}:
        together |= {
            (one, other) for one in group for other in group if END not in (one, other) and one != other
        }
    for one, other in sorted(together):
        ending, longer = terminals[one], terminals[other]
        if not meet(ending.first, longer.first):
            continue
        after = of_chars(_chars_of(flow.follow(one), terminals))
        if not is_empty(both(longer.language, then(ending.language, after, EVERYTHING))):
            return ending, longer
    return None


def _check_splits(
    grammar: LarkGrammar,
    flow: _Flow,
    terminals: Mapping[str, _Terminal],
    conflict: tuple[_Terminal, _Terminal],
) -> None:
    """Raise if a terminal could end early in a grammar that is written by characters, where nothing is greedy."""
    for name, terminal in terminals.items():
        follow = flow.follow(name)
        if name in follow and is_empty(both(then(terminal.language, terminal.language), complement(terminal.language))):  # fmt: skip
            follow -= {name}
        follow -= frozenset(grammar.ignored) if name in grammar.ignored else frozenset()
        if _can_end_early(terminal, follow, terminals):
            ending, longer = conflict
            raise refusal(
                f"the terminal {name} can end in several places, and {ending.name} can end where {longer.name} goes on",
                terminal.place or ending.place or longer.place,
            )


class _Writer:
    """Writes the engine's dialect: rules r0, r1, ..., terminals T0, T1, ..., states of terminals q0_0, ..."""

    def __init__(
        self, grammar: LarkGrammar, flow: _Flow, terminals: Mapping[str, _Terminal], *, by_character: bool
    ) -> None:
        self._grammar = grammar
        self._flow = flow
        self._terminals = terminals
        self._by_character = by_character
        self._rule_names = {name: f"r{index}" for index, name in enumerate(grammar.rules)}
        patterns = {
            pattern: index for index, pattern in enumerate({t.pattern: None for t in terminals.values()})
        }
        self._terminal_names = {
            name: f"{'t' if by_character else 'T'}{patterns[terminal.pattern]}"
            for name, terminal in terminals.items()
        }
        self._classes: dict[Chars, str] = {}

    def write(self) -> EngineGrammar:
        machines = {name: terminal.machine for name, terminal in self._terminals.items()}
        rules = {name: self._grammar.rules[name] for name in _reached(self._grammar)}
        return EngineGrammar(self._written(), endings(rules, machines))

    def _written(self) -> str:
        between = " ignored" if self._grammar.ignored else ""
        lines = [f"start:{between} {self._rule_names['start']}"]
        if between:
            lines.append(
                f"ignored: ({' | '.join(self._terminal_names[name] for name in self._grammar.ignored)})*"
            )
        for name in _reached(self._grammar):
            if name in self._flow.productive:
                lines.append(f"{self._rule_names[name]}: {self._expr(self._grammar.rules[name], between)}")
        written = {self._terminal_names[name]: terminal for name, terminal in self._terminals.items()}
        for name, terminal in written.items():
            lines += self._terminal(name, terminal)
        lines += [f"{name}: /{class_text(chars)}/" for chars, name in self._classes.items()]
        return "\n".join([*lines, '%llguidance {"no_forcing": true}', ""])

    def _expr(self, expr: Expr, between: str) -> str:
        if expr.kind == "terminal":
            name = self._terminal_names[expr.name]
            return f"({name}{between})" if between else name
        if expr.kind == "rule":
            return self._rule_names[expr.name]
        if expr.kind == "repeat":
            if not self._flow.is_productive(expr.parts[0]) or expr.high == 0:
                return '""'
            limit = "" if expr.high is None else str(expr.high)
            return f"({self._expr(expr.parts[0], between)}){{{expr.low},{limit}}}"
        if expr.kind == "alt":
            parts = [self._expr(part, between) for part in expr.parts if self._flow.is_productive(part)]
            return f"({' | '.join(parts)})"
        return " ".join(self._expr(part, between) for part in expr.parts) or '""'

    def _terminal(self, name: str, terminal: _Terminal) -> list[str]:
        if not self._by_character:
            return [f"{name}: /{_slashed(_engine_pattern(terminal))}/"]
        machine = terminal.machine
        if sum(map(len, machine.edges)) + len(self._classes) > MAX_CHARACTER_RULES:
            raise GrammarTooCostly(
                f"a grammar written by characters may have at most {MAX_CHARACTER_RULES} rules",
                parameter="grammar",
            )
        into: dict[int, list[str]] = {0: ['""']}
        for state, edges in enumerate(machine.edges):
            for target, chars in edges.items():
                symbol = self._classes.setdefault(chars, f"C{len(self._classes)}")
                into.setdefault(target, []).append(f"{name}_{state} {symbol}")
        ends = [
            f"{name}_{state}" for state, is_end in enumerate(machine.accepting) if is_end and state in into
        ]
        return [f"{name}: {' | '.join(ends)}", *(f"{name}_{state}: {' | '.join(ways)}" for state, ways in into.items())]  # fmt: skip


def _engine_pattern(terminal: _Terminal) -> str:
    if not _NOT_RUST.search(terminal.pattern):
        return terminal.pattern
    return to_pattern(terminal.language).removeprefix("^").removesuffix("$")


def _slashed(pattern: str) -> str:
    """Write a regular expression between slashes. Pure."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")
