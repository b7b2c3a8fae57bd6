"""A trace tells what a run did: its tree, texts and counts, printed, saved and replayed."""

import asyncio
from html import escape

import pytest

from frontend_lang import (
    DryBackend,
    EngineBackend,
    NotRecorded,
    ProgramError,
    ReplayBackend,
    Trace,
    assistant,
    choice,
    decide,
    gen,
    predicate,
    program,
    select,
    set_default_backend,
    system,
    user,
)
from radixrt import Engine, InvalidRequest, TextPiece
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(120)


@program
def essay(s, topic):
    s += system("Short.") + user(f"About {topic}")
    branches = s.fork(2)
    for index, branch in enumerate(branches):
        branch += user(f"Tip {index}") + assistant("Tip: ", gen("tip", max_tokens=6))
        twigs = branch.fork(2)
        twigs += user("Why?") + assistant(gen("why", max_tokens=4))
    s += user(" ".join(branch["tip"] for branch in branches))
    s += assistant(gen("all", max_tokens=9, temperature=0, stop="e"), " ")
    s += select("verdict", choices=["good", "bad"])
    return s["verdict"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    with Engine(folder, dtype="float32", num_pages=600, page_size=4, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def result(engine):
    return essay.with_options(engine=engine).run("trees")


def test_every_prompt_of_a_trace_is_what_was_sent():
    backend = ScriptedBackend(["one", "two", "three"])
    trace = essay.with_options(backend=backend).run("trees").trace
    assert len({call.prompt_ids for call in trace.calls}) == 6
    for call in trace.calls:
        pieces = [TextPiece(trace.prompt(call.index), is_template=True)]
        assert tuple(backend.encode(pieces)) == call.prompt_ids


def test_the_pieces_of_a_branch_add_up_to_its_transcript(result):
    trace = result.trace
    assert trace.text() == result.text()
    assert trace.messages() == result.messages()
    assert sorted(branch.path for branch in trace.branches) == [
        "root", "root/0", "root/0/0", "root/0/1", "root/1", "root/1/0", "root/1/1"
    ]  # fmt: skip
    for branch in trace.branches:
        last = max((call for call in trace.calls if call.branch == branch.path), key=lambda call: call.index)
        assert trace.text(branch.path).startswith(trace.prompt(last.index) + last.text)
    inherited = trace.text("root/1/0").removesuffix(
        "".join(s.text for s in trace.branch("root/1/0").segments)
    )
    assert trace.text("root/1").startswith(inherited)


def test_counts_and_usage_are_those_of_the_calls(result):
    trace = result.trace
    assert trace.calls == result.calls
    assert trace.usage == result.usage
    assert trace.table() == result.table()


def test_times_tell_the_first_token(result):
    for call in result.calls:
        times = result.trace.times(call.index)
        assert times.num_requests == 1
        assert times.total_s == call.seconds
        if call.kind == "gen" and call.token_ids:
            assert 0 < times.first_token_s <= call.seconds
        else:
            assert times.first_token_s is None


def test_a_saved_trace_is_the_same_and_replays_to_the_bit(result, tmp_path):
    result.trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert loaded == result.trace
    assert str(loaded) == str(result.trace)
    assert loaded.html() == result.trace.html()
    for replay in (loaded.replay(), ReplayBackend.load(tmp_path / "trace.json")):
        again = essay.with_options(backend=replay).run("trees")
        assert replay.unused == ()
        assert (again.value, again.text(), again.token_ids()) == (
            result.value,
            result.text(),
            result.token_ids(),
        )
        assert by_place(again.calls) == by_place(result.calls)
        for branch in result.trace.branches:
            assert again.trace.text(branch.path) == result.trace.text(branch.path)
            assert again.trace.messages(branch.path) == result.trace.messages(branch.path)
        with pytest.raises(ProgramError) as caught:
            essay.with_options(backend=replay).run("trees")
        assert isinstance(caught.value.__cause__, NotRecorded)


def by_place(calls):
    """Give all of the calls but when they ran: their times, and who of several branches was first."""
    names = [name for name in calls[0].__dataclass_fields__ if name not in ("index", "seconds")]
    ordered = sorted(calls, key=lambda call: (call.branch, call.index))
    return [[getattr(call, name) for name in names] for call in ordered]


def test_the_trace_of_a_replay_replays_again(result):
    second = essay.with_options(backend=result.trace.replay()).run("trees").trace
    third = essay.with_options(backend=second.replay()).run("trees")
    assert third.text() == result.text()


def test_the_tree_is_printed_with_counts_and_in_order(result):
    lines = str(result.trace).splitlines()
    usage = result.usage
    assert lines[0].startswith("essay: 8 calls, prompt ")
    assert f"cached {usage.cached_tokens} " in lines[0]
    kinds = [line.strip("│├└─ ").partition("  ")[0] for line in lines]
    order = [kind for kind in kinds if kind.startswith(("gen", "select", "fork", "root"))]
    assert order == [
        "fork(2)",
        *["root/0", "gen tip", "fork(2)", "root/0/0", "gen why", "root/0/1", "gen why"],
        *["root/1", "gen tip", "fork(2)", "root/1/0", "gen why", "root/1/1", "gen why"],
        "gen all",
        "select verdict",
    ]
    assert all(len(line) < 200 for line in lines)
    assert sum("'Tip 0 | Tip: '" in line for line in lines) == 1


def test_a_long_text_is_shown_by_its_ends():
    @program
    def long(s):
        s += "a" * 500 + gen("x", max_tokens=400)

    text = str(long.with_options(backend=ScriptedBackend(["b" * 300])).run().trace)
    assert "(500 characters)" in text
    assert "(300 characters)" in text
    assert max(map(len, text.splitlines())) < 130


def test_a_run_that_fails_is_traced_up_to_its_failure():
    backend = ScriptedBackend(["ok"], fail_at={3})
    trace = essay.with_options(backend=backend).trace("trees")
    failed = [call for call in trace.calls if call.error is not None]
    assert [call.error for call in failed] == ["EngineStopped: the engine died"]
    assert "failed at" in trace.error
    assert trace.error in str(ProgramError(trace.error))
    assert trace.branch(failed[0].branch).error.endswith("EngineStopped: the engine died")
    assert "failed: 'EngineStopped: the engine died'" in str(trace)
    assert trace.prompt(failed[0].index) == trace.text(failed[0].branch)
    with pytest.raises(ProgramError, match="EngineStopped"):
        essay.with_options(backend=trace.replay()).run("trees")


def test_a_mistake_of_the_program_itself_is_in_the_trace():
    @program
    def wrong(s):
        s += "a" + gen("x")
        return s["x"] + 1

    trace = wrong.with_options(backend=ScriptedBackend(["ok"])).trace()
    assert "can only concatenate str" in trace.error
    assert [call.text for call in trace.calls] == ["ok"]


def test_a_program_without_a_runtime_has_no_trace():
    set_default_backend(None)
    with pytest.raises(ProgramError, match="no engine"):
        essay.trace("trees")


def test_calls_of_programs_that_a_program_runs_are_recorded_with_it(tmp_path):
    @program
    def inner(s, text):
        s += text + gen("x")
        return s["x"]

    @program
    def outer(s):
        s += "a" + gen("a")
        return [inner.run(s["a"]).value, inner.run("b").value]

    trace = outer.with_options(backend=ScriptedBackend(["1", "2", "3"])).run().trace
    assert len(trace.calls) == 1
    assert [call.site for call in trace.recording.calls] == ["outer:root#0", "inner:root#0", "inner:root#0"]
    assert outer.with_options(backend=trace.replay()).run().value == ["2", "3"]


def test_traces_of_an_event_loop_and_of_plain_code_are_alike():
    backend = ScriptedBackend(["ok"])
    trace = asyncio.run(essay.with_options(backend=backend).atrace("trees"))
    assert len(trace.calls) == 8


def test_what_is_not_there_is_refused_by_name(result):
    with pytest.raises(InvalidRequest, match="no branch 'root/7'"):
        result.trace.text("root/7")
    with pytest.raises(InvalidRequest, match="no call 99"):
        result.trace.prompt(99)


def test_nothing_is_printed_by_a_run(engine, capfd):
    essay.with_options(engine=engine).run("trees")
    essay.with_options(engine=engine).trace("trees")
    assert capfd.readouterr() == ("", "")


def test_a_dry_run_shows_the_prompts_and_sends_nothing(engine):
    backend = CountingBackend(engine)
    dry = essay.with_options(backend=backend).dry_run("trees")
    assert backend.num_sent == 0
    assert dry.ended is None
    real = essay.with_options(engine=engine).run("trees")
    assert dry.prompts[0].call == "gen tip"
    exact = {prompt.branch: prompt for prompt in dry.prompts if prompt.is_exact}
    assert set(exact) == {"root/0", "root/1"}
    for call in real.calls:
        if call.name == "tip":
            assert exact[call.branch].token_ids == call.prompt_ids
            assert exact[call.branch].text == real.trace.prompt(call.index)
    assert "⟨tip⟩ ⟨tip⟩" in next(prompt.text for prompt in dry.prompts if prompt.call == "gen all")
    shown = str(dry)
    assert all(prompt.text in shown for prompt in dry.prompts)
    assert shown.count(", with stand-ins") == 6


class CountingBackend(EngineBackend):
    num_sent = 0

    async def generate(self, request):
        self.num_sent += 1
        return await super().generate(request)

    async def score(self, *args, **kwargs):
        self.num_sent += 1
        return await super().score(*args, **kwargs)


@program
def typed(s):
    s += "Color: " + gen("color", choices=["red", "blue"])
    s += "\nNumber: " + gen("number", schema={"type": "integer"})
    s += f"\nTwice {s['number']}: " + gen("rest")


def test_a_dry_run_ends_where_only_the_model_knows():
    dry = typed.with_options(backend=ScriptedBackend()).dry_run()
    assert [prompt.call for prompt in dry.prompts] == ["gen color", "gen number"]
    assert "DryRunEnds" in dry.ended
    assert "--- ended here" in str(dry)


def test_a_dry_run_goes_on_with_the_answers_it_is_given():
    backend = DryBackend(ScriptedBackend(), {"number": "21", "color": "blue"})
    dry = typed.with_options(backend=backend).dry_run()
    assert dry.ended is None
    assert dry.prompts[-1].text == "Color: blue\nNumber: 21\nTwice 21: "
    assert [prompt.is_exact for prompt in dry.prompts] == [True, False, False]


@program
def asks(s):
    s += system("Judge.") + user("A letter")
    s += decide("d", {"is_long": predicate("Is it long?"), "mood": choice("Which mood?", ["good", "bad"])})
    s += assistant(gen("x"))


def test_the_questions_of_a_decide_are_shown_as_they_were_sent(engine):
    dry = asks.with_options(engine=engine).dry_run()
    assert dry.ended is None
    assert [prompt.call for prompt in dry.prompts] == ["decide d", "decide d", "gen x"]
    assert all(prompt.is_exact for prompt in dry.prompts)
    trace = asks.with_options(engine=engine, max_tokens=4).run().trace
    questions = trace.sent(0)
    assert [prompt.text for prompt in dry.prompts[:2]] == questions
    for text, request in zip(questions, trace.requests(0), strict=True):
        assert text.startswith(trace.prompt(0))
        pieces = [TextPiece(text, is_template=True)]
        assert tuple(engine.tokenizer.encode_pieces(pieces)) == request.request.prompt_ids
    assert "Is it long?" in questions[0]
    assert "B) bad" in questions[1]
    assert escape(questions[1]) in trace.html()
    kinds = [line.strip("│├└─ ").partition("  ")[0] for line in str(trace).splitlines()]
    assert kinds.index("'Judge. | A letter'") < kinds.index("decide d") < kinds.index("gen x")


@program
def chained(s, depth):
    for _ in range(depth):
        [s] = s.fork(1)
        s += "x"
    s += gen("y")


def test_a_fork_of_a_fork_of_a_fork_is_shown_however_deep():
    trace = chained.with_options(backend=ScriptedBackend(["end"])).run(500).trace
    assert trace.prompt(0) == "x" * 500
    assert trace.html().count('<section class="branch"') == 501
    assert str(trace).splitlines()[-1].strip() == "'end'"
