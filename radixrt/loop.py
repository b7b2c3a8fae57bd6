"""EngineLoop: the thread that runs plan, forward, commit and delivery, step after step.

With overlap, a step is planned and launched before the one before it is collected and committed. This is the only
place that knows of the order:

    overlap off   plan k, launch k, sample k, collect k, commit k, deliver k, plan k + 1, ...
    overlap on    plan k + 1, launch k + 1, collect k, commit k, deliver k, sample k + 1, plan k + 2, ...

What is delivered to event loops lies in their mailboxes until they are woken: once for all of a step, where this thread
lets go of the interpreter anyway. That is before a launch that is the forward pass itself, else between launch and
collect; also before the thread rests, and at its end.

The thread owns scheduler, cache, sequences and store. Others reach them through the inbox: a submission, an abort
or a question is a call that the thread makes between two steps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from radixrt.delivery import Delivery
from radixrt.errors import (
    DeviceError,
    EngineStopped,
    InvariantViolation,
    QueueFull,
    RequestAborted,
    first_line,
)
from radixrt.exec.runner import Runner
from radixrt.grammar.counters import CompileStats
from radixrt.kv.cache import PrefixCache, PrefixExplanation
from radixrt.mailbox import Mailbox
from radixrt.metrics import EngineMetrics, EngineStats
from radixrt.sched.latency import load_of
from radixrt.sched.plan import SequenceUpdate, StepPlan, StepResult
from radixrt.sched.scheduler import Scheduler
from radixrt.types import FinishReason, Namespace

logger = logging.getLogger("radixrt")
T = TypeVar("T")
IDLE_CHECK_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted request.

    Attributes:
        request_id: made by the engine, unique in it.
        abort: ends the request; its reader gets RequestAborted. Does nothing when the request is done.
    """

    request_id: int
    abort: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """An open scope; a context manager.

    Attributes:
        scope_id: made by the engine, unique in it.
    """

    scope_id: int
    loop: EngineLoop = field(repr=False)

    def belongs_to(self, loop: EngineLoop) -> bool:
        """Tell whether this engine's loop opened it."""
        return self.loop is loop

    def close(self) -> None:
        """Let go of the prefixes at once. Does nothing the second time, or when the engine is closed."""
        self.loop.close_scope(self.scope_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class Launched:
    """A step that is launched and not committed.

    Attributes:
        plan: what of it counts.
        planned_s: when it was planned.
        step: as the runner keeps it.
        result: once collected.
    """

    plan: StepPlan
    planned_s: float
    step: Any = None
    result: StepResult | None = None


class EngineLoop:
    """Own the thread. Invariant: every delivery in `_deliveries` gets exactly one last item.

    Args:
        overlap: plan and launch a step while the one before is still under way; the runner must be able to.
    """

    def __init__(
        self,
        runner: Runner[Any],
        cache: PrefixCache,
        scheduler: Scheduler,
        *,
        overlap: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._runner = runner
        self._overlap = overlap
        self._launched: Launched | None = None
        self._last_end_s = 0.0  # when the last step was done
        self._cache = cache
        self._scheduler = scheduler
        self._metrics = EngineMetrics()
        self._deliveries: dict[int, Delivery] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._posted: list[Mailbox] = []  # those that have something, not yet woken
        self._process_id = os.getpid()
        self._wake = threading.Condition()
        self._is_closing = False
        self._cause: BaseException | None = None  # why the loop died
        self._num_open = 0  # sequences submitted and not finished
        self._request_ids = itertools.count()
        self._scope_ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="radixrt-engine", daemon=True)
        self._thread.start()

    # -- called from any thread -------------------------------------------------------------------------

    def submit(self, delivery: Delivery) -> Ticket:
        """Start a request's sequences.

        Raises:
            QueueFull: max_waiting more sequences than can run are open already.
            EngineStopped: the loop is closed or died.
        """
        num_sequences = len(delivery.sequences)
        with self._wake:
            limit = self._scheduler.config.max_waiting + self._scheduler.config.max_running
            if self._num_open + num_sequences > limit:
                raise QueueFull(
                    f"at most {limit} sequences may run or wait, {self._num_open} do",
                    parameter="max_waiting",
                    value=self._num_open,
                )
            request_id = next(self._request_ids)
            self._post(lambda: self._begin(request_id, delivery))
            self._num_open += num_sequences
        return Ticket(request_id, lambda: self._abort_later(request_id))

    def ask(self, question: Callable[[], T]) -> T:
        """Run a call in the loop's thread, between two steps (at once when called there), and give its answer."""
        if self.is_own_thread:
            return question()
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(question())
            except BaseException as error:  # noqa: BLE001 - handed to the one who asked
                future.set_exception(error)

        with self._wake:
            self._post(answer)
        return future.result()

    @property
    def is_own_thread(self) -> bool:
        """Tell whether the caller runs in the loop's thread, e.g. in a deliver callback."""
        return threading.current_thread() is self._thread

    @property
    def is_running(self) -> bool:
        """Tell whether requests are taken: neither closed nor dead. Never waits."""
        return not self._is_closing

    def stats(self, compilations: CompileStats) -> EngineStats:
        """Give the counters, with those of the cache of compiled constraints."""
        return self.ask(lambda: self._metrics.stats(self._scheduler, self._cache, compilations))

    def explain(self, namespace: Namespace, token_ids: tuple[int, ...]) -> tuple[PrefixExplanation, float]:
        """Give the cache's explanation of a prompt, and the time."""
        return self.ask(lambda: (self._cache.explain(namespace, token_ids), self._clock()))

    def open_scope(self, ttl_s: float) -> Scope:
        """Begin a scope that keeps the prefixes of its requests."""
        scope_id = next(self._scope_ids)
        with self._wake:
            self._post(lambda: self._cache.scopes.open(scope_id, ttl_s=ttl_s, now_s=self._clock()))
        return Scope(scope_id, self)

    def close_scope(self, scope_id: int) -> None:
        """Let go of a scope's prefixes; fine when the engine is closed."""
        with self._wake:
            if not self._is_closing and self._process_id == os.getpid():
                self._post(lambda: self._cache.scopes.close(scope_id))

    def check(self) -> None:
        """Raise InvariantViolation unless every owner's invariants hold."""
        self.ask(self._check)

    def mailbox(self) -> Mailbox:
        """Give the running event loop's mailbox: all that a step gives to its readers wakes the loop once."""
        loop = asyncio.get_running_loop()
        found = self._mailboxes.get(loop)
        if found is None:
            found = Mailbox(loop, self._posted.append)
            with self._wake:
                is_open = {known: item for known, item in self._mailboxes.items() if not known.is_closed()}
                self._mailboxes = {**is_open, loop: found}
        return found

    def close(self) -> None:
        """Stop the thread and wait for it; whoever still waits gets EngineStopped."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if not self.is_own_thread:
            self._thread.join()

    def _post(self, call: Callable[[], None]) -> None:
        """Put a call into the inbox (the lock is held)."""
        if self._process_id != os.getpid():
            raise EngineStopped("the engine belongs to the process that opened it, not to this fork of it")
        if self._is_closing:
            reason = f": {first_line(self._cause)}" if self._cause else ""
            raise EngineStopped(f"the engine is stopped{reason}") from self._cause
        self._inbox.append(call)
        self._wake.notify()

    def _abort_later(self, request_id: int) -> None:
        with self._wake:
            if not self._is_closing and self._process_id == os.getpid():
                self._post(lambda: self._abort(request_id))

    # -- the loop's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_calls():
                if self._has_steps:
                    self._step()
        except BaseException as error:
            self._cause = error
            logger.critical("the engine stopped: %s", first_line(error), exc_info=error)
        self._end()
        self._runner.close()

    @property
    def _has_steps(self) -> bool:
        return self._launched is not None or not self._scheduler.is_idle

    def _take_calls(self) -> bool:
        """Wait for work, make the calls of the inbox; give False when the loop shall end."""
        if not self._has_steps:
            self._wake_readers()
        if self._rest():
            self._check()
        with self._wake:
            while not (self._inbox or self._is_closing or self._has_steps):
                self._wake.wait()
            num_calls, is_closing = len(self._inbox), self._is_closing
        for _ in range(num_calls):
            self._inbox.popleft()()  # one by one: if one raises, the others still wait to be told
        return not is_closing

    def _rest(self) -> bool:
        """Wait a while for work; tell whether there was none."""
        with self._wake:
            has_work = self._inbox or self._is_closing or self._has_steps
            return not has_work and not self._wake.wait(IDLE_CHECK_DELAY_S)

    def _step(self) -> None:
        started = self._clock()
        for update in self._scheduler.expire(started):
            self._deliver(update)
        before, plan = self._launched, self._scheduler.plan(started)
        if not (plan.chunks or plan.preempted or before or self._scheduler.is_idle):
            raise InvariantViolation("sequences wait, nothing runs and nothing can be admitted")
        launched = Launched(plan, planned_s=started)
        if before is None:
            self._wake_readers()  # the launch may be the whole forward pass
        goes_on = bool(plan.chunks) and self._attempt(launched, self._launch)
        if before is not None:
            self._wake_readers()  # the device is busy, and now it is waited for
            self._complete(before)
            launched.plan = self._scheduler.settle(plan)
        goes_on = goes_on and self._attempt(launched, self._sample)
        self._launched = launched if goes_on else None
        if self._launched is not None and not self._overlap:
            self._launched = None
            self._complete(launched)
        if self._scheduler.config.checks == "step":
            self._check()

    def _wake_readers(self) -> None:
        """Wake the event loops that have post; called where this thread leaves the interpreter to others for a while."""
        while self._posted:
            self._posted.pop().wake()

    def _launch(self, launched: Launched) -> None:
        launched.step = self._runner.launch(launched.plan)

    def _sample(self, launched: Launched) -> None:
        self._runner.sample(launched.step, launched.plan)

    def _collect(self, launched: Launched) -> None:
        launched.result = self._runner.collect(launched.step)

    def _attempt(self, launched: Launched, work: Callable[[Launched], None]) -> bool:
        """Let the runner do its part of a step; a failure ends the step's sequences only, and the pages are audited."""
        try:
            work(launched)
        except InvariantViolation:
            raise
        except Exception as error:
            logger.error("a step failed: %s", first_line(error), exc_info=error)
            failure = DeviceError(f"the step failed: {first_line(error)}")
            failure.__cause__ = error
            for update in self._scheduler.fail(launched.plan, failure):
                self._deliver(update)
            self._check()
            return False
        return True

    def _complete(self, launched: Launched) -> None:
        """Wait for a step, commit it and deliver what it gave."""
        plan = launched.plan
        if self._attempt(launched, self._collect):
            assert launched.result is not None
            self._metrics.observe_masks(launched.result)
            for update in self._scheduler.commit(plan, launched.result):
                self._deliver(update)
        # With overlap, a step begins when the one before is done.
        started, self._last_end_s = max(launched.planned_s, self._last_end_s), self._clock()
        seconds = self._last_end_s - started
        self._scheduler.observe(*load_of(plan.chunks), seconds)
        self._metrics.observe_step(plan, started_s=launched.planned_s, seconds=seconds)

    def _deliver(self, update: SequenceUpdate) -> None:
        if update.finish_reason is not None or update.error is not None:
            self._metrics.observe_end(update)
        request_id = update.sequence.request_id
        delivery = self._deliveries.get(request_id)
        if delivery is None:
            return  # another sample of the request failed in this step
        if update.error is not None:
            self._close_request(request_id, update.error)
            return
        try:
            chunk = delivery.chunk(update)
        except BaseException as error:  # noqa: BLE001 - for the one who waits
            self._close_request(request_id, error)
            return
        if chunk.finish_reason is not None:
            self._scheduler.finish(update.sequence, chunk.finish_reason)
        if chunk.usage is not None:  # the last: whoever has it may ask the next question at once
            self._metrics.observe_finish(delivery.request, chunk.usage)
            self._forget(request_id)
        try:
            delivery.hand(chunk)
        except BaseException as error:  # noqa: BLE001 - the reader's fault or absence
            logger.warning("a reader failed, its request is over: %s", first_line(error))
            delivery.is_done = True  # it is not called again
            if request_id in self._deliveries:
                self._close_request(request_id, error)

    def _begin(self, request_id: int, delivery: Delivery) -> None:
        self._deliveries[request_id] = delivery
        for sequence in delivery.sequences:
            sequence.request_id = request_id
            self._scheduler.add(sequence, self._clock())

    def _abort(self, request_id: int) -> None:
        if request_id in self._deliveries:
            self._close_request(request_id, RequestAborted("the request was aborted"))

    def _close_request(self, request_id: int, error: BaseException) -> None:
        """End all samples of a request and tell its reader why."""
        delivery = self._deliveries[request_id]
        for sequence in delivery.sequences:
            self._scheduler.finish(sequence, FinishReason.ABORT)
        self._forget(request_id)
        _tell(delivery, error)

    def _forget(self, request_id: int) -> None:
        delivery = self._deliveries.pop(request_id)
        with self._wake:
            self._num_open -= len(delivery.sequences)

    def _check(self) -> None:
        self._scheduler.check()
        self._runner.store.check()

    def _end(self) -> None:
        """Tell everyone who waits; nothing is accepted from here on, and the owners are left as they are."""
        with self._wake:
            self._is_closing = True
        stopped = EngineStopped("the engine was closed")
        if self._cause is not None:
            stopped = EngineStopped(f"the engine stopped: {first_line(self._cause)}")
            stopped.__cause__ = self._cause
        while self._inbox:
            call = self._inbox.popleft()
            try:
                call()  # submissions become deliveries, questions get their answers
            except BaseException as error:  # noqa: BLE001 - the next one still waits to be told
                logger.error("a call failed while the engine stopped: %s", first_line(error))
        for delivery in self._deliveries.values():
            _tell(delivery, stopped)
        self._deliveries.clear()
        self._wake_readers()


def _tell(delivery: Delivery, error: BaseException) -> None:
    """Give a reader its last item."""
    try:
        delivery.fail(error)
    except BaseException as failure:  # noqa: BLE001 - nobody is left to tell
        logger.warning("a reader could not be told of %r: %s", error, first_line(failure))
