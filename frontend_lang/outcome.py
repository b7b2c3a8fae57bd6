"""What became of a piece of work: Ok with its value, or Err with its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar, overload

from frontend_lang.backends import ProgramError
from frontend_lang.backends.unicode import escaped


class Readable(Protocol):
    """Something whose variables and text can be read: a State or a ProgramResult."""

    def __getitem__(self, name: str, /) -> Any: ...

    def text(self) -> str: ...

    def messages(self) -> list[dict[str, str]]: ...

    def get_meta_info(self, name: str) -> dict[str, Any]: ...


R_co = TypeVar("R_co", bound=Readable, covariant=True)


@dataclass(frozen=True, slots=True)
class Ok(Generic[R_co]):
    """A success; reads like its value: `outcome["x"]`, `outcome.text()`."""

    value: R_co

    @property
    def is_ok(self) -> bool:
        return True

    def unwrap(self) -> R_co:
        """Give the value. Pure."""
        return self.value

    def __getitem__(self, name: str) -> Any:
        return self.value[name]

    def text(self) -> str:
        """Give the transcript as text."""
        return self.value.text()

    def messages(self) -> list[dict[str, str]]:
        """Give the chat messages."""
        return self.value.messages()

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """Give counts and log-probabilities of a call under SGLang's names."""
        return self.value.get_meta_info(name)


@dataclass(frozen=True, slots=True)
class Err:
    """A failure; every read raises its error."""

    error: Exception

    @property
    def is_ok(self) -> bool:
        return False

    def unwrap(self) -> NoReturn:
        """Raise the error."""
        raise self.error

    def __getitem__(self, name: str) -> NoReturn:
        raise self.error

    def text(self) -> NoReturn:
        """Raise the error."""
        raise self.error

    def messages(self) -> NoReturn:
        """Raise the error."""
        raise self.error

    def get_meta_info(self, name: str) -> NoReturn:
        """Raise the error."""
        raise self.error


Outcome = Ok[R_co] | Err


class Outcomes(Sequence[Outcome[R_co]]):
    """The outcomes of joined branches, in the order of the fork.

    Looking at an item tells the program of its failure: from then on it is the program's to handle. A failure
    nobody looked at is raised at the end of `run`, so `branches.join()` alone hides nothing.
    """

    def __init__(self, items: Sequence[Outcome[R_co]], *, on_look: Callable[[int], None]) -> None:
        self._items = tuple(items)
        self._on_look = on_look

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Outcomes({list(self._items)!r})"  # looks at none of them

    @overload
    def __getitem__(self, index: int) -> Outcome[R_co]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Outcome[R_co]]: ...

    def __getitem__(self, index: int | slice) -> Outcome[R_co] | Sequence[Outcome[R_co]]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self._items))[index]
        self._on_look(position)
        return self._items[position]


@dataclass(frozen=True, slots=True, eq=False)  # two calls that fail alike are still two failures
class Failure:
    """The first thing that went wrong in a branch.

    Attributes:
        program: name of the program.
        location: "file:line" of the statement.
        label: the statement as a person would name it, e.g. `gen("answer")`.
        call: name of the variable whose value is missing, or None.
        prompt: the transcript at that moment.
        cause: the error itself.
    """

    program: str
    location: str
    label: str
    call: str | None
    prompt: str
    cause: Exception

    def error(self, reading: str | None = None) -> ProgramError:
        """Make the error for one reader, with the cause chained.

        Args:
            reading: the name it tried to read.
        """
        because = f'"{reading}" has no value: ' if reading is not None and reading != self.call else ""
        error = ProgramError(
            f'{because}{self.label} failed at {self.location} in program "{self.program}": {summary(self.cause)}',
            program=self.program,
            location=self.location,
            call=self.call,
            prompt=self.prompt,
        )
        error.__cause__ = self.cause
        return error


def summary(error: BaseException) -> str:
    """Give an error's type and the first line of its text. Pure."""
    lines = escaped(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
