"""How variables of a branch are found and read, and where in the user's program."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

from frontend_lang.backends import ProgramError
from frontend_lang.branch import Branch, Key, Reply, Variable
from frontend_lang.builders import nearest
from frontend_lang.nodes import Call
from frontend_lang.outcome import Failure

_PASSED = (__name__.partition(".")[0], "contextlib")  # `with state.copy()` comes through it


@functools.lru_cache(maxsize=1024)
def _is_passed(module: object) -> bool:
    return str(module).partition(".")[0] in _PASSED


def variable_of(branch: Branch, name: Key) -> Variable:
    variable = branch.variables.get(name)
    if variable is None:
        location, known = statement_location(), [key for key in branch.variables if isinstance(key, str)]
        hint = nearest(name, known) if isinstance(name, str) else ""
        raise ProgramError(
            f'program "{branch.run.program}" has set no {shown(name)} (read at {location}).{hint}',
            program=branch.run.program,
            location=location,
            call=name.name if isinstance(name, Call) else name,
            prompt=branch.transcript.text,
        )
    return variable


def opened(branch: Branch, variable: Variable, name: Key) -> Reply:
    branch.run.last_used = branch
    settled = variable.result()
    if isinstance(settled, Failure):
        branch.run.tell(settled)
        raise settled.error(reading=name.name if isinstance(name, Call) else name)
    return settled


def shown(name: object) -> str:
    """Give a variable's name, or its call, as a person would write it. Pure."""
    if isinstance(name, Call):
        return name.label
    return f'"{name}"' if isinstance(name, str) else repr(name)


def raise_failure(branch: Branch) -> None:
    branch.run.last_used = branch
    if branch.failure is not None:
        branch.run.tell(branch.failure)
        raise branch.failure.error()


def statement_location() -> str:
    """Give "file:line" of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_passed(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def replies(branch: Branch) -> Iterator[tuple[Key, Reply | Failure]]:
    """Give the settled variables of a branch."""
    for name, variable in branch.variables.items():
        if variable.done():
            yield name, variable.result()
