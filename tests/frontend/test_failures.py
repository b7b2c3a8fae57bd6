"""Every failure reaches its reader, with place and cause, and nothing hangs."""

import asyncio
import os
import re
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from frontend_lang import Err, Ok, ProgramError, gen, program
from frontend_lang.waiting import block_on
from radixrt import EngineStopped
from tests.support.backends import ScriptedBackend
from tests.support.places import place
from tests.support.threads import act_once

pytestmark = pytest.mark.timeout(60)


@program
def three(s):
    s += "start " + gen("a")
    s += gen("b")
    s += gen("c")
    return s.text()


def test_run_raises_the_cause_with_place_and_prompt():
    with pytest.raises(
        ProgramError, match=r'gen\("b"\) failed at .* in program "three": EngineStopped: the engine'
    ) as caught:
        three.with_options(backend=ScriptedBackend(["A"], fail_at={1})).run()
    error = caught.value
    assert error.location == place(three, 'gen("b")')
    assert (error.program, error.call, error.prompt) == ("three", "b", "start A")
    assert isinstance(error.__cause__, EngineStopped)


def test_run_raises_a_failure_that_nobody_read():
    @program
    def careless(s):
        s += gen("a")
        return "done"

    with pytest.raises(ProgramError, match=r'gen\("a"\) failed'):
        careless.with_options(backend=ScriptedBackend(fail_at={0})).run()


def test_reads_after_a_failure_raise_the_first_cause_and_appends_do_not_hang():
    seen = []

    @program
    def stubborn(s):
        s += gen("a") + gen("b")
        for read in (lambda: s["b"], lambda: s["b"], s.text, s.sync, s.token_ids, s.messages):
            with pytest.raises(ProgramError) as caught:
                read()
            seen.append(caught.value)
        s += "more" + gen("late")
        with pytest.raises(ProgramError, match=r'"late" has no value: gen\("b"\) failed'):
            s["late"]
        return s["a"]

    backend = ScriptedBackend(["A"], fail_at={1})
    result = stubborn.with_options(backend=backend).run()
    assert result.value == result["a"] == "A"  # what was there before the failure stays
    assert len(seen) == 6
    assert {error.call for error in seen} == {"b"}
    assert all(isinstance(error.__cause__, EngineStopped) for error in seen)
    assert backend.num_calls == 2
    with pytest.raises(ProgramError, match=r'gen\("b"\) failed'):
        result["b"]
    assert [call.error is None for call in result.calls] == [True, False]


def test_a_handled_failure_lets_the_program_go_on():
    @program
    def careful(s):
        s += gen("a")
        try:
            return s["a"]
        except ProgramError:
            return "fallback"

    assert careful.with_options(backend=ScriptedBackend(fail_at={0})).run().value == "fallback"


def test_the_users_own_exception_surfaces_with_its_type_and_place():
    @program
    def buggy(s):
        s += gen("a")
        return {}["missing"]

    backend = ScriptedBackend(delay_s=0.5)
    with pytest.raises(KeyError, match="missing") as caught:
        buggy.with_options(backend=backend).run()
    note = "".join(caught.value.__notes__)
    assert note == f'in program "buggy" ({place(buggy, "missing")})'
    assert backend.aborted == 1  # the call that still ran was cancelled


def test_an_exception_of_the_user_does_not_hide_a_failed_call():
    @program
    def both(s):
        s += gen("a")
        s.fork(1)[0].sync()
        raise RuntimeError("mine")

    @program
    def unread(s):
        s += gen("a")
        yield_once = s.fork(1)
        yield_once += gen("b")
        raise RuntimeError("mine")

    with pytest.raises(ProgramError):
        both.with_options(backend=ScriptedBackend(fail_at={0})).run()
    with pytest.raises(RuntimeError, match="mine") as caught:
        unread.with_options(backend=ScriptedBackend(fail_at={0})).run()
    assert any('gen("a") failed' in note for note in caught.value.__notes__)


def test_a_bad_argument_is_found_before_any_call():
    backend = ScriptedBackend()
    with pytest.raises(TypeError, match="three: got an unexpected keyword argument 'x'"):
        three.with_options(backend=backend).run(x=1)
    assert backend.num_calls == 0


def test_a_state_outlives_its_program_only_for_reading():
    @program
    def leaking(s):
        s += gen("a")
        return s

    state = leaking.with_options(backend=ScriptedBackend(["A"])).run().value
    assert state["a"] == state.text() == "A"
    with pytest.raises(ProgramError, match='program "leaking" has ended'):
        state += "more"


def test_a_state_is_not_for_other_threads():
    @program
    async def threaded(s):
        def append():
            nonlocal s
            s += "x"

        await asyncio.to_thread(append)

    with pytest.raises(ProgramError, match="outside the thread of its program"):
        threaded.with_options(backend=ScriptedBackend()).run()


def test_cancelling_a_run_aborts_its_calls_and_unwinds_the_function():
    unwound = []

    @program
    def slow(s):
        try:
            s += gen("a")
            s.fork(3).join()
            return s["a"]
        finally:
            unwound.append(True)

    backend = ScriptedBackend(delay_s=10)

    async def main():
        task = asyncio.ensure_future(slow.with_options(backend=backend).arun())
        while not backend.running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert unwound == [True]
    assert (backend.aborted, backend.running) == (1, 0)


def test_a_call_that_something_else_cancels_is_a_failure_too():
    def cancelled(request, prompt):
        raise asyncio.CancelledError

    with pytest.raises(
        ProgramError, match=r'gen\("a"\) failed at .*RequestAborted: gen\("a"\) was cancelled'
    ):
        three.with_options(backend=ScriptedBackend(cancelled)).run()


def test_control_c_ends_a_run_at_once_and_aborts_its_calls():
    @program
    def slow(s):
        s += gen("a")
        return s["a"]

    backend = ScriptedBackend(delay_s=60)
    pressing = act_once(lambda: backend.running, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        slow.with_options(backend=backend).run()
    pressing.join()
    assert (backend.aborted, backend.running) == (1, 0)


@contextmanager
def interrupts():
    """Give what presses Ctrl-C in this thread: a signal of its own, as others may wait for SIGINT."""
    thread = threading.get_ident()

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        yield lambda: signal.pthread_kill(thread, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_control_c_ends_a_run_inside_someone_elses_loop():
    backend = ScriptedBackend(delay_s=60)

    async def notebook():
        three.with_options(backend=backend).run()

    with interrupts() as press:
        pressing = act_once(lambda: backend.running, press)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(notebook())
        pressing.join()
    assert (backend.aborted, backend.running) == (1, 0)


def test_control_c_ends_a_run_that_has_not_yet_begun():
    has_come, goes_on = threading.Event(), threading.Event()

    def start():
        has_come.set()
        goes_on.wait(30)
        return asyncio.sleep(600)

    async def notebook():
        block_on(start)

    def press_early():
        press()
        time.sleep(0.2)  # the interrupt is taken while nothing runs that could be cancelled
        goes_on.set()

    with interrupts() as press:
        pressing = act_once(has_come.is_set, press_early)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(notebook())
        pressing.join()


@program
def branching(s):
    """Make 20 calls: 2 in the root, 3 forks of 4 with one call, 2 in the first, 2 after each join."""
    s += gen("a")
    s += gen("b")
    for _ in range(3):
        branches = s.fork(4)
        for branch in branches:
            branch += gen("c")
        s += "".join(branch["c"] for branch in branches)
        s += gen("d") + gen("e")
    return s.text()


@pytest.mark.parametrize("index", range(20))
@pytest.mark.parametrize("delay_s", [0.0, 0.001])
def test_a_backend_that_dies_at_any_call_gives_its_cause_and_line(index, delay_s):
    backend = ScriptedBackend(["x"], fail_at=set(range(index, 100)), delay_s=delay_s)
    with pytest.raises(ProgramError) as caught:
        branching.with_options(backend=backend).run()
    error = caught.value
    assert isinstance(error.__cause__, EngineStopped)
    assert backend.running == 0
    name = re.search(r'gen\("(\w)"\) failed', str(error))[1]
    round_index = (index - 2) % 6
    assert name == ("ab"[index] if index < 2 else "ccccde"[round_index])
    source = 'gen("d")' if name in "de" else f'gen("{name}")'
    assert error.location == place(branching, source)


def test_a_program_that_outlives_the_death_of_its_backend_never_hangs():
    @program
    def persistent(s):
        errors = 0
        for index in range(5):
            [branch] = s.fork(1)
            branch += gen(f"x{index}")
            try:
                branch.sync()
            except ProgramError:
                errors += 1
        return errors

    assert persistent.with_options(backend=ScriptedBackend(fail_at={1, 2, 3})).run().value == 3


def test_map_gives_each_item_its_own_outcome():
    @program
    def each(s, q):
        s += q + gen("x")

    backend = ScriptedBackend(lambda request, prompt: prompt.upper(), fail_at={1})
    outcomes = each.with_options(backend=backend).map([{"q": q} for q in "abc"], max_concurrency=1)
    assert [type(outcome) for outcome in outcomes] == [Ok, Err, Ok]
    assert outcomes[0]["x"] == "A"
    assert outcomes[2].text() == "cC"
    with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
        outcomes[1]["x"]
    with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
        outcomes[1].unwrap()


def test_map_fail_fast_raises_and_cancels_the_rest():
    @program
    def each(s, q):
        s += q + gen("x")
        return s["x"]

    backend = ScriptedBackend(fail_at={2}, delay_s=0.02)
    with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
        each.with_options(backend=backend).map([(q,) for q in "abcdefgh"], max_concurrency=3, fail_fast=True)
    assert backend.running == 0
    assert backend.num_calls < 8
