"""@program: makes a function of a State a program that can be run, awaited and mapped."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, Unpack, overload

from tqdm import tqdm

from frontend_lang import interpreter
from frontend_lang.aliases import RUN_OPTIONS, options_in
from frontend_lang.backends import (
    Backend,
    DeadlineExceeded,
    DryBackend,
    EngineBackend,
    ProgramError,
    RecordingBackend,
    RuntimeEngine,
)
from frontend_lang.branch import Listener, ProgramRun, RunOptions
from frontend_lang.builders import SamplingOptions, check_program_sampling
from frontend_lang.events import ProgramDone
from frontend_lang.limits import (
    GRACE_S,
    ProgramLimits,
    Retry,
    checked_budget,
    checked_retry,
    checked_timeout,
)
from frontend_lang.nesting import enclosing, enter, leave, nest
from frontend_lang.outcome import Err, Ok, Outcome
from frontend_lang.reading import replies
from frontend_lang.result import ProgramResult
from frontend_lang.state import State
from frontend_lang.streaming import AsyncProgramStream, ProgramStream
from frontend_lang.traces import DryRun, Seen, Trace, dry_run_of, see
from frontend_lang.waiting import all_or_first_error, block_on, can_wait, run_in_greenlet, wait_for

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_MAX_CONCURRENCY = 64


@dataclass(slots=True)
class _Defaults:
    """Hold what set_default_engine and set_default_backend set."""

    backend: Backend | None = None


_DEFAULTS = _Defaults()


def set_default_engine(engine: RuntimeEngine | None) -> None:
    """Use an engine for every program that names none; None takes it back."""
    _DEFAULTS.backend = None if engine is None else EngineBackend(engine)


def set_default_backend(backend: Backend | None) -> None:
    """Use a backend for every program that names none; None takes it back."""
    _DEFAULTS.backend = backend


@dataclass(frozen=True, eq=False)
class Program(Generic[P, R]):
    """A function whose first parameter is a State.

    Every argument of `run` goes to the function, whatever its name; the runtime and its options are chosen by
    `with_options` or `set_default_engine`. Calling the program with a State runs its statements there, as part of
    the caller: `other(state, x=1)`.

    Attributes:
        function: what was decorated.
        backend: where its calls go; None = the enclosing program's, else the default.
        sampling: options for every gen that does not set them itself.
        bound: keyword arguments given in advance.
        limits: what all its calls may take together.
    """

    function: Callable[..., Any]
    backend: Backend | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)

    def __post_init__(self) -> None:
        if not (inspect.isfunction(self.function) or inspect.ismethod(self.function)):
            raise TypeError(f"a program is made of a function or method, got {self.function!r:.80}")
        if inspect.isgeneratorfunction(self.function) or inspect.isasyncgenfunction(self.function):
            raise TypeError(f"{self.name} must be a plain or async function, got a generator function")
        self.__dict__.update(
            __name__=self.name, __doc__=inspect.getdoc(self.function), __wrapped__=self.function
        )

    @property
    def name(self) -> str:
        return self.function.__name__

    def __call__(self, state: State, /, *args: Any, **kwargs: Any) -> R:
        """Run the statements on the caller's State; an async program in an async one gives a coroutine."""
        if not isinstance(state, State):
            raise TypeError(
                f"{self.name}(...) takes a State first, got {type(state).__name__}; to run it alone use {self.name}.run(...)"
            )
        value = self.function(state, *args, **{**self.bound, **kwargs})
        if inspect.iscoroutine(value) and can_wait():
            value = wait_for(value)
        return value  # type: ignore[no-any-return]

    def run(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramResult[R]:
        """Run the program to its end.

        Keyword arguments that the function does not take are options where they are known: `backend`, sampling
        options (`temperature=0`), and `stream=True`, which gives what `stream` gives.
        Raises:
            ProgramError: a call failed and the program did not handle it.
            Exception: whatever the function raises, with a note that names the program and line.
            TypeError: the arguments do not fit the function.
        """
        program, arguments, is_stream = self._familiar(kwargs)
        if is_stream:
            return program.stream(*args, **arguments)  # type: ignore[return-value]
        program._check_arguments(args, arguments)
        return block_on(lambda: program._run(args, arguments))

    async def arun(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramResult[R]:
        """Run the program on the caller's event loop; raises like `run`."""
        program, arguments, is_stream = self._familiar(kwargs)
        if is_stream:
            raise TypeError(f"{self.name}: to stream on an event loop use {self.name}.astream(...)")
        program._check_arguments(args, arguments)
        return await program._run(args, arguments)

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> ProgramStream[R]:
        """Start the program and give its events as they happen; see ProgramStream."""
        program, arguments, _ = self._familiar(kwargs)
        program._check_arguments(args, arguments)
        return ProgramStream(lambda listener: program._told(args, arguments, listener))

    def astream(self, /, *args: P.args, **kwargs: P.kwargs) -> AsyncProgramStream[R]:
        """Start the program on the running event loop and give its events; see AsyncProgramStream."""
        program, arguments, _ = self._familiar(kwargs)
        program._check_arguments(args, arguments)
        return AsyncProgramStream(lambda listener: program._told(args, arguments, listener))

    def map(
        self,
        items: Iterable[Mapping[str, Any] | tuple[Any, ...]],
        *,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        fail_fast: bool = False,
        progress: bool = False,
    ) -> list[Outcome[ProgramResult[R]]]:
        """Run the program once per item, several at a time, and give Ok(result) or Err(error) in order.

        An outcome reads like its result: `outcome["x"]` gives the value, or raises the item's own error.
        Args:
            items: keyword arguments as a mapping, or positional arguments as a tuple; all are checked before
                the first run, and none is changed.
            max_concurrency: most runs at a time, at least 1.
            fail_fast: cancel the rest and raise the first error.
            progress: show a progress bar on stderr.
        Raises:
            TypeError: the arguments of an item do not fit the function.
        """
        return block_on(
            lambda: self.amap(items, max_concurrency=max_concurrency, fail_fast=fail_fast, progress=progress)
        )

    def run_batch(
        self,
        items: Iterable[Mapping[str, Any] | tuple[Any, ...]],
        *,
        max_concurrency: int | None = None,
        num_threads: int | Literal["auto"] = "auto",
        fail_fast: bool = False,
        progress: bool = False,
        progress_bar: bool = False,
        **options: Any,
    ) -> list[Outcome[ProgramResult[R]]]:
        """Do `map` under the names that programs written for SGLang use.

        Args:
            num_threads: another name for max_concurrency ("auto" = its default); no thread is started.
            progress_bar: another name for progress.
            options: `backend` and sampling options for all items.
        """
        unknown = options.keys() - RUN_OPTIONS | {"stream"} & options.keys()
        if unknown:
            raise TypeError(f"{self.name}.run_batch has no option {min(unknown)!r}")
        program, _ = self._with_familiar(options)
        if max_concurrency is not None and num_threads != "auto":
            raise TypeError("num_threads is another name of max_concurrency: give one of them")
        limit = max_concurrency if max_concurrency is not None else num_threads
        return program.map(
            items,
            max_concurrency=DEFAULT_MAX_CONCURRENCY if limit == "auto" else limit,
            fail_fast=fail_fast,
            progress=progress or progress_bar,
        )

    async def amap(
        self,
        items: Iterable[Mapping[str, Any] | tuple[Any, ...]],
        *,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        fail_fast: bool = False,
        progress: bool = False,
    ) -> list[Outcome[ProgramResult[R]]]:
        """Do `map` on the caller's event loop."""
        if isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int) or max_concurrency < 1:
            raise ValueError(f"max_concurrency must be a whole number of at least 1, got {max_concurrency!r}")
        calls = [self._arguments_of(item, index) for index, item in enumerate(items)]
        waiting = iter(enumerate(calls))
        outcomes: dict[int, Outcome[ProgramResult[R]]] = {}

        async def work(bar: Any) -> None:
            for index, (args, kwargs) in waiting:
                try:
                    outcomes[index] = Ok(await self._run(args, kwargs))
                except Exception as error:
                    if fail_fast:
                        raise
                    outcomes[index] = Err(error)
                if bar is not None:
                    bar.update()

        with _ProgressBar(total=len(calls), desc=self.name) if progress else nullcontext() as bar:
            await all_or_first_error([work(bar) for _ in range(min(max_concurrency, len(calls)))])
        return [outcomes[index] for index in range(len(calls))]

    def bind(self, /, **kwargs: Any) -> Program[P, R]:
        """Give the same program with some keyword arguments given in advance."""
        return replace(self, bound={**self.bound, **kwargs})

    def with_options(
        self,
        /,
        *,
        engine: RuntimeEngine | None = None,
        backend: Backend | None = None,
        timeout_s: float | None = None,
        token_budget: int | None = None,
        retries: int | Retry | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Program[P, R]:
        """Give the same program with its own engine (or backend), limits and sampling options.

        Args:
            timeout_s: seconds from the start of a run after which its calls fail with DeadlineExceeded. Code of the
                program that waits for nothing, or blocks by itself (time.sleep), goes on to its next call first.
            token_budget: most tokens that all calls of a run may write together; then they raise BudgetExceeded.
            retries: how often a call is sent again after an error on the way (remote runtimes only).
            sampling: for every gen that does not set the option itself.
        Raises:
            InvalidRequest: unknown option (names the nearest) or value out of range.
            TypeError: both an engine and a backend.
        """
        if engine is not None and backend is not None:
            raise TypeError("give an engine or a backend, not both")
        chosen = EngineBackend(engine) if engine is not None else backend or self.backend
        limits = ProgramLimits(
            self.limits.timeout_s if timeout_s is None else checked_timeout(timeout_s),
            self.limits.token_budget if token_budget is None else checked_budget(token_budget),
            self.limits.retry if retries is None else checked_retry(retries),
        )
        options = {**self.sampling, **check_program_sampling({**sampling})}
        return replace(self, backend=chosen, sampling=options, limits=limits)

    async def _told(self, args: Sequence[Any], kwargs: Mapping[str, Any], listener: Listener) -> None:
        """Run the program and tell of everything, its result last."""
        listener(ProgramDone(await self._run(args, kwargs, listener)))

    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> Trace:
        """Run the program and give its trace, also when it fails: `trace.error` then says why."""
        return block_on(lambda: self.atrace(*args, **kwargs))

    async def atrace(self, /, *args: P.args, **kwargs: P.kwargs) -> Trace:
        """Do `trace` on the caller's event loop."""
        self._check_arguments(args, kwargs)
        seen: list[Seen] = []
        error: Exception | None = None
        try:
            await self._run(args, kwargs, on_end=seen.append)
        except Exception as caught:
            if not seen:
                raise
            error = caught
        return seen[0].trace(error)

    def dry_run(self, /, *args: P.args, **kwargs: P.kwargs) -> DryRun:
        """Give the prompts of all calls without sending any.

        The first are exact; later ones may hold stand-ins for what the model would have written (see DryBackend). The
        program's own code runs, and so does a tool where the DryBackend was given a call of it.
        """
        backend = self._chosen_backend()
        dry = backend if isinstance(backend, DryBackend) else DryBackend(backend)
        return dry_run_of(replace(self, backend=dry).trace(*args, **kwargs), dry.stand_ins)

    async def _run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        listener: Listener | None = None,
        on_end: Callable[[Seen], None] = lambda seen: None,
    ) -> ProgramResult[R]:
        recorder = RecordingBackend(self._chosen_backend())
        options = RunOptions(self.sampling, self.clock, self.limits, enclosing(), listener)
        place, run = nest(), ProgramRun(self.name, recorder, options)
        root, token = run.root, enter(run)
        try:
            value = await self._within_deadline(run, args, kwargs)
        except BaseException as mistake:
            if place is not None:
                place.error = mistake
            if isinstance(mistake, Exception):
                self._add_notes(mistake, run)
            raise
        finally:
            leave(token)
            await run.close()
            seen = see(run, recorder)
            run.forget_branches()
            on_end(seen)
            if place is not None:
                place.seen = seen
        if run.untold:
            error = run.untold.pop(0).error()
            self._add_notes(error, run)
            if place is not None:
                place.error = error
            raise error
        return ProgramResult(
            self.name,
            value,
            seen.calls,
            root.transcript,
            dict(replies(root)),
            seen,
        )

    async def _within_deadline(self, run: ProgramRun, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
        """Run the function and what it left running; after the deadline it has GRACE_S to handle its failed calls."""
        left_s = run.deadline.left_s()
        if left_s is None:
            return await self._body(run, args, kwargs)
        try:
            async with asyncio.timeout(max(left_s, 0) + GRACE_S) as timer:
                return await self._body(run, args, kwargs)
        except TimeoutError as error:
            if not timer.expired():
                raise
            late = DeadlineExceeded("the program's timeout_s is over")
            raise ProgramError(
                f'program "{self.name}" still ran {GRACE_S:g} s after its timeout_s', program=self.name
            ) from (run.untold[0].cause if run.untold else late.with_traceback(error.__traceback__))

    async def _body(self, run: ProgramRun, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
        state, arguments = State(run.root), {**self.bound, **kwargs}
        value: R
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(state, *args, **arguments)
        else:
            value = await run_in_greenlet(lambda: self.function(state, *args, **arguments))
            if inspect.iscoroutine(value):  # of an async function inside a plain one: a decorator
                value = await value
        for branch in run.branches:
            if not branch.is_idle:
                await interpreter.settle(branch)
        return value

    def _familiar(self, kwargs: Mapping[str, Any]) -> tuple[Program[P, R], dict[str, Any], bool]:
        """Give the program with the options among the arguments, the other arguments, and whether to stream."""
        options = options_in(kwargs, _parameters(self.function))
        if not options:
            return self, dict(kwargs), False
        arguments = {name: value for name, value in kwargs.items() if name not in options}
        program, is_stream = self._with_familiar(options)
        return program, arguments, is_stream

    def _with_familiar(self, options: Mapping[str, Any]) -> tuple[Program[P, R], bool]:
        given = {name: value for name, value in options.items() if value is not None}
        is_stream = given.pop("stream", False)
        if "max_new_tokens" in given:
            if "max_tokens" in given:
                raise TypeError("max_new_tokens is another name of max_tokens: give one of them")
            given["max_tokens"] = given.pop("max_new_tokens")
        return (self.with_options(**given) if given else self), is_stream

    def _chosen_backend(self) -> Backend:
        outer = enclosing()
        backend = self.backend or (outer.backend if outer else _DEFAULTS.backend)
        if backend is None:
            raise ProgramError(
                f'program "{self.name}" has no engine: use {self.name}.with_options(engine=...) or set_default_engine(...)',
                program=self.name,
            )
        return backend

    def _arguments_of(self, item: object, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        match item:
            case tuple():
                args, kwargs = item, {}
            case Mapping():
                args, kwargs = (), dict(item)
            case _:
                raise TypeError(
                    f"{self.name}: an item is a mapping of keyword arguments or a tuple of positional ones, "
                    f"got {type(item).__name__} as item {index}"
                )
        try:
            self._check_arguments(args, kwargs)
        except TypeError as error:
            error.add_note(f"in item {index}")
            raise
        return args, kwargs

    def _check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            _signature(self.function).bind(None, *args, **{**self.bound, **kwargs})
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None

    def _add_notes(self, error: Exception, run: ProgramRun) -> None:
        """Say in which program and line an error arose, and what else went wrong."""
        if not isinstance(error, ProgramError):
            lines = [
                frame.f_lineno if line is None else line
                for frame, line in traceback.walk_tb(error.__traceback__)
                if frame.f_code is self.function.__code__
            ]
            where = f"{self.function.__code__.co_filename}:{lines[-1]}" if lines else "before its first line"
            error.add_note(f'in program "{self.name}" ({where})')
        for failure in run.untold:
            error.add_note(f"unread: {failure.error()}")


@functools.lru_cache(maxsize=1024)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


@functools.lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Give a function's parameters by name; None when it takes any keyword."""
    parameters = _signature(function).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return None if takes_any else parameters


class _ProgressBar(tqdm):  # type: ignore[type-arg]
    """A progress bar without tqdm's monitor thread."""

    monitor_interval = 0


@overload
def program(function: Callable[Concatenate[State, P], Coroutine[Any, Any, R]], /) -> Program[P, R]: ...


@overload
def program(function: Callable[Concatenate[State, P], R], /) -> Program[P, R]: ...


@overload
def program(
    function: None = None, /, *, num_api_spec_tokens: None = None
) -> Callable[..., Program[Any, Any]]: ...


def program(function: Callable[..., Any] | None = None, /, *, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is a State.

    Args:
        num_api_spec_tokens: refused; it is an option of another runtime that has no effect here.
    """
    if num_api_spec_tokens is not None:
        raise TypeError("num_api_spec_tokens has no effect here: calls of one State run in order")
    return program if function is None else Program(function)


function = program
