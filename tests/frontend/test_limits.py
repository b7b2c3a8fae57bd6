"""Deadlines, token budgets and retries: what is over is told at its line, and nothing is left running."""

import asyncio
import time

import pytest

from frontend_lang import BudgetExceeded, Err, ProgramError, Retry, gen, program, select
from radixrt import DeadlineExceeded, EngineStopped, InvalidRequest
from tests.support.backends import ScriptedBackend
from tests.support.places import place

pytestmark = pytest.mark.timeout(60)


class Hiccup(Exception):
    """A failure on the way to a remote runtime."""


@program
def two(s):
    s += "start " + gen("a", max_tokens=8)
    s += gen("b", max_tokens=8)
    return s["b"]


# -- deadlines --------------------------------------------------------------------------------------------------


def test_a_call_that_takes_too_long_fails_at_its_line():
    @program
    def slow(s):
        s += "Q" + gen("x", timeout_s=0.05)
        return s["x"]

    backend = ScriptedBackend(delay_s=30)
    with pytest.raises(ProgramError, match=r'gen\("x"\) failed at .*DeadlineExceeded: the call') as caught:
        slow.with_options(backend=backend).run()
    assert caught.value.location == place(slow, 'gen("x"')
    assert caught.value.prompt == "Q"
    assert isinstance(caught.value.__cause__, DeadlineExceeded)
    assert (backend.aborted, backend.running) == (1, 0)


def test_a_select_has_a_timeout_too():
    @program
    def slow(s):
        s += "Q" + select("x", ["a", "b"], timeout_s=0.05)

    with pytest.raises(ProgramError, match=r'select\("x"\) failed at .*DeadlineExceeded'):
        slow.with_options(backend=ScriptedBackend(delay_s=30)).run()


def test_after_the_programs_deadline_every_call_fails_at_its_line():
    @program
    def many(s):
        branches = s.fork(3)
        branches += gen("x")
        outcomes = list(branches.join())
        late = s.fork(1)[0]
        late += gen("y")
        with pytest.raises(ProgramError, match=r'gen\("y"\) failed at .*DeadlineExceeded'):
            late["y"]
        return outcomes

    backend = ScriptedBackend(delay_s=30)
    started = time.monotonic()
    # So long may all three take to begin.
    outcomes = many.with_options(backend=backend, timeout_s=1).run().value
    assert time.monotonic() - started < 25
    assert all(isinstance(outcome, Err) for outcome in outcomes)
    assert all(isinstance(outcome.error.__cause__, DeadlineExceeded) for outcome in outcomes)
    assert "the program's timeout_s" in str(outcomes[0].error)
    assert (backend.num_calls, backend.aborted, backend.running) == (3, 3, 0)
    with pytest.raises(ProgramError, match=r'gen\("a"\) failed at .*DeadlineExceeded'):
        two.with_options(backend=backend, timeout_s=0.05).run()


def test_a_program_that_does_not_end_after_its_deadline_is_cancelled():
    @program
    async def stuck(s):
        await asyncio.sleep(30)

    @program
    async def own_timeout(s):
        raise TimeoutError("mine")

    with pytest.raises(ProgramError, match='"stuck" still ran 1 s after its timeout_s') as caught:
        stuck.with_options(backend=ScriptedBackend(), timeout_s=0.05).run()
    assert isinstance(caught.value.__cause__, DeadlineExceeded)
    with pytest.raises(TimeoutError, match="mine"):
        own_timeout.with_options(backend=ScriptedBackend(), timeout_s=5).run()


def test_a_program_inside_another_has_no_more_time_than_it():
    @program
    def inner(s):
        s += gen("x")
        return s["x"]

    @program
    def outer(s, timeout_s):
        return inner.with_options(timeout_s=timeout_s).run().value

    for timeout_s in (None, 60, 0.02):
        with pytest.raises(ProgramError, match='in program "inner": DeadlineExceeded'):
            outer.with_options(backend=ScriptedBackend(delay_s=30), timeout_s=0.05).run(timeout_s)


# -- budgets ------------------------------------------------------------------------------------------------------


def test_a_budget_cuts_the_last_call_and_refuses_the_next():
    backend = ScriptedBackend(["12345", "12345"])
    result = two.with_options(backend=backend, token_budget=9).run()
    assert result["a"] == "12345"  # and an end: 6 tokens
    assert result["b"] == "123"
    assert [request.sampling.max_tokens for request in backend.requests] == [8, 3]

    backend = ScriptedBackend(["12345678"])
    with pytest.raises(ProgramError, match=r'gen\("b"\) failed at .*BudgetExceeded') as caught:
        two.with_options(backend=backend, token_budget=8).run()
    assert caught.value.location == place(two, 'gen("b"')
    assert isinstance(caught.value.__cause__, BudgetExceeded)
    assert backend.num_calls == 1


def test_branches_that_run_at_once_never_write_more_than_the_budget():
    @program
    def forked(s):
        branches = s.fork(5)
        branches += gen("x", max_tokens=10)
        return list(branches.join())

    for budget in (10, 25, 35, 49, 50):
        backend = ScriptedBackend(["1234567"], delay_s=0.001, ends_with_eos=False)
        result = forked.with_options(backend=backend, token_budget=budget).run()
        written = sum(len(call.token_ids) for call in result.calls)
        assert written == min(budget, 35)
        assert all(outcome.is_ok for outcome in result.value) == (budget >= 29)


def test_a_failed_call_gives_its_reservation_back():
    @program
    def forked(s):
        first = s.fork(1)[0]
        first += gen("x", max_tokens=10)
        assert isinstance(first.error(), ProgramError)
        s += gen("y", max_tokens=10)
        return s["y"]

    backend = ScriptedBackend(["1234567890"], fail_at={0}, ends_with_eos=False)
    with pytest.raises(ProgramError, match="BudgetExceeded"):  # a failed call may have written all it could
        forked.with_options(backend=backend, token_budget=10).run()
    backend = ScriptedBackend(["1234567890"], fail_at={0}, ends_with_eos=False)
    assert forked.with_options(backend=backend, token_budget=15).run().value == "12345"


def test_a_program_inside_another_spends_its_budget():
    @program
    def inner(s):
        s += gen("x", max_tokens=6)
        return s["x"]

    @program
    def outer(s, budget):
        first = inner.with_options(token_budget=budget).run().value
        return first, inner.run().value

    backend = ScriptedBackend(["123456"], ends_with_eos=False)
    assert outer.with_options(backend=backend, token_budget=9).run(4).value == ("1234", "12345")
    with pytest.raises(ProgramError, match="BudgetExceeded"):
        outer.with_options(backend=backend, token_budget=6).run(None)


# -- retries --------------------------------------------------------------------------------------------------------


def test_transient_errors_are_tried_again_and_others_are_not():
    quick = Retry(2, wait_s=0.001)
    flaky = ScriptedBackend(["A"], fail_at={0, 1}, error=Hiccup("lost"), transient_errors=(Hiccup,))
    result = two.with_options(backend=flaky, retries=quick).run()
    assert (result["a"], flaky.num_calls) == ("A", 4)
    down = ScriptedBackend(fail_at=set(range(9)), error=Hiccup("lost"), transient_errors=(Hiccup,))
    with pytest.raises(ProgramError, match=r'gen\("a"\) failed at .*Hiccup: lost'):
        two.with_options(backend=down, retries=quick).run()
    assert down.num_calls == 3
    broken = ScriptedBackend(fail_at={0}, error=EngineStopped("gone"), transient_errors=(Hiccup,))
    with pytest.raises(ProgramError, match="EngineStopped: gone"):
        two.with_options(backend=broken, retries=quick).run()
    assert broken.num_calls == 1


def test_a_calls_own_retries_count_and_select_has_them():
    @program
    def own(s):
        s += "Q" + gen("x", retries=Retry(1, wait_s=0.001))
        s += select("y", ["a", "b"], retries=Retry(1, wait_s=0.001))
        s += gen("z", retries=0)

    flaky = ScriptedBackend(fail_at={0, 2, 4}, error=Hiccup("lost"), transient_errors=(Hiccup,))
    with pytest.raises(ProgramError, match=r'gen\("z"\) failed'):
        own.with_options(backend=flaky, retries=Retry(5, wait_s=0.001)).run()
    assert flaky.num_calls == 5


def test_retries_are_refused_where_nothing_is_tried_again():
    with pytest.raises(ProgramError, match="retries needs a runtime whose calls can be sent again"):
        two.with_options(backend=ScriptedBackend(), retries=2).run()
    for wrong in (-1, 1.5, True, 101):
        with pytest.raises(InvalidRequest, match="retries must be a whole number"):
            gen("x", retries=wrong)
    with pytest.raises(InvalidRequest, match="wait_s must be a number of seconds of at least 0"):
        Retry(1, wait_s=-1)
    assert [Retry(9, wait_s=1, max_wait_s=5).pause_s(index) for index in range(4)] == [1, 2, 4, 5]


def test_a_stream_is_not_tried_again_once_its_text_was_shown():
    class Breaking(ScriptedBackend):
        num_streams = 0

        async def stream(self, request):
            self.num_streams += 1
            is_first = self.num_streams == 1
            if is_first:
                raise Hiccup("before any text")
            async for chunk in super().stream(request):
                yield chunk
                raise Hiccup("in the middle")

    backend = Breaking(["abc"], transient_errors=(Hiccup,))
    stream = two.with_options(backend=backend, retries=Retry(3, wait_s=0.001)).stream()
    with pytest.raises(ProgramError, match="in the middle"):
        stream.result()
    assert backend.num_streams == 2


def test_limits_are_checked_where_they_are_written():
    for wrong in (0, -1, True, "1"):
        with pytest.raises(InvalidRequest, match="timeout_s must be a number of seconds above 0"):
            gen("x", timeout_s=wrong)
        with pytest.raises(InvalidRequest, match="timeout_s must be a number of seconds above 0"):
            two.with_options(timeout_s=wrong)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(InvalidRequest, match="token_budget must be a whole number of at least 1"):
            two.with_options(token_budget=wrong)


# -- scopes ---------------------------------------------------------------------------------------------------------


def test_every_branch_holds_a_scope_while_it_lives():
    @program
    def forked(s):
        s += "Q" + gen("a")
        branches = s.fork(3)
        branches += gen("b")
        assert len(backend.open_scopes) == 4 if branches[2]["b"] else False
        branches.join()
        assert len(backend.open_scopes) == 1
        s += select("c", ["x", "y"])

    backend = ScriptedBackend()
    forked.with_options(backend=backend).run()
    assert backend.num_scopes == 4
    assert backend.open_scopes == set()
    assert len({request.scope_id for request in backend.requests if request.label == "b"}) == 3


@pytest.mark.parametrize("index", range(4))
def test_no_scope_outlives_a_program_that_fails(index):
    @program
    def forked(s):
        s += "Q" + gen("a")
        branches = s.fork(2)
        branches += gen("b")
        s += gen("c")
        return s.text(), [branch.text() for branch in branches]

    backend = ScriptedBackend(fail_at={index})
    with pytest.raises(ProgramError):
        forked.with_options(backend=backend).run()
    assert backend.open_scopes == set()
