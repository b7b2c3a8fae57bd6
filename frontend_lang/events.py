"""What a running program tells whoever streams it, as it happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from frontend_lang.result import ProgramResult
    from frontend_lang.trace import CallRecord

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text at the end of a branch's transcript.

    The texts of a branch, in order, are its transcript from where it was forked ("root": from the start).

    Attributes:
        branch: "root", or the fork: "root/0" is the first child.
        name: the variable whose text this is; None for unnamed calls and for text the program wrote.
        is_generated: the model wrote it, or chose it.
    """

    branch: str
    text: str
    name: str | None = None
    is_generated: bool = False


@dataclass(frozen=True, slots=True)
class VariableSet:
    """A variable has its value."""

    branch: str
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class CallDone:
    """A call is done, or failed: then `record.error` says why."""

    record: CallRecord


@dataclass(frozen=True, slots=True)
class ProgramDone(Generic[R_co]):
    """The program has ended well: always the last event. If it fails, the reader gets the exception instead."""

    result: ProgramResult[R_co]


Event = TextDelta | VariableSet | CallDone | ProgramDone[Any]
