"""The state of a running program: its branches and what belongs to all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from frontend_lang.backends import Backend, ProgramError, RequestAborted
from frontend_lang.nodes import Call, Fork, Gen, Node, Select
from frontend_lang.outcome import Failure
from frontend_lang.trace import CallRecord
from frontend_lang.transcript import Transcript
from frontend_lang.waiting import cancel_all


@dataclass(frozen=True, slots=True)
class Reply:
    """The value of a call and its record."""

    value: Any
    record: CallRecord


Settled = Reply | Failure
Variable = asyncio.Future[Settled]  # never holds an exception: a failure is a value until someone reads it


class ProgramRun:
    """Own what all branches of one run share.

    Invariants: `untold` holds the failures that no reader has been told of; after `close` no task runs and every
    variable is settled.
    """

    def __init__(
        self, program: str, backend: Backend, *, sampling: Mapping[str, Any], clock: Callable[[], float]
    ) -> None:
        self.program = program
        self.backend = backend
        self.sampling = sampling
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.calls: list[CallRecord] = []
        self.num_calls_started = 0
        self.untold: list[Failure] = []
        self.branches: list[Branch] = []
        self.is_closed = False
        self.root = Branch(self, "root", transcript=Transcript(backend), variables={})

    @property
    def is_here(self) -> bool:
        """Tell whether the caller runs on the program's own loop."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def tell(self, failure: Failure) -> None:
        """Note that a reader was told of a failure: the program may handle it."""
        if failure in self.untold:
            self.untold.remove(failure)

    def check_can_append(self) -> None:
        """Raise ProgramError unless the caller runs on the program's own loop before its end."""
        if self.is_closed:
            raise ProgramError(f'program "{self.program}" has ended', program=self.program)
        if not self.is_here:
            raise ProgramError(
                f'a State of program "{self.program}" was used outside the thread of its program',
                program=self.program,
            )

    async def close(self) -> None:
        """End what still runs; settle every variable that has no value.

        A task that never began its first step is cancelled without a word, so its branch is failed here.
        """
        self.is_closed = True
        await cancel_all([branch.task for branch in self.branches if branch.task is not None])
        for branch in self.branches:
            if branch.queue:
                cause = RequestAborted(f'program "{self.program}" ended before this call')
                branch.fail(branch.failure_at(branch.queue[0][0], cause))


class Branch:
    """Own one line of execution: its queue of nodes, its transcript and its variables.

    One task at a time executes the queue in order (see interpreter.drain). A branch that failed has an empty queue
    and takes no more nodes; what it computed before stays readable.
    """

    def __init__(
        self,
        run: ProgramRun,
        path: str,
        *,
        transcript: Transcript,
        variables: Mapping[str, Variable],
        ready: asyncio.Future[None] | None = None,
    ) -> None:
        self.run = run
        self.path = path
        self.transcript = transcript
        self.variables: dict[str, Variable] = dict(variables)
        self.ready = ready  # of a child: its parent has reached the fork
        self.queue: deque[tuple[Node | Fork, Variable | None]] = deque()
        self.task: asyncio.Task[None] | None = None
        self.failure: Failure | None = None
        self.open_role: str | None = None  # as of the last node queued, not executed
        self.num_children = 0
        run.branches.append(self)

    @property
    def is_idle(self) -> bool:
        """Tell whether everything queued has been executed, or the branch failed."""
        is_ready = self.ready is None or self.ready.done()
        return self.failure is not None or (is_ready and not self.queue)

    def append(self, node: Node | Fork) -> None:
        """Queue a node; a failed branch gives its failure to the node's readers at once."""
        variable = self._declare(node) if isinstance(node, Gen | Select) else None
        if self.failure is not None:
            _settle(node, variable, self.failure)
        else:
            self.queue.append((node, variable))

    def child(self) -> Branch:
        """Make the next child, to be released when a Fork node is executed."""
        path = f"{self.path}/{self.num_children}"
        self.num_children += 1
        return Branch(
            self.run,
            path,
            transcript=self.transcript,
            variables=self.variables,
            ready=self.run.loop.create_future(),
        )

    def release(self, transcript: Transcript) -> None:
        """Let a child begin with its own transcript."""
        self.transcript = transcript
        if self.ready is not None and not self.ready.done():
            self.ready.set_result(None)

    def failure_at(self, node: Node | Fork, cause: Exception) -> Failure:
        """Describe an error at a node. Pure."""
        return Failure(
            program=self.run.program,
            location=node.location,
            label=node.label,
            call=node.name if isinstance(node, Gen | Select) else None,
            prompt=self.transcript.text,
            cause=cause,
        )

    def fail(self, failure: Failure) -> None:
        """End the branch, and every branch that waits for a fork of it."""
        self.failure = failure
        while self.queue:
            _settle(*self.queue.popleft(), failure)
        self.release(self.transcript)

    def _declare(self, node: Call) -> Variable:
        variable: Variable = self.run.loop.create_future()
        if node.name is not None:
            self.variables[node.name] = variable
        return variable


def _settle(node: Node | Fork, variable: Variable | None, failure: Failure) -> None:
    if variable is not None:
        variable.set_result(failure)
    if isinstance(node, Fork):
        for branch in node.branches:
            branch.fail(failure)
