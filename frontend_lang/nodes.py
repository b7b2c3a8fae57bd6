"""The statements of a program as frozen data, and how they concatenate.

`gen`, `select` and the roles make nodes; `+` puts nodes and text in a row (a Block); `state += ...` queues each node
together with the place of the user's statement (a Step). A call is also the handle of its value: `state[call]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from frontend_lang.backends import GrammarSpec, SamplingParams
    from frontend_lang.branch import Branch, Variable
    from frontend_lang.decisions import Question
    from frontend_lang.limits import CallLimits
    from frontend_lang.tools import ToolBox
    from frontend_lang.values import Reader

T_co = TypeVar("T_co", covariant=True)


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


class Call(Expression, Generic[T_co]):
    """A statement that gives a value of type T: read it by its name or by the call itself, `state[call]`.

    Attributes:
        name: the variable it sets, or None.
    """

    __slots__ = ()
    name: str | None

    @property
    def label(self) -> str:
        """Give the statement as a person would name it."""
        kind = type(self).__name__.lower()
        return f'{kind}("{self.name}")' if self.name else f"{kind}()"


@dataclass(frozen=True, slots=True)
class Text(Expression):
    """Literal text; control tokens in it mean themselves only with `is_control`."""

    text: str
    is_control: bool = False

    @property
    def label(self) -> str:
        return "text"


@dataclass(frozen=True, slots=True)
class RoleBegin(Expression):
    """The start of a chat message."""

    role: str

    @property
    def label(self) -> str:
        return f"{self.role}(...)"


@dataclass(frozen=True, slots=True)
class RoleEnd(Expression):
    """The end of the open chat message."""

    role: str

    @property
    def label(self) -> str:
        return f"{self.role}(...)"


@dataclass(frozen=True, slots=True, eq=False)  # a call equals itself only: it is the key of its value
class Gen(Call[T_co]):
    """A generation.

    Attributes:
        sampling: the options the caller gave; the others come from the program's options, then the runtime's.
        grammar: constraint on the text, or None.
        reader: makes the value of the text; None leaves the text.
        n: number of samples; above 1 the value is their branches.
        is_healed: the last token of the prompt may be replaced by a longer one.
        limits: how long it may take and how often it may be tried again.
        params: all of it for a program without options of its own, if that is known already.
    """

    name: str | None
    sampling: Mapping[str, Any]
    grammar: GrammarSpec | None
    reader: Reader[Any] | None
    limits: CallLimits
    n: int = 1
    is_healed: bool = False
    params: SamplingParams | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Select(Call[str]):
    """The likeliest of several texts, by one of the methods in selection.py."""

    name: str | None
    choices: tuple[str, ...]
    method: str
    limits: CallLimits


@dataclass(frozen=True, slots=True, eq=False)
class UseTools(Call[T_co]):
    """A generation that calls functions: one call, or calls and then an answer.

    Attributes:
        sampling, limits: of each of its requests, as in Gen.
    """

    name: str | None
    sampling: Mapping[str, Any]
    box: ToolBox
    limits: CallLimits

    @property
    def label(self) -> str:
        return f'gen("{self.name}")' if self.name else "gen()"


@dataclass(frozen=True, slots=True, eq=False)
class Decide(Call[T_co]):
    """Several questions about the transcript, which stays as it is."""

    name: str | None
    questions: Mapping[str, Question[Any]]
    limits: CallLimits


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A place in the text: where a Capture begins, or another run was started."""

    @property
    def label(self) -> str:
        return "var_scope(...)"


@dataclass(frozen=True, slots=True, eq=False)
class Capture(Call[str]):
    """The text since a mark, as a variable."""

    name: str
    mark: Mark

    @property
    def label(self) -> str:
        return f'var_scope("{self.name}")'


@dataclass(frozen=True, slots=True)
class Fork:
    """The point where branches part: each starts with a copy of the transcript up to here."""

    branches: tuple[Branch, ...]

    @property
    def label(self) -> str:
        return f"fork({len(self.branches)})"


@dataclass(frozen=True, slots=True)
class Block(Expression):
    """Several nodes in a row."""

    nodes: tuple[Node, ...]


Request = Gen[Any] | Select | UseTools[Any] | Decide[Any]
Node = Text | RoleBegin | RoleEnd | Request | Mark | Capture


@dataclass(frozen=True, slots=True)
class Step:
    """A node in a branch's queue.

    Attributes:
        location: "file:line" of the user's statement.
        variable: where a call's value goes; None for other nodes.
        samples: of a gen with n > 1: each sample's branch, and the call's variable in it.
        value: the same branches as the value of the call.
    """

    node: Node | Fork
    location: str
    variable: Variable | None = None
    samples: tuple[tuple[Branch, Variable], ...] = ()
    value: Any = None


def flatten(value: object) -> tuple[Node, ...]:
    """Give the nodes of a string, a node or a block. Pure.

    Raises:
        TypeError: anything else.
    """
    match value:
        case str():
            return (Text(value),)
        case Text() | RoleBegin() | RoleEnd() | Gen() | Select() | UseTools() | Decide():
            return (value,)
        case Block():
            return value.nodes
    raise TypeError(
        f"a program takes text, gen(...), select(...) or a role, got {type(value).__name__}: {value!r:.80}"
    )
