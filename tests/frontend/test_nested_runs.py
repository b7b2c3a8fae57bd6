"""Runs that a program starts are drawn where it started them, saved and replayed with it."""

import asyncio
import contextvars
import json
import random
import shutil
import threading

import pytest

from frontend_lang import ProgramError, Trace, assistant, gen, program, user
from frontend_lang.traces.tree import Called, Forked, Ran, Said, items
from radixrt import InvalidRequest
from tests.support.backends import ScriptedBackend

pytestmark = pytest.mark.timeout(60)


@program
def inner(s, text):
    s += f"<{text}>" + gen("x")
    return s["x"]


def kinds(trace, path="root"):
    """Give what stands in a branch, in a few words."""
    found = []
    for item in items(trace, trace.branch(path)):
        match item:
            case Said(segments=segments):
                found.append("".join(segment.text for segment in segments))
            case Called(record=call):
                found.append(call.name)
            case Forked(branches=branches):
                found.append([branch.path for branch in branches])
            case Ran(trace=ran):
                found.append((ran.program, ran.text()))
    return found


def traced(outer, *answers, **options):
    return outer.with_options(backend=ScriptedBackend(list(answers), **options)).trace()


def test_a_run_stands_where_it_was_started():
    @program
    def outer(s):
        s += "a" + gen("a")
        s += inner.run(s["a"]).value + "b"
        inner.run("end")

    trace = traced(outer, "1", "2", "3")
    assert kinds(trace) == ["a", "a", ("inner", "<1>2"), "2b", ("inner", "<end>3")]
    assert [call.name for call in trace.calls] == ["a"]
    assert [run.trace.calls[0].text for run in trace.nested] == ["2", "3"]


def test_what_is_still_queued_counts_as_before_it():
    @program
    def outer(s):
        s += "a" + gen("a") + "b" + gen("b")  # nobody waits for it
        inner.run("x")
        s += "c"

    backend = ScriptedBackend(lambda request, prompt: f"({len(prompt)})", delay_s=0.01)
    trace = outer.with_options(backend=backend).trace()
    assert [kind if isinstance(kind, str) else kind[0] for kind in kinds(trace)] == [
        "a",
        "a",
        "b",
        "b",
        "inner",
        "c",
    ]


def test_a_run_stands_in_the_branch_that_was_used_last():
    @program
    def outer(s):
        s += "a"
        inner.run("before")
        branches = s.fork(2)
        for branch in branches:
            branch += "b" + gen("b")
            branch += inner.run(branch["b"]).value
        branches.join()
        inner.run("after")
        s.fork(1)[0].text()

    trace = traced(outer, "ok")
    root = kinds(trace)
    assert [kind if isinstance(kind, list | str) else kind[1] for kind in root] == [
        "a",
        "<before>ok",
        ["root/0", "root/1"],
        "<after>ok",
        ["root/2"],
    ]
    for path in ("root/0", "root/1"):
        assert kinds(trace, path) == ["b", "b", ("inner", "<ok>ok"), "ok"]


def test_async_runs_stand_in_their_own_branches():
    @program
    async def outer(s):
        branches = s.fork(3)

        async def think(index):
            branch = branches[index]
            branch += f"{index}" + gen("b")
            await inner.arun(index if not await branch.value("b") else f"of {index}")
            branch += "!"

        await asyncio.gather(*[think(index) for index in range(3)])

    backend = ScriptedBackend(["ok"], delay_s=0.005)
    trace = asyncio.run(outer.with_options(backend=backend).atrace())
    for index in range(3):
        expected = [f"{index}", "b", ("inner", f"<of {index}>ok"), "!"]
        assert kinds(trace, f"root/{index}") == expected


def test_mapped_runs_are_all_there_in_order():
    @program
    def outer(s):
        s += "a"
        return [outcome.unwrap().value for outcome in inner.map([(number,) for number in range(5)])]

    trace = traced(outer, "ok")
    assert kinds(trace) == ["a", *[("inner", f"<{number}>ok") for number in range(5)]]


def test_runs_of_a_tool_stand_behind_its_call():
    def look_up(key: str) -> str:
        """Look something up."""
        return inner.run(key).value

    async def find(key: str) -> str:
        """Find something."""
        return (await inner.arun(key)).value

    @program
    def outer(s):
        s += user("first") + assistant(gen("a", tools=[look_up]))
        s += user("second") + assistant(gen("b", tools=[find]))

    def answer(request, prompt):
        if prompt.startswith("<"):
            return "found"
        name = "find" if "second" in prompt else "look_up"
        return f'{{"name": "{name}", "arguments": {{"key": "k"}}}}'

    trace = outer.with_options(backend=ScriptedBackend(answer)).trace()
    assert trace.error is None
    order = [kind for kind in kinds(trace) if kind in ("a", "b") or isinstance(kind, tuple)]
    assert order == ["a", ("inner", "<k>found"), "b", ("inner", "<k>found")]


def test_runs_inside_runs_are_drawn_inside():
    @program
    def deep(s, depth):
        s += f"{depth}" + gen("x")
        if depth:
            deep.run(depth - 1)

    trace = deep.with_options(backend=ScriptedBackend()).trace(5)
    seen = []
    while trace.nested:
        seen.append(trace.text())
        (run,) = trace.nested
        trace = run.trace
    assert [*seen, trace.text()] == ["5ok", "4ok", "3ok", "2ok", "1ok", "0ok"]


def test_a_run_that_fails_is_drawn_with_its_failure_wherever_it_is_handled():
    @program
    def outer(s):
        s += "a" + gen("a")
        try:
            inner.run("x")
        except ProgramError:
            s += "handled"

    trace = traced(outer, "ok", fail_at={1})
    assert trace.error is None
    (run,) = trace.nested
    assert "EngineStopped" in run.trace.error
    text = str(trace)
    assert "run inner: 1 call" in text
    assert "EngineStopped: the engine died" in text
    assert kinds(trace)[-1] == "handled"


def test_a_run_that_is_cancelled_with_its_caller_is_drawn():
    @program
    async def outer(s):
        s += "a"
        await inner.arun("x")

    backend = ScriptedBackend(delay_s=30)
    trace = asyncio.run(outer.with_options(backend=backend, timeout_s=0.5).atrace())
    assert "DeadlineExceeded" in trace.error
    assert [run.trace.text() for run in trace.nested] == ["<x>"]
    assert backend.running == 0


def test_a_run_of_a_thread_is_drawn_and_one_that_begins_after_the_end_is_not():
    contexts = []

    @program
    def outer(s):
        s += "a"
        s.sync()
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(inner.run, "thread"))
        thread.start()
        thread.join()
        contexts.append(contextvars.copy_context())

    result = outer.with_options(backend=ScriptedBackend()).run()
    assert kinds(result.trace) == ["a", ("inner", "<thread>ok")]
    contexts[0].run(inner.with_options(backend=ScriptedBackend()).run, "late")
    assert len(result.trace.nested) == 1


@program
def outer_of_two(s):
    s += user("a") + assistant(gen("a"))
    branches = s.fork(2)
    for branch in branches:
        branch += user("b") + assistant(gen("b"))
        branch += user(inner.run(branch["b"]).value)
    return [branch.text() for branch in branches]


def test_messages_calls_and_usage_are_the_programs_own():
    result = outer_of_two.with_options(backend=ScriptedBackend(["1", "2", "3", "4", "5"])).run()
    trace = result.trace
    assert trace.messages() == result.messages()
    assert "".join(message["content"] for message in trace.messages("root/0")).count("<") == 0
    assert trace.calls == result.calls
    assert trace.usage == result.usage
    assert len(trace.nested) == 2


def test_a_saved_trace_has_them_and_replays_to_the_bit(tmp_path):
    result = outer_of_two.with_options(backend=ScriptedBackend(["1", "2", "3", "4", "5"])).run()
    result.trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert loaded == result.trace
    assert (str(loaded), loaded.html()) == (str(result.trace), result.trace.html())
    again = outer_of_two.with_options(backend=loaded.replay()).run()
    assert again.value == result.value
    for path in ("root", "root/0", "root/1"):
        assert kinds(again.trace, path) == kinds(result.trace, path)
    inside = loaded.nested[0].trace
    assert inner.with_options(backend=inside.replay()).run(loaded.calls[1].text).value == inside.calls[0].text


def test_the_tree_draws_them_with_their_counts():
    trace = outer_of_two.with_options(backend=ScriptedBackend(["1", "2", "3", "4", "5"])).run().trace
    lines = str(trace).splitlines()
    runs = [place for place, line in enumerate(lines) if "run inner: 1 call, prompt" in line]
    assert len(runs) == 2
    for place in runs:
        below = lines[place + 1 : place + 4]
        assert "'<" in below[0]
        assert "gen x" in below[1]
        margin = lines[place].index("run inner")
        assert all(line[:margin].strip("│ ") == "" for line in below[:2])


def test_a_browser_shows_them_inside_their_branches(tmp_path):
    trace = outer_of_two.with_options(backend=ScriptedBackend(["1", "2", "3", "4", "5"])).run().trace
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    (tmp_path / "trace.html").write_text(trace.html(), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto((tmp_path / "trace.html").as_uri())
        for index, run in enumerate(trace.nested):
            shown = page.locator(f"[data-branch='root/{index}'] > .run[data-run='inner']")
            assert shown.count() == 1
            assert shown.locator(".written").inner_text() == run.trace.calls[0].text
            count = shown.locator("summary [data-count=prompt]").first.inner_text()
            assert count == f"prompt {run.trace.usage.prompt_tokens}"
        assert page.locator(".num-calls").inner_text() == "3"
        browser.close()


def places_in(value, path=()):
    """Give the path of every value in plain data."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places_in(part, (*path, key))


@pytest.mark.parametrize("seed", range(8))
def test_a_saved_trace_that_was_tampered_with_is_refused_when_loaded_or_can_be_shown(tmp_path, seed):
    @program
    def outer(s):
        s += "a" + gen("a")
        inner.run("x")
        for branch in (branches := s.fork(2)):
            branch += "b" + gen("b")
        branches.join()

    traced(outer, "1", "2", "3", "4").save(tmp_path / "run.json")
    text, chance, num_refused = (tmp_path / "run.json").read_text(), random.Random(seed), 0
    told = {key: value for key, value in json.loads(text).items() if key != "recording"}
    values = [None, -1, 0, 1, 10**30, "", "root", "root/0/0", "/", "nope", [], {}, 1.5]
    for _ in range(60):
        data = json.loads(text)
        *way, last = chance.choice(list(places_in(told)))
        part = data
        for key in way:
            part = part[key]
        if chance.random() < 0.2:
            del part[last]
        else:
            part[last] = chance.choice(values)
        (tmp_path / "other.json").write_text(json.dumps(data))
        try:
            trace = Trace.load(tmp_path / "other.json")
        except InvalidRequest:
            num_refused += 1
            continue
        assert str(trace)
        assert trace.html()
        assert [trace.text(branch.path) for branch in trace.branches]
        for call in trace.calls:
            assert trace.sent(call.index)
            assert trace.times(call.index).total_s == call.seconds
    assert 0 < num_refused < 60


@program
def down(s, depth):
    s += f"{depth}" + gen("x")
    if depth:
        for _ in range(1 + (depth == 2)):
            down.run(depth - 1)


@pytest.mark.parametrize("depth", [3, 120])  # JSON's readers here take some 200 levels
def test_what_was_saved_can_be_loaded_however_deep_runs_are(tmp_path, depth):
    trace = down.with_options(backend=ScriptedBackend()).trace(depth)
    trace.save(tmp_path / "run.json")
    loaded = Trace.load(tmp_path / "run.json")
    assert (str(loaded), loaded.html()) == (str(trace), trace.html())
    replayed = down.with_options(backend=loaded.replay()).trace(depth)
    assert replayed.error is None
    data = json.loads((tmp_path / "run.json").read_text())
    data["runs"][1]["parent"] = 1
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(InvalidRequest, match="after its parent"):
        Trace.load(tmp_path / "run.json")
