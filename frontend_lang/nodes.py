"""The statements of a program as frozen data, and how they concatenate.

`gen`, `select` and the roles make nodes; `+` puts nodes and text in a row (a Block); `state += ...` gives each node
the place of the user's statement and queues it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frontend_lang.backends import GrammarSpec
    from frontend_lang.branch import Branch
    from frontend_lang.constraints import Schema


class Expression:
    """Anything that can be appended to a State and concatenated with `+`. Immutable."""

    __slots__ = ()

    def __add__(self, other: object) -> Block:
        return Block(flatten(self) + flatten(other))

    def __radd__(self, other: object) -> Block:
        return Block(flatten(other) + flatten(self))

    def __format__(self, spec: str) -> str:
        raise TypeError('a call cannot be part of an f-string: write "text" + gen(...) + "text"')

    def __str__(self) -> str:
        raise TypeError('a call cannot be turned into text: write "text" + gen(...) + "text"')


@dataclass(frozen=True, slots=True)
class Text(Expression):
    """Literal text; control tokens in it mean themselves only with `is_control`."""

    text: str
    is_control: bool = False
    location: str = ""

    @property
    def label(self) -> str:
        return "text"


@dataclass(frozen=True, slots=True)
class RoleBegin(Expression):
    """The start of a chat message."""

    role: str
    location: str = ""

    @property
    def label(self) -> str:
        return f"{self.role}(...)"


@dataclass(frozen=True, slots=True)
class RoleEnd(Expression):
    """The end of the open chat message."""

    role: str
    location: str = ""

    @property
    def label(self) -> str:
        return f"{self.role}(...)"


@dataclass(frozen=True, slots=True)
class Gen(Expression):
    """A generation.

    Attributes:
        name: the variable it sets, or None.
        sampling: the options the caller gave; the others come from the program's options, then the runtime's.
        grammar: constraint on the text, or None.
        schema: makes the value of the text (JSON, a Pydantic model); None leaves the text.
    """

    name: str | None
    sampling: Mapping[str, Any]
    grammar: GrammarSpec | None = None
    schema: Schema | None = None
    location: str = ""

    @property
    def label(self) -> str:
        return f'gen("{self.name}")' if self.name else "gen()"


@dataclass(frozen=True, slots=True)
class Select(Expression):
    """The likeliest of several texts."""

    name: str | None
    choices: tuple[str, ...]
    location: str = ""

    @property
    def label(self) -> str:
        return f'select("{self.name}")' if self.name else "select()"


@dataclass(frozen=True, slots=True)
class Fork:
    """The point where branches part: each starts with a copy of the transcript up to here."""

    branches: tuple[Branch, ...]
    location: str = ""

    @property
    def label(self) -> str:
        return f"fork({len(self.branches)})"


@dataclass(frozen=True, slots=True)
class Block(Expression):
    """Several nodes in a row."""

    nodes: tuple[Node, ...]


Node = Text | RoleBegin | RoleEnd | Gen | Select
Call = Gen | Select


def flatten(value: object) -> tuple[Node, ...]:
    """Give the nodes of a string, a node or a block. Pure.

    Raises:
        TypeError: anything else.
    """
    match value:
        case str():
            return (Text(value),)
        case Text() | RoleBegin() | RoleEnd() | Gen() | Select():
            return (value,)
        case Block():
            return value.nodes
    raise TypeError(
        f"a program takes text, gen(...), select(...) or a role, got {type(value).__name__}: {value!r:.80}"
    )


def located(node: Node, location: str) -> Node:
    """Give the node with the place of the statement that appended it. Pure."""
    return replace(node, location=location)
