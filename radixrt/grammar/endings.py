"""Short texts that may end a text of a context-free grammar, from wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from radixrt.grammar.lark_load import Expr
from radixrt.grammar.regex_algebra import Automaton

MAX_ENDINGS = 64
_MAX_CHARACTERS = 48
_MAX_ROUNDS = 200  # a rule's shortest text gets shorter at most so often


def endings(rules: Mapping[str, Expr], machines: Mapping[str, Automaton]) -> tuple[str, ...]:
    """Give for every place in every rule a short text that ends the rule there, the shortest first.

    Args:
        machines: terminal -> automaton of its strings.
    Cost: linear in the rules, times the rounds until no shortest text changes.
    """
    texts = {name: text for name, machine in machines.items() if (text := _shortest(machine)) is not None}
    known: dict[str, str] = {}
    for _ in range(_MAX_ROUNDS):
        before = dict(known)
        for name, expr in reversed(list(rules.items())):  # those that others use first: fewer rounds
            if (text := _text(expr, texts, known)) is not None:
                known[name] = text
        if known == before:
            break
    result: dict[str, None] = {}
    for expr in rules.values():
        _collect(expr, "", texts, known, lambda text: result.setdefault(text))
    wanted = [text for text in result if 0 < len(text) <= _MAX_CHARACTERS]
    return tuple(sorted(wanted, key=len)[:MAX_ENDINGS])


def _shortest(machine: Automaton) -> str | None:
    """Give a shortest string of an automaton. Cost: linear in its edges."""
    texts, frontier = {0: ""}, [0]
    while frontier:
        reached = []
        for state in frontier:
            if machine.accepting[state]:
                return texts[state]
            for target, chars in machine.edges[state].items():
                if target not in texts and chars:
                    texts[target] = texts[state] + _plainest(chars)
                    reached.append(target)
        frontier = reached
    return None


def _plainest(chars: Iterable[tuple[int, int]]) -> str:
    """Give a character of a class: a letter or digit if it has one."""
    ranges = list(chars)
    for wanted in "a0A":
        if any(low <= ord(wanted) <= high for low, high in ranges):
            return wanted
    return chr(next((low for low, _ in ranges if low >= 0x20), ranges[0][0]))


def _text(expr: Expr, texts: Mapping[str, str], known: Mapping[str, str]) -> str | None:
    """Give a short text of an expression, None if none is known yet. Pure."""
    if expr.kind in ("terminal", "rule"):
        return (texts if expr.kind == "terminal" else known).get(expr.name)
    if expr.kind == "repeat" and expr.low == 0:
        return ""
    parts = [_text(part, texts, known) for part in expr.parts]
    if expr.kind == "alt":
        return min((part for part in parts if part is not None), key=len, default=None)
    if any(part is None for part in parts):
        return None
    joined = "".join(part for part in parts if part is not None)
    return joined * min(expr.low, _MAX_CHARACTERS) if expr.kind == "repeat" else joined


def _collect(
    expr: Expr,
    rest: str,
    texts: Mapping[str, str],
    known: Mapping[str, str],
    note: Callable[[str], object],
) -> None:
    """Note what ends a rule after each part of an expression that `rest` follows."""
    if len(rest) > _MAX_CHARACTERS:
        return
    if expr.kind == "terminal":
        text = texts.get(expr.name, "")
        for start in range(len(text) + 1):  # from inside the terminal, too
            note(text[start:] + rest)
    elif expr.kind == "rule":
        note(rest)
    elif expr.kind == "seq":
        for part in reversed(expr.parts):
            _collect(part, rest, texts, known, note)
            before = _text(part, texts, known)
            if before is None:
                return
            rest = before + rest
    else:
        for part in expr.parts:
            again = (_text(part, texts, known) or "") * min(max(expr.low - 1, 0), _MAX_CHARACTERS)
            _collect(part, again + rest if expr.kind == "repeat" else rest, texts, known, note)
