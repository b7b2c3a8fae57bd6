"""State: what a program writes to and reads from; Branches: several States that share a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack, overload

from frontend_lang import builders, interpreter
from frontend_lang.aliases import meta_info
from frontend_lang.backends import ProgramError
from frontend_lang.branch import Branch, Key, Reply
from frontend_lang.builders import (
    ConstraintOptions,
    DecideOptions,
    GenOptions,
    SelectOptions,
    ToolOptions,
)
from frontend_lang.decisions import Decisions, Question
from frontend_lang.nodes import (
    Block,
    Call,
    Capture,
    Expression,
    Fork,
    Gen,
    Mark,
    RoleBegin,
    RoleEnd,
    Step,
    flatten,
)
from frontend_lang.outcome import Err, Ok, Outcome, Outcomes
from frontend_lang.reading import opened, raise_failure, shown, statement_location, variable_of
from frontend_lang.tools import ToolAnswer, ToolCall
from frontend_lang.trace import CallRecord
from frontend_lang.waiting import can_wait, until_done, wait_for

T = TypeVar("T")


class State:
    """A transcript that grows by `+=` and the variables its calls set.

    Appending returns at once; the calls run meanwhile, in order. Reading (`state["x"]`, `text()`, `sync()`) waits. In
    an async program `await state.value("x")` and `await state.finished()` wait, and reading what is there works too.
    A call that fails ends its State: later calls do not run, and every read of a missing value raises ProgramError
    with the first cause. A State belongs to one run of one program.
    """

    __slots__ = ("_branch",)
    __iter__ = None

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def __iadd__(self, other: str | Expression) -> State:
        if _append(self._branch, other):
            self._start()
        return self

    @overload
    def __getitem__(self, name: Call[T]) -> T: ...

    @overload
    def __getitem__(self, name: str) -> Any: ...

    def __getitem__(self, name: Key) -> Any:
        """Give the value of the last call named `name`, or of this very call, with its type.

        Raises:
            ProgramError: no call has this name, or its value is missing because a call failed.
        """
        return self._reply(name).value

    def __contains__(self, name: object) -> bool:
        return name in self._branch.variables

    def __repr__(self) -> str:
        return f"State({self._branch.run.program!r}, {self._branch.path!r})"

    @overload
    async def value(self, name: Call[T]) -> T: ...

    @overload
    async def value(self, name: str) -> Any: ...

    async def value(self, name: Key) -> Any:
        """Wait for the value of `name`; raises like `state[name]`."""
        variable = variable_of(self._branch, name)
        await until_done(variable)
        return opened(self._branch, variable, name).value

    def text(self) -> str:
        """Wait until everything appended is done, and give the transcript as text.

        Raises:
            ProgramError: a call of this State failed.
        """
        self.sync()
        return self._branch.transcript.text

    def messages(self) -> list[dict[str, str]]:
        """Wait like `text`, and give the chat messages as dicts of "role" and "content"."""
        self.sync()
        return self._branch.transcript.messages

    def token_ids(self) -> tuple[int, ...]:
        """Wait like `text`, and give the transcript as token ids."""
        self.sync()
        return self._branch.transcript.told_ids()

    def sync(self) -> None:
        """Wait until everything appended is done; raises like `text`."""
        if not self._branch.is_idle:
            interpreter.start(self._branch)  # text alone need not wait, in async programs too
        if not self._branch.is_idle:
            self._check_can_wait(".sync()", "finished()")
            wait_for(interpreter.settle(self._branch))
        raise_failure(self._branch)

    async def finished(self) -> None:
        """Wait until everything appended is done; raises like `text`."""
        await interpreter.settle(self._branch)
        raise_failure(self._branch)

    def record(self, name: Key) -> CallRecord:
        """Give the record behind `name`: token counts, logprobs, finish reason.

        Raises:
            ProgramError: as reading `name`, or no single call set it.
        """
        record = self._reply(name).record
        if record is None:
            raise ProgramError(
                f"{shown(name)} is not of one call",
                program=self._branch.run.program,
                location=statement_location(),
            )
        return record

    def get_var(self, name: str) -> Any:
        """Give `state[name]`."""
        return self[name]

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """Give counts and log-probabilities of a call under SGLang's names, see aliases.meta_info."""
        return meta_info(self._reply(name))

    def error(self) -> ProgramError | None:
        """Wait like `text`, and give the failure of this State instead of raising it; then it is yours to handle."""
        try:
            self.sync()
        except ProgramError as error:
            return error
        return None

    def distribution(self, name: Key) -> Mapping[str, float]:
        """Give the probability of each choice of the select named `name`.

        Raises:
            ProgramError: as reading `name`, or `name` is not a select.
        """
        distribution = self.record(name).distribution
        if distribution is None:
            raise ProgramError(
                f"{shown(name)} is not a select",
                program=self._branch.run.program,
                location=statement_location(),
            )
        return distribution

    @overload
    def gen(
        self,
        name: str | None = ...,
        max_tokens: int | None = ...,
        *,
        tools: Sequence[Callable[..., Any]],
        max_rounds: int,
        **options: Unpack[ToolOptions],
    ) -> ToolAnswer: ...

    @overload
    def gen(
        self,
        name: str | None = ...,
        max_tokens: int | None = ...,
        *,
        tools: Sequence[Callable[..., Any]],
        **options: Unpack[ToolOptions],
    ) -> ToolCall: ...

    @overload
    def gen(
        self,
        name: str | None = ...,
        max_tokens: int | None = ...,
        *,
        n: int,
        **options: Unpack[ConstraintOptions],
    ) -> Branches: ...

    @overload
    def gen(
        self,
        name: str | None = ...,
        max_tokens: int | None = ...,
        *,
        schema: type[T],
        **options: Unpack[GenOptions],
    ) -> T: ...

    @overload
    def gen(
        self,
        name: str | None = ...,
        max_tokens: int | None = ...,
        *,
        type: type[T],
        **options: Unpack[GenOptions],
    ) -> T: ...

    @overload
    def gen(
        self, name: str | None = ..., max_tokens: int | None = ..., **options: Unpack[ConstraintOptions]
    ) -> str: ...

    @overload
    def gen(
        self,
        name: str | None = ...,
        max_tokens: int | None = ...,
        *,
        schema: Any,
        **options: Unpack[GenOptions],
    ) -> Any: ...

    @overload
    def gen(
        self,
        name: str | None = ...,
        max_tokens: int | None = ...,
        *,
        type: Any,
        **options: Unpack[GenOptions],
    ) -> Any: ...

    def gen(self, name: str | None = None, max_tokens: int | None = None, **options: Any) -> Any:
        """Append `gen(...)` and wait for its value: `person = state.gen("person", schema=Person)` is a Person."""
        return self._now(builders.gen(name, max_tokens, **options))

    def select(
        self, name: str | None = None, choices: Sequence[str] = (), **options: Unpack[SelectOptions]
    ) -> str:
        """Append `select(...)` and wait for the winner."""
        return self._now(builders.select(name, choices, **options))

    def decide(self, questions: Mapping[str, Question[Any]], **options: Unpack[DecideOptions]) -> Decisions:
        """Append `decide(...)` and wait for the decisions, by the questions' names."""
        return self._now(builders.decide(None, questions, **options))

    def _now(self, call: Call[T]) -> T:
        self += call
        return self[call]

    def role(self, name: str, *parts: str | Expression) -> _RoleBlock:
        """Append a chat message of the parts; without parts make `with state.role("tool"): ...`."""
        if parts:
            self += builders.role(name, *parts)
        return _RoleBlock(self._branch, name)

    def system(self, *parts: str | Expression) -> _RoleBlock:
        """Append a system message, or make `with state.system(): ...`."""
        return self.role("system", *parts)

    def user(self, *parts: str | Expression) -> _RoleBlock:
        """Append a user message, or make `with state.user(): ...`."""
        return self.role("user", *parts)

    def assistant(self, *parts: str | Expression) -> _RoleBlock:
        """Append an assistant message, or make `with state.assistant(): ...`."""
        return self.role("assistant", *parts)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """Make `with state.var_scope("x"): ...`: what is appended inside becomes variable `x`, as text."""
        mark = Mark()
        _append(self._branch, Block((mark,)))
        yield
        _append(self._branch, Block((Capture(name, mark),)))
        self._start()

    @contextmanager
    def copy(self) -> Iterator[State]:
        """Make `with state.copy() as other: ...`: a fork of one, joined at the end of the block."""
        with self.fork(1) as branches:
            yield branches[0]

    def fork(self, n: int = 1) -> Branches:
        """Part into `n` States that start from this transcript and these variables, and run side by side.

        Raises:
            ValueError: n is not a whole number of at least 1.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"fork takes a whole number of branches, at least 1, got {n!r}")
        self._branch.run.check_can_append()
        children = tuple(self._branch.child() for _ in range(n))
        self._branch.append(Fork(children), statement_location())
        self._start()
        return Branches(children, self._branch)

    def _start(self) -> None:
        interpreter.begin([self._branch])

    def _reply(self, name: Key) -> Reply:
        variable = variable_of(self._branch, name)
        if not variable.done():
            self._check_can_wait(f"[{shown(name)}]", f"value({shown(name)})")
            wait_for(until_done(variable))
        return opened(self._branch, variable, name)

    def _check_can_wait(self, what: str, instead: str) -> None:
        if not (can_wait() and self._branch.run.is_here):
            raise ProgramError(
                f"state{what} is not there yet and cannot be waited for here; "
                f"in an async program use `await state.{instead}`",
                program=self._branch.run.program,
                location=statement_location(),
            )


class Branches(Sequence[State]):
    """The States of a fork, in order.

    `branches += x` appends to all: text or an expression, one item per branch as a list, or a function of the index.
    Branches that nobody joins are finished before the program ends.
    """

    def __init__(self, branches: Sequence[Branch], parent: Branch) -> None:
        self._branches = tuple(branches)
        self._parent = parent
        self._states = tuple(State(branch) for branch in branches)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"Branches({[branch.path for branch in self._branches]})"

    @overload
    def __getitem__(self, index: int) -> State: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[State]: ...

    def __getitem__(self, index: int | slice) -> State | Sequence[State]:
        return self._states[index]

    def __setitem__(self, index: int, state: State) -> None:
        """Allow `branches[0] += ...`, which assigns the same State again.

        Raises:
            TypeError: a different State.
        """
        if self._states[index] is not state:
            raise TypeError("a branch cannot be replaced; append to it with +=")

    def __iadd__(self, other: str | Expression | Sequence[Any] | Callable[[int], Any]) -> Branches:
        if isinstance(other, str | Expression):
            parts: Sequence[Any] = [other] * len(self)
        elif isinstance(other, Sequence):
            parts = other
        elif callable(other):
            parts = [other(index) for index in range(len(self))]
        else:
            raise TypeError(
                f"branches take text, an expression, a list or a function, got {type(other).__name__}"
            )
        if len(parts) != len(self):
            raise ValueError(f"{len(self)} branches take a list of {len(self)} items, got {len(parts)}")
        pairs = zip(self._branches, parts, strict=True)
        interpreter.begin([branch for branch, part in pairs if _append(branch, part)])
        return self

    def __enter__(self) -> Branches:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.join()
        else:
            self.cancel()

    def cancel(self) -> None:
        """Cancel what the branches still have to do; reading what is missing then raises, nothing is raised at the end.

        Leaving `with state.fork(n) as branches:` by an exception does it.
        """
        for branch in self._branches:
            branch.abandon()

    def join(self, mode: str = "gather_variable") -> Outcomes[State]:
        """Wait for all branches and give Ok(state) or Err(error) for each, in the order of the fork.

        A variable that all of them set becomes a list of their values in the State that was forked, unless it has set
        that variable itself.
        An Err that the program looks at is the program's to handle; one nobody looks at is raised at the end of run.
        """
        if mode != "gather_variable":
            raise ValueError(
                f'join takes mode "gather_variable" only, got {mode!r}; append the text you want to the state'
            )
        for state in self._states:
            if not state._branch.is_idle:
                state._check_can_wait(".join()", "outcomes()")
                wait_for(interpreter.settle(state._branch))
        return self._outcomes()

    async def outcomes(self) -> Outcomes[State]:
        """Join in an async program."""
        for branch in self._branches:
            await interpreter.settle(branch)
        return self._outcomes()

    def _outcomes(self) -> Outcomes[State]:
        for branch in self._branches:
            branch.close_scope()
        self._parent.gather(self._branches)
        self._parent.run.last_used = self._parent
        failures = [branch.failure for branch in self._branches]
        items: list[Outcome[State]] = [
            Ok(state) if failure is None else Err(failure.error())
            for state, failure in zip(self._states, failures, strict=True)
        ]

        def tell(index: int) -> None:
            if (failure := failures[index]) is not None:
                self._branches[index].run.tell(failure)

        return Outcomes(items, on_look=tell)


class _RoleBlock:
    """The `with` form of a chat message."""

    def __init__(self, branch: Branch, role: str) -> None:
        self._branch = branch
        self._role = role

    def __enter__(self) -> None:
        _append(self._branch, RoleBegin(self._role))

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None or not self._branch.run.is_closed:  # an ended program takes nothing more
            _append(self._branch, RoleEnd(self._role))


def _append(branch: Branch, value: object) -> bool:
    """Queue the nodes of a value, and tell whether there is a call among them; text alone can wait for one.

    Raises:
        ProgramError: the program has ended, or a message begins inside another.
        TypeError: not text and not an expression.
    """
    nodes = flatten(value)
    branch.run.check_can_append()
    branch.run.last_used = branch
    location = statement_location()
    for node in nodes:
        if isinstance(node, RoleBegin) and branch.open_role is not None:
            raise ProgramError(
                f"{node.label} at {location} begins inside {branch.open_role}(...)",
                program=branch.run.program,
                location=location,
            )
        is_child = branch.ready is not None  # forked inside a message, it may end it
        if isinstance(node, RoleEnd) and branch.open_role != node.role and (branch.open_role or not is_child):
            raise ProgramError(
                f"{node.role} ends at {location}, but "
                + (f"{branch.open_role}(...) is open" if branch.open_role else "no message is open"),
                program=branch.run.program,
                location=location,
            )
        if isinstance(node, RoleBegin | RoleEnd):
            branch.open_role = node.role if isinstance(node, RoleBegin) else None
        if isinstance(node, Gen) and node.n > 1:
            children = tuple(branch.child() for _ in range(node.n))
            samples = tuple((child, child.declare(node)) for child in children)
            value = Branches(children, branch)
            branch.append_step(Step(node, location, branch.declare(node), samples, value))
        else:
            branch.append(node, location)
    return any(isinstance(node, Call) for node in nodes)
