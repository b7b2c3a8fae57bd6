"""Runs inside runs: which program is running here, and where in it another one was started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from frontend_lang.branch import Nested, ProgramRun
from frontend_lang.calling import current_call

_enclosing: ContextVar[ProgramRun | None] = ContextVar("enclosing", default=None)


def enclosing() -> ProgramRun | None:
    """Give the run of the program that runs us, if one does."""
    return _enclosing.get()


@contextmanager
def entered(run: ProgramRun) -> Iterator[None]:
    """Make a run the one that others are started in."""
    token = _enclosing.set(run)
    try:
        yield
    finally:
        _enclosing.reset(token)


@contextmanager
def nested() -> Iterator[Nested | None]:
    """Note in the enclosing run that another run begins here, and what it ends with; None when there is none."""
    found = _placed()
    try:
        yield found
    except BaseException as error:
        if found is not None:
            found.error = error
        raise


def _placed() -> Nested | None:
    """Give the place of a run that begins now.

    A run that a tool starts stands where the call of the tool does. Any other stands behind what was appended so far to
    the State that the program used last; one that a thread of the program's own starts, behind what was done of it.
    """
    outer = _enclosing.get()
    if outer is None or outer.is_closed:
        return None
    call = current_call.get()
    if call is not None and call.run is outer:
        branch, mark = call.branch, call.branch.mark_now()
    else:
        branch = outer.last_used
        mark = branch.mark_behind_queue() if outer.is_here else branch.mark_now()
    found = Nested(branch, mark, branch.num_children)
    outer.nested.append(found)
    return found
