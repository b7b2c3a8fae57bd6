"""The state of a running program: its branches and what belongs to all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from frontend_lang.backends import Backend, GrammarSpec, ProgramError, RequestAborted, SamplingParams
from frontend_lang.events import Event, VariableSet
from frontend_lang.limits import Deadline, ProgramLimits, TokenBudget
from frontend_lang.nodes import Call, Fork, Gen, Mark, Node, Step
from frontend_lang.outcome import Failure
from frontend_lang.selection import ScoredChoice
from frontend_lang.trace import CallRecord
from frontend_lang.transcript import Transcript
from frontend_lang.waiting import cancel_all

if TYPE_CHECKING:
    from frontend_lang.traces import Seen


@dataclass(frozen=True, slots=True)
class Reply:
    """The value of a variable, the record of the call that set it, and for a select the scores of its choices."""

    value: Any
    record: CallRecord | None = None
    choices: tuple[ScoredChoice, ...] = ()


Settled = Reply | Failure
Variable = asyncio.Future[Settled]  # never holds an exception: a failure is a value until someone reads it
Key = str | Call[Any]  # a variable is found by its name and by the call that sets it
Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run is told at its start.

    Attributes:
        sampling: options for every gen that does not set them itself.
        parent: the run that started this one from inside a program.
        listener: gets every event as it happens; None when nobody streams.
    """

    sampling: Mapping[str, Any]
    clock: Callable[[], float]
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    parent: ProgramRun | None = None
    listener: Listener | None = None


@dataclass(slots=True)
class Nested:
    """A run that a program started: where it stands in the program's own run, and what is kept of it.

    Attributes:
        branch, mark: it stands where this mark of the branch's transcript does.
        num_forked: how many branches had parted from this one by then.
        seen: None until it has ended.
        error: what it ended with, or None.
    """

    branch: Branch
    mark: Mark
    num_forked: int
    seen: Seen | None = None
    error: BaseException | None = None


class ProgramRun:
    """Own what all branches of one run share.

    Attributes:
        root: where the program begins.
        last_used: the branch that it appended to or read from last.

    Invariants: `untold` holds the failures that no reader has been told of; after `close` no task runs and every
    variable is settled.
    """

    def __init__(self, program: str, backend: Backend, options: RunOptions) -> None:
        self.program = program
        self.backend = backend
        self.sampling = options.sampling
        self.clock = options.clock
        self.limits = options.limits
        self.listener = options.listener
        self.loop = asyncio.get_running_loop()
        self.deadline, self.budget = self._limits_within(options.parent)
        self.is_unlimited = (
            self.deadline.at_s is None and self.budget.is_endless and self.limits.retry is None
        )
        self.calls: list[CallRecord] = []
        self.num_calls_started = 0
        self.untold: list[Failure] = []
        self.branches: list[Branch] = []
        self.is_closed = False
        self._last_params: tuple[Gen[Any], GrammarSpec | None, SamplingParams] | None = None
        self.nested: list[Nested] = []
        self.has_scopes = False  # it opened some in the runtime
        self.last_used = self.root = Branch(self, "root", transcript=Transcript(backend), variables={})

    def _limits_within(self, parent: ProgramRun | None) -> tuple[Deadline, TokenBudget]:
        """Give what is left for this run: never more than its parent has."""
        at_s = None if self.limits.timeout_s is None else self.loop.time() + self.limits.timeout_s
        budget = None
        if parent is not None:
            moments = [moment for moment in (at_s, parent.deadline.at_s) if moment is not None]
            at_s = min(moments) if moments else None
            budget = None if parent.budget.is_endless else parent.budget
            if budget is not None and parent.loop is not self.loop:
                raise ProgramError(
                    f'program "{self.program}" cannot share the token_budget of "{parent.program}" from another thread',
                    program=self.program,
                )
        return Deadline(at_s, self.loop.time), TokenBudget(self.limits.token_budget, budget)

    def sampling_of(self, node: Gen[Any], grammar: GrammarSpec | None) -> SamplingParams:
        """Give a gen's options over the program's. The last one is kept: branches often share a gen."""
        if node.params is not None and not self.sampling and grammar is node.grammar:
            return node.params
        last = self._last_params
        if last is not None and last[0] is node and last[1] is grammar:
            return last[2]
        params = SamplingParams(**{**self.sampling, **node.sampling}, n=node.n, grammar=grammar)
        self._last_params = (node, grammar, params)
        return params

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
        try:
            await cancel_all([branch.task for branch in self.branches if branch.task is not None])
        finally:  # also when this is cancelled
            for branch in self.branches:
                if branch.queue:
                    cause = RequestAborted(f'program "{self.program}" ended before this call')
                    branch.fail(branch.failure_at(branch.queue[0], cause))
                branch.close_scope()
            if self.has_scopes:
                await self.backend.settle_scopes()

    def forget_branches(self) -> None:
        """Let go of the branches of a closed run: its memory is free at once then, without a search for cycles."""
        for branch in self.branches:
            branch.task = None
        self.branches.clear()
        del self.root, self.last_used


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
        variables: Mapping[Key, Variable],
        ready: asyncio.Future[None] | None = None,
    ) -> None:
        self.run = run
        self.path = path
        self.transcript = transcript
        self.variables: dict[Key, Variable] = dict(variables)
        self.ready = ready  # of a child: its parent has reached the fork
        self.queue: deque[Step] = deque()
        self.task: asyncio.Task[None] | None = None
        self.failure: Failure | None = None
        self.open_role: str | None = None  # as of the last node queued, not executed
        self.num_children = 0
        self.num_calls = 0  # started
        self.own_names: set[str] = set()  # set by calls of this branch
        self.gathered_names: frozenset[str] = frozenset()  # set by joins of its children
        self._scope_id: int | None = None
        run.branches.append(self)

    @property
    def is_idle(self) -> bool:
        """Tell whether everything queued has been executed, or the branch failed."""
        is_ready = self.ready is None or self.ready.done()
        return self.failure is not None or (is_ready and not self.queue)

    def append(self, node: Node | Fork, location: str) -> None:
        """Queue a node; a failed branch gives its failure to the node's readers at once."""
        if isinstance(node, Call):
            self.append_step(Step(node, location, self.declare(node)))
        else:
            self.append_step(Step(node, location))

    def append_step(self, step: Step) -> None:
        """Queue a step whose variables are declared."""
        if self.failure is not None:
            _settle(step, self.failure)
        else:
            self.queue.append(step)

    def mark_behind_queue(self) -> Mark:
        """Note the place behind all that is queued."""
        if not self.queue:
            return self.mark_now()
        mark = Mark()
        self.append_step(Step(mark, ""))
        return mark

    def mark_now(self) -> Mark:
        """Note the place behind all that was executed."""
        mark = Mark()
        self.transcript.marks[mark] = self.transcript.num_texts
        return mark

    def declare(self, node: Call[Any]) -> Variable:
        """Make the variable of a call; from now on its name and the call mean this one."""
        variable: Variable = self.run.loop.create_future()
        self.variables[node] = variable
        if node.name is not None:
            self.variables[node.name] = variable
            self.own_names.add(node.name)
        return variable

    def gather(self, children: Sequence[Branch]) -> None:
        """Make lists of the variables that all children set, in their order; what this branch set itself stays.

        A child without a value makes its failure the variable's.
        """
        shared = set.intersection(*(child.own_names | child.gathered_names for child in children))
        shared -= self.own_names
        self.gathered_names = self.gathered_names.union(shared)
        for name in shared:
            settled = [child.variables[name].result() for child in children]
            failures = [item for item in settled if isinstance(item, Failure)]
            values = [item.value for item in settled if isinstance(item, Reply)]
            self.variables[name] = self.run.loop.create_future()
            self.variables[name].set_result(failures[0] if failures else Reply(values))

    def set(self, name: str | None, variable: Variable, reply: Reply) -> None:
        """Give a variable its value."""
        variable.set_result(reply)
        if name is not None and self.run.listener is not None:
            self.run.listener(VariableSet(self.path, name, reply.value))

    def scope_id(self) -> int | None:
        """Give the scope that keeps this branch's prefix, opened by its first call."""
        if self._scope_id is None:
            self._scope_id = self.run.backend.open_scope()
            self.run.has_scopes = self.run.has_scopes or self._scope_id is not None
        return self._scope_id

    def close_scope(self) -> None:
        """Let go of the branch's prefix; a later call opens a new scope."""
        if self._scope_id is not None:
            scope_id, self._scope_id = self._scope_id, None
            self.run.backend.close_scope(scope_id)

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

    def abandon(self) -> None:
        """Cancel what this branch and its children still have to do; it counts as told."""
        for branch in self.run.branches:
            if branch is self or branch.path.startswith(f"{self.path}/"):
                if branch.queue:
                    cause = RequestAborted("the branch was cancelled")
                    branch.fail(branch.failure_at(branch.queue[0], cause))
                if branch.task is not None:
                    branch.task.cancel()
                branch.close_scope()

    def failure_at(self, step: Step, cause: Exception) -> Failure:
        """Describe an error at a step. Pure."""
        node = step.node
        return Failure(
            program=self.run.program,
            location=step.location,
            label=node.label,
            call=node.name if isinstance(node, Call) else None,
            prompt=self.transcript.text,
            cause=cause,
        )

    def fail(self, failure: Failure) -> None:
        """End the branch, and every branch that waits for a fork of it."""
        self.failure = failure
        while self.queue:
            _settle(self.queue.popleft(), failure)
        self.release(self.transcript)


def _settle(step: Step, failure: Failure) -> None:
    if step.variable is not None:
        step.variable.set_result(failure)
    for branch, variable in step.samples:
        variable.set_result(failure)
        branch.fail(failure)
    if isinstance(step.node, Fork):
        for branch in step.node.branches:
            branch.fail(failure)
