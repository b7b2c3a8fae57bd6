"""Runs inside runs: which program is running here, and where in it another one was started."""

from __future__ import annotations

from contextvars import ContextVar, Token

from frontend_lang.branch import Nested, ProgramRun
from frontend_lang.calling import current_call

_enclosing: ContextVar[ProgramRun | None] = ContextVar("enclosing", default=None)


def enclosing() -> ProgramRun | None:
    """Give the run of the program that runs us, if one does."""
    return _enclosing.get()


def enter(run: ProgramRun) -> Token[ProgramRun | None]:
    """Make a run the one that others are started in, until `leave`."""
    return _enclosing.set(run)


def leave(token: Token[ProgramRun | None]) -> None:
    """Undo `enter`."""
    _enclosing.reset(token)


def nest() -> Nested | None:
    """Note in the enclosing run that another run begins here; None when there is none, or it has ended.

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
