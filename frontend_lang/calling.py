"""How one request of a call is sent: its limits, its retries, and its text as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Self, TypeVar

from frontend_lang.backends import (
    DeadlineExceeded,
    GenerateRequest,
    GenerationOutput,
    InvalidRequest,
    OutputChunk,
    OutputCollector,
    call_site,
)
from frontend_lang.branch import Branch, ProgramRun
from frontend_lang.events import CallDone, TextDelta
from frontend_lang.limits import BudgetExceeded, CallLimits, Retry
from frontend_lang.nodes import Call, Step
from frontend_lang.outcome import summary
from frontend_lang.trace import CallRecord

T = TypeVar("T")

# The call whose work we are part of, as a tool is of the call that made it.
current_call: ContextVar[CallLog | None] = ContextVar("current_call", default=None)


class CallLog:
    """Own the record of one call while it runs; its requests are known by the place it was made at.

    `fields` grows, then `close` makes the record of it, or `fail` unless there is one; leaving its `with` block by an
    exception fails it.
    """

    def __init__(self, kind: str, step: Step, name: str | None, branch: Branch) -> None:
        self.run, self.branch = branch.run, branch
        self.started = self.run.clock()
        self.index = self.run.num_calls_started
        self.fields: dict[str, Any] = {
            "index": self.index,
            "kind": kind,
            "name": name,
            "location": step.location,
            "branch": branch.path,
        }
        self.run.num_calls_started += 1
        call_site.set(f"{self.run.program}:{branch.path}#{branch.num_calls}")
        current_call.set(self)
        branch.num_calls += 1
        self.record: CallRecord | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.fail(error)

    def close(self, error: str | None = None) -> CallRecord:
        """Make the record and tell of it."""
        record = CallRecord(**self.fields, seconds=self.run.clock() - self.started, error=error)
        self.record = record
        self.run.calls.append(record)
        if self.run.listener is not None:
            self.run.listener(CallDone(record))
        return record

    def fail(self, error: BaseException) -> None:
        """Make the record of a call that failed, unless there is one."""
        if self.record is None:
            self.close(summary(error))


class Teller:
    """Tell a stream's reader of the text of a gen as it comes.

    With several samples each tells of its own branch, and the first of the gen's branch too, which goes on with it.

    Args:
        num_hidden: how many characters of each sample's start the transcript has already.
    """

    def __init__(self, branch: Branch, step: Step, *, num_hidden: int) -> None:
        self._listener = branch.run.listener
        self._name = step.node.name if isinstance(step.node, Call) else None
        self._paths = [[child.path] for child, _ in step.samples] or [[]]
        self._paths[0].insert(0, branch.path)
        self._hidden = [num_hidden] * len(self._paths)

    def __call__(self, chunk: OutputChunk) -> None:
        index = chunk.sample_index
        text = chunk.text[self._hidden[index] :]
        self._hidden[index] -= len(chunk.text) - len(text)
        if text and self._listener is not None:
            for path in self._paths[index]:
                self._listener(TextDelta(path, text, self._name, is_generated=True))


async def send(
    request: GenerateRequest,
    run: ProgramRun,
    limits: CallLimits,
    on_chunk: Callable[[OutputChunk], None],
) -> GenerationOutput:
    """Run a request within the limits of its call and its program.

    Args:
        on_chunk: told of every chunk when somebody streams the program.
    Raises:
        DeadlineExceeded, BudgetExceeded: a limit was reached. Exception: what the backend raised.
    """
    if run.is_unlimited and run.listener is None and limits.is_none:
        return await run.backend.generate(request)
    sending = _Sending(run, _retry(run, limits), on_chunk)
    return await timed(run, limits, lambda: sending.within_budget(request))


async def within(run: ProgramRun, limits: CallLimits, work: Callable[[], Awaitable[T]]) -> T:
    """Do other work of a call within its time, again after transient errors."""
    if run.is_unlimited and limits.is_none:
        return await work()
    retry = _retry(run, limits)
    return await timed(run, limits, lambda: _tried(run, retry, work, lambda: False))


class _Sending:
    """One request on its way: what it may write, and whether any of its text was shown."""

    def __init__(self, run: ProgramRun, retry: Retry | None, on_chunk: Callable[[OutputChunk], None]) -> None:
        self._run = run
        self._retry = retry
        self._on_chunk = on_chunk
        self._is_shown = False

    async def within_budget(self, request: GenerateRequest) -> GenerationOutput:
        budget = self._run.budget
        if budget.is_endless:
            return await self._tried(request)
        sampling = request.sampling
        granted = await budget.reserve(sampling.max_tokens * sampling.n)
        num_written = granted  # a request that fails may have written all of it
        try:
            max_tokens = granted // sampling.n
            if max_tokens < max(sampling.min_tokens, 1):
                num_written = 0
                raise BudgetExceeded(f"the program's token_budget has {granted} tokens left")
            output = await self._tried(replace(request, sampling=replace(sampling, max_tokens=max_tokens)))
            num_written = sum(len(sample.token_ids) for sample in output.samples)
        finally:
            budget.settle(granted, num_written)
        return output

    async def _tried(self, request: GenerateRequest) -> GenerationOutput:
        return await _tried(self._run, self._retry, lambda: self._once(request), lambda: self._is_shown)

    async def _once(self, request: GenerateRequest) -> GenerationOutput:
        if self._run.listener is None:
            return await self._run.backend.generate(request)
        collector = OutputCollector(request.prompt_ids, num_samples=request.sampling.n)
        async with aclosing(self._run.backend.stream(request)) as chunks:
            async for chunk in chunks:
                collector.add(chunk)
                self._is_shown = self._is_shown or bool(chunk.text)
                self._on_chunk(chunk)
        return collector.output()


def _retry(run: ProgramRun, limits: CallLimits) -> Retry | None:
    """Give how often a call is sent again; raises InvalidRequest when it asks for what cannot be."""
    retry = limits.retry or run.limits.retry
    if retry is not None and retry.times and not run.backend.transient_errors:
        raise InvalidRequest(
            "retries needs a runtime whose calls can be sent again; the calls of this one fail for good",
            parameter="retries",
            value=retry.times,
        )
    return retry


async def timed(run: ProgramRun, limits: CallLimits, work: Callable[[], Awaitable[T]]) -> T:
    """Do all of a call's work, waiting and trying again included, within its time.

    Raises:
        DeadlineExceeded: it took longer.
    """
    run.deadline.check()
    left_s = run.deadline.left_s(limits.timeout_s)
    if left_s is None:
        return await work()
    try:
        async with asyncio.timeout(left_s) as timer:
            return await work()
    except TimeoutError as error:
        if not timer.expired():
            raise
        whose = "call" if limits.timeout_s is not None and left_s >= limits.timeout_s else "program"
        raise DeadlineExceeded(f"the {whose}'s timeout_s is over") from error


async def _tried(
    run: ProgramRun, retry: Retry | None, work: Callable[[], Awaitable[T]], is_final: Callable[[], bool]
) -> T:
    """Do work, again after transient errors unless it is final by then (its text was shown)."""
    for index in range(0 if retry is None else retry.times):
        try:
            return await work()
        except run.backend.transient_errors:
            if is_final():
                raise
        if retry is not None:
            await asyncio.sleep(retry.pause_s(index))
    return await work()
