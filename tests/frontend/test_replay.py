"""A recorded run replays without a model: the same to the bit, or an error that says what differs."""

import asyncio
import json

import pytest
from pydantic import BaseModel

from frontend_lang import EngineBackend, ProgramError, assistant, gen, program, select, system, user
from frontend_lang.backends import NotRecorded, RecordedCall, Recording, RecordingBackend, ReplayBackend
from radixrt import (
    Engine,
    EngineStopped,
    GenerateRequest,
    InvalidRequest,
    OutputChunk,
    SamplingParams,
    TextPiece,
    TokenLogprob,
    UnsupportedGrammar,
    Usage,
)
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(120)


class Answer(BaseModel):
    is_good: bool


@program
def essay(s, topic, num_branches=3):
    s += system("Short.") + user(f"About {topic}")
    branches = s.fork(num_branches)
    for index, branch in enumerate(branches):
        branch += user("Tip" if index else "Hint") + assistant(
            "Tip: ", gen("tip", max_tokens=6, temperature=1)
        )
    s += user(" ".join(branch["tip"] for branch in branches))
    s += assistant(gen("all", max_tokens=12, temperature=0, stop="e", logprobs=2))
    s += " " + select("verdict", choices=["good", "bad", "bad enough"])
    s += gen("answer", schema=Answer, max_tokens=30, temperature=0)
    return s["answer"]


def facts(result):
    """Give all of a result but the times."""
    return (
        result.value,
        result.variables,
        result.text(),
        result.token_ids(),
        result.messages(),
        [
            (call.index, call.name, call.branch, call.prompt_ids, call.token_ids, call.text, call.usage)
            for call in result.calls
        ],
        [(call.finish_reason, call.logprobs, call.distribution, call.error) for call in result.calls],
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    with Engine(folder, dtype="float32", num_pages=600, page_size=4, threads=1) as engine:
        yield engine


def recorded(engine, *args):
    recorder = RecordingBackend(EngineBackend(engine))
    result = essay.with_options(backend=recorder).run(*args)
    return recorder.recording, result


def test_a_saved_run_replays_to_the_bit(engine, tmp_path):
    recording, result = recorded(engine, "trees")
    recording.save(tmp_path / "run.json")
    loaded = Recording.load(tmp_path / "run.json")
    assert loaded == recording
    replay = ReplayBackend(loaded)
    again = essay.with_options(backend=replay).run("trees")
    assert facts(again) == facts(result)
    assert replay.unused == ()
    json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)  # strict JSON


def test_calls_that_ask_the_same_get_the_answer_of_their_own_branch():
    numbers = iter(range(100))
    recorder = RecordingBackend(ScriptedBackend(lambda request, prompt: f"n{next(numbers)}"))

    @program
    def twins(s):
        s += "x"
        branches = s.fork(4)
        for branch in reversed(branches):
            branch += gen("a")
            branch += gen("a")
        return [branch["a"] for branch in branches]

    first = twins.with_options(backend=recorder).run()
    assert len(set(first.value)) == 4
    calls = recorder.recording.calls
    shuffled = Recording(**{**fields_of(recorder.recording), "calls": tuple(reversed(calls))})
    assert twins.with_options(backend=ReplayBackend(shuffled)).run().value == first.value


def fields_of(recording):
    return {name: getattr(recording, name) for name in recording.__dataclass_fields__}


def test_another_topic_is_an_error_that_shows_the_difference(engine):
    recording, _ = recorded(engine, "trees")
    with pytest.raises(ProgramError) as caught:
        essay.with_options(backend=ReplayBackend(recording)).run("trams")
    assert isinstance(caught.value.__cause__, NotRecorded)
    assert "trees" in str(caught.value.__cause__)
    assert "trams" in str(caught.value.__cause__)


async def ask(backend, text, **sampling):
    ids = backend.encode(pieces(text), is_start=True)
    return await backend.generate(GenerateRequest(tuple(ids), SamplingParams(**sampling), label="x"))


def pieces(text):
    return [TextPiece(text)]


def two_recorded_calls():
    async def main():
        recorder = RecordingBackend(ScriptedBackend(["one", "two"]))
        await ask(recorder, "abcd")
        await ask(recorder, "abxy")
        recorder.encode(pieces("abxz"), is_start=True)
        return recorder.recording

    return ReplayBackend(asyncio.run(main()))


def test_a_prompt_that_was_not_sent_shows_the_first_differing_token():
    with pytest.raises(NotRecorded, match=r"differs at token 3: recorded .*'abxy'.*, now .*'abxz'"):
        asyncio.run(ask(two_recorded_calls(), "abxz"))


def test_an_option_that_differs_is_named_with_both_values():
    with pytest.raises(NotRecorded, match=r"same prompt but max_tokens=256, now 7"):
        asyncio.run(ask(two_recorded_calls(), "abxy", max_tokens=7))


def test_each_recorded_call_answers_once():
    replay = two_recorded_calls()

    async def main():
        assert len(replay.unused) == 2
        assert (await ask(replay, "abcd")).text == "one"
        assert len(replay.unused) == 1
        with pytest.raises(NotRecorded, match="answers once"):
            await ask(replay, "abcd")

    asyncio.run(main())


def test_a_text_that_was_not_sent_shows_the_first_differing_character():
    with pytest.raises(NotRecorded, match=r"character 2: recorded 'abcd', now 'abqq'"):
        asyncio.run(ask(two_recorded_calls(), "abqq"))


@pytest.mark.parametrize(
    "error",
    [
        EngineStopped("the engine died"),
        UnsupportedGrammar("no such keyword", parameter="/not"),
        ValueError("odd"),
        ConnectionResetError("gone"),
    ],
)
def test_a_failure_replays_as_the_same_failure(error):
    @program
    def two(s):
        s += "a" + gen("x") + "b" + gen("y")

    recorder = RecordingBackend(ScriptedBackend(["ok"], fail_at={1}, error=error))
    with pytest.raises(ProgramError) as first:
        two.with_options(backend=recorder).run()
    with pytest.raises(ProgramError) as again:
        two.with_options(backend=ReplayBackend(recorder.recording)).run()
    assert str(again.value) == str(first.value)
    assert type(again.value.__cause__) is type(error)
    assert again.value.prompt == first.value.prompt


def test_an_error_after_which_a_call_may_be_sent_again_stays_one():
    flaky = ScriptedBackend(
        ["ok"],
        fail_at={0},
        error=ConnectionResetError("gone"),
        transient_errors=(ConnectionResetError,),
    )

    async def main():
        recorder = RecordingBackend(flaky)
        with pytest.raises(ConnectionResetError):
            await ask(recorder, "a")
        await ask(recorder, "a")
        replay = ReplayBackend(recorder.recording)
        with pytest.raises(replay.transient_errors, match="ConnectionResetError: gone"):
            await ask(replay, "a")
        assert (await ask(replay, "a")).text == "ok"

    asyncio.run(main())


def test_a_stream_keeps_its_chunks_and_their_times():
    async def main():
        ticks = iter(range(1000))
        recorder = RecordingBackend(ScriptedBackend(["hello"], chunk_characters=2), clock=lambda: next(ticks))
        request = GenerateRequest(tuple(recorder.encode(pieces("a"), is_start=True)))
        chunks = [chunk async for chunk in recorder.stream(request)]
        replayed = [chunk async for chunk in ReplayBackend(recorder.recording).stream(request)]
        (call,) = recorder.recording.calls
        return chunks, replayed, call

    chunks, replayed, call = asyncio.run(main())
    assert replayed == chunks
    assert len(chunks) == 3
    assert call.chunk_s == tuple(sorted(call.chunk_s))
    assert 0 < call.chunk_s[0] < call.chunk_s[-1] < call.seconds


def test_a_call_that_was_cancelled_is_recorded_as_such():
    async def main():
        backend = ScriptedBackend(["ok"], delay_s=30)
        recorder = RecordingBackend(backend)
        task = asyncio.ensure_future(ask(recorder, "a"))
        while not backend.running:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return backend, recorder.recording

    backend, recording = asyncio.run(main())
    assert backend.aborted == 1
    assert [call.error.kind for call in recording.calls] == ["CancelledError"]


def test_numbers_survive_to_the_bit(tmp_path):
    entry = TokenLogprob(3, -0.1234567890123456789, ((3, -1e-300), (4, float("-inf"))))
    chunk = OutputChunk(
        0, "é\u2028</script>\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), (3,)
    )
    call_chunk = OutputChunk(0, "", (), logprobs=(entry,), usage=Usage(1, 2, 3, 4, 5))
    call = RecordedCall("p:root#0", GenerateRequest((1, 2)), chunks=(chunk, call_chunk), chunk_s=(0.1, 0.2))
    recording = Recording((0,), (1,), calls=(call,))
    recording.save(tmp_path / "run.json")
    assert Recording.load(tmp_path / "run.json") == recording


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "JSON"),
        ("[]", "file"),
        ('{"format": "radixrt-run", "version": 2}', "version"),
        ('{"format": "other"}', "format"),
    ],
)
def test_a_file_that_is_no_saved_run_is_refused(tmp_path, text, names):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(InvalidRequest, match=names):
        Recording.load(tmp_path / "bad.json")
