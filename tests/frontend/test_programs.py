"""Programs as objects: running, binding, mapping, nesting, async."""

import asyncio
import functools
import sys
import threading

import pytest

from frontend_lang import ProgramError, State, function, gen, program, set_default_backend
from tests.support.backends import ScriptedBackend
from tests.support.threads import NewThreads

pytestmark = pytest.mark.timeout(60)


@program
def echo(s, q):
    """Echo a question."""
    s += q + gen("x")
    return s["x"]


def answering(*texts):
    return echo.with_options(backend=ScriptedBackend(texts))


def test_a_program_keeps_name_and_documentation_of_its_function():
    assert function is program
    assert (echo.__name__, echo.__doc__) == ("echo", "Echo a question.")
    assert echo.__wrapped__ is echo.function


def test_any_parameter_name_belongs_to_the_program():
    @program
    def greedy(s, n, stop, *, backend, engine, self, max_concurrency, name="x", **rest):
        return [n, stop, backend, engine, self, max_concurrency, name, rest]

    runner = greedy.with_options(backend=ScriptedBackend())
    given = {"n": 1, "stop": 2, "backend": 3, "engine": 4, "self": 5, "max_concurrency": 6, "temperature": 7}
    expected = [1, 2, 3, 4, 5, 6, "x", {"temperature": 7}]
    assert runner.run(**given).value == expected
    assert runner.map([given])[0].unwrap().value == expected
    assert runner.bind(**given).run().value == expected


def test_bind_keeps_settings_and_leaves_the_original_alone():
    given = {"q": "Q"}
    base = answering("a")
    bound = base.bind(**given)
    assert bound.run().text() == "Qa"
    assert bound.bind(q="R").run().text() == "Ra"
    assert base.bound == {}
    assert given == {"q": "Q"}


def test_a_generator_is_no_program():
    with pytest.raises(TypeError, match="generator function"):

        @program
        def odd(s):
            yield s


def test_options_make_a_new_program():
    base = answering("a")
    warm = base.with_options(temperature=0.5)
    assert base.sampling == {}
    assert warm.backend is base.backend
    with pytest.raises(TypeError, match="not both"):
        base.with_options(engine=object(), backend=ScriptedBackend())


def test_map_keeps_order_and_bounds_what_runs_at_a_time():
    backend = ScriptedBackend(lambda request, prompt: prompt.upper(), delay_s=0.002)
    outcomes = echo.with_options(backend=backend).map(({"q": q} for q in "abcdefgh"), max_concurrency=3)
    assert [outcome["x"] for outcome in outcomes] == list("ABCDEFGH")
    assert backend.most_running == 3
    assert echo.with_options(backend=backend).map([]) == []


def test_run_batch_reads_as_in_sglang_and_changes_nothing_of_the_caller():
    items = [{"q": "a"}, {"q": "b"}]
    states = answering("A", "B").run_batch(items, max_concurrency=1)
    assert [state["x"] for state in states] == ["A", "B"]
    assert states[1].text() == "bB"
    assert items == [{"q": "a"}, {"q": "b"}]


def test_a_wrong_item_is_found_before_anything_runs():
    backend = ScriptedBackend()
    for wrong in ({"quest": "a"}, (), "a", ["a"]):
        with pytest.raises(TypeError, match="echo: "):
            echo.with_options(backend=backend).map([{"q": "a"}, wrong])
    with pytest.raises(ValueError, match="max_concurrency"):
        echo.with_options(backend=backend).map([], max_concurrency=0)
    assert backend.num_calls == 0


def test_user_code_runs_exactly_once_per_item():
    seen = []

    @program
    def counted(s, table, key):
        seen.append(key)
        s += table[key] + gen("x")

    items = [{"table": {key: key}, "key": key} for key in "abc"]
    assert all(outcome.is_ok for outcome in counted.with_options(backend=ScriptedBackend()).map(items))
    assert sorted(seen) == ["a", "b", "c"]


def test_a_progress_bar_is_shown_when_asked_for_and_leaves_no_thread(capsys, monkeypatch):
    threads = NewThreads()
    answering("A").map([("a",)] * 3, progress=True)
    assert "echo: 100%" in capsys.readouterr().err
    assert not threads.names()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    answering("A").map([("a",)] * 3)
    answering("A").run("a")
    assert capsys.readouterr() == ("", "")


def test_a_program_called_with_a_state_is_part_of_the_caller():
    @program
    def outer(s):
        s += "outer "
        first = echo(s, "one ")
        second = echo.bind(q="two ")(s)
        return first + second, s["x"]

    result = outer.with_options(backend=ScriptedBackend(["a ", "b "])).run()
    assert result.value == ("a b ", "b ")
    assert result.text() == "outer one a two b "
    with pytest.raises(TypeError, match=r"takes a State first.*echo.run"):
        echo("q")


def test_a_program_run_inside_a_program_has_its_own_state_on_the_same_loop():
    threads = set()

    @program
    def inner(s, q):
        threads.add(threading.get_ident())
        s += q + gen("x")
        return s["x"]

    @program
    def outer(s):
        s += "outer" + gen("a")
        one = inner.run("one")
        many = inner.map([("two",), ("three",)])
        return one["x"], [outcome.text() for outcome in many]

    backend = ScriptedBackend(lambda request, prompt: prompt.upper())
    result = outer.with_options(backend=backend).run()
    assert result.value == ("ONE", ["twoTWO", "threeTHREE"])
    assert result.text() == "outerOUTER"
    assert threads == {threading.get_ident()}


def test_a_failure_of_an_inner_run_names_the_inner_program():
    @program
    def outer(s):
        return echo.run("q")["x"]

    with pytest.raises(ProgramError, match='program "echo"'):
        outer.with_options(backend=ScriptedBackend(fail_at={0})).run()


def test_calls_start_before_their_value_is_read():
    @program
    def busy(s):
        s += gen("a")
        assert backend.num_calls == 1
        branches = s.fork(2)
        branches += gen("b")

    backend = ScriptedBackend(delay_s=0.01)
    busy.with_options(backend=backend).run()
    assert backend.num_calls == 3


def test_appending_returns_at_once():
    @program
    def eager(s):
        s += gen("a")
        appended = backend.running
        s["a"]
        return appended, backend.running

    backend = ScriptedBackend(delay_s=0.01)
    assert eager.with_options(backend=backend).run().value == (1, 0)


def test_an_async_program_has_the_same_language():
    @program
    async def asynchronous(s: State, q: str):
        s += q + gen("a")
        with pytest.raises(ProgramError, match=r"await state.value\(\"a\"\)"):
            s["a"]
        with pytest.raises(ProgramError, match=r"await state.finished\(\)"):
            s.text()
        first = await s.value("a")
        branches = s.fork(2)
        branches += gen("b")
        outcomes = await branches.outcomes()
        s += gen("c")
        await s.finished()
        return first + s["a"] + "".join(outcome["b"] for outcome in outcomes) + s["c"] + s.text()

    backend = ScriptedBackend(list("abcd"), delay_s=0.001)
    assert asynchronous.with_options(backend=backend).run("q").value == "aabcd" + "qad"

    async def main():
        return await asynchronous.with_options(backend=ScriptedBackend(list("abcd"))).arun(q="q")

    assert asyncio.run(main())["c"] == "d"


def test_a_plain_program_calls_an_async_one():
    @program
    async def part(s, q):
        s += q + gen("a")
        return await s.value("a")

    @program
    def whole(s):
        return part(s, "p") + part.run("q").value

    backend = ScriptedBackend(lambda request, prompt: prompt.upper())
    assert whole.with_options(backend=backend).run().value == "PQ"


def test_a_cancelled_reader_leaves_the_call_alone():
    @program
    async def impatient(s):
        s += gen("a")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(s.value("a"), timeout=0.01)
        return await s.value("a")

    assert impatient.with_options(backend=ScriptedBackend(["A"], delay_s=0.05)).run().value == "A"


def test_run_works_inside_someone_elses_loop_and_leaves_no_thread():
    async def notebook():
        return answering("A").run("q"), answering("B").map([("q",)])

    threads = NewThreads()
    result, outcomes = asyncio.run(notebook())
    assert (result["x"], outcomes[0]["x"]) == ("A", "B")
    assert not threads.names()

    async def failing():
        echo.with_options(backend=ScriptedBackend(fail_at={0})).run("q")

    with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
        asyncio.run(failing())


def test_programs_can_run_in_several_threads_at_once():
    set_default_backend(ScriptedBackend(lambda request, prompt: prompt.upper(), delay_s=0.005))
    results = {}
    try:
        threads = [
            threading.Thread(target=lambda q=q: results.update({q: echo.run(q)["x"]})) for q in "abcdef"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        set_default_backend(None)
    assert results == {q: q.upper() for q in "abcdef"}


def test_a_result_tells_what_every_call_cost():
    @program
    def counted(s):
        s += "0123456789" + gen("a")
        s += gen("b")

    result = counted.with_options(backend=ScriptedBackend(["xyz"])).run()
    assert [(call.prompt_tokens, call.cached_tokens, call.output_tokens) for call in result.calls] == [
        (11, 10, 4),
        (14, 13, 4),
    ]
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (25, 8)
    assert result.calls[1].location.startswith(__file__)
    assert result.calls[1].finish_reason == "stop"
    lines = result.table().splitlines()
    assert lines[0].split() == [
        "call",
        "branch",
        "prompt",
        "cached",
        "computed",
        "forced",
        "output",
        "seconds",
    ]
    assert lines[1].split()[:5] == ["gen", "a", "root", "11", "10"]
    assert lines[-1].split()[:3] == ["total", "25", "23"]


def test_the_clock_is_the_programs():
    ticks = iter(range(100))
    timed = answering("a")
    timed = type(timed)(timed.function, timed.backend, clock=lambda: float(next(ticks)))
    assert timed.run("q").calls[0].seconds == 1.0


def test_an_async_program_behind_a_decorator_is_awaited():
    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    @program
    @logged
    async def one(s):
        s += gen("x")
        return await s.value("x")

    runner = one.with_options(backend=ScriptedBackend(["A"]))
    assert runner.run().value == "A"
    assert asyncio.run(runner.arun()).value == "A"
    assert [outcome.unwrap().value for outcome in runner.map([{}, {}])] == ["A", "A"]
