"""A program that is read while it runs: typed events, text as it comes, errors, and what leaving early does."""

import asyncio
import gc
import os
import signal
import threading
import time

import pytest

from frontend_lang import (
    CallDone,
    ProgramDone,
    ProgramError,
    TextDelta,
    VariableSet,
    assistant,
    gen,
    predicate,
    program,
    select,
    system,
    user,
)
from radixrt import Engine, RequestAborted
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model
from tests.support.threads import NewThreads, act_once, wait_until

pytestmark = pytest.mark.timeout(60)


@program
def turns(s, first, second):
    s += system("Be brief.")
    s += user(first) + assistant(gen("a", max_tokens=32))
    s += user(second) + assistant(gen("b", max_tokens=32))
    s += "Good? " + select("c", choices=["yes", "no"])
    return len(s["a"])


def texts(events, branch="root", name=None):
    return "".join(
        event.text
        for event in events
        if isinstance(event, TextDelta) and event.branch == branch and (name is None or event.name == name)
    )


def test_events_add_up_to_what_run_gives():
    runner = turns.with_options(backend=ScriptedBackend(["first answer", "second"]))
    whole = runner.run("One?", second="Two?")
    runner = turns.with_options(backend=ScriptedBackend(["first answer", "second"], chunk_characters=3))
    events = list(runner.stream("One?", second="Two?"))
    assert texts(events) == whole.text()
    assert texts(events, name="a") == "first answer"
    assert [event.name for event in events if isinstance(event, VariableSet)] == ["a", "b", "c"]
    assert [event.record.name for event in events if isinstance(event, CallDone)] == ["a", "b", "c"]
    generated = [event for event in events if isinstance(event, TextDelta) and event.is_generated]
    assert [event.text for event in generated if event.name == "a"] == ["fir", "st ", "ans", "wer"]
    assert isinstance(events[-1], ProgramDone)
    assert sum(isinstance(event, ProgramDone) for event in events) == 1
    assert events[-1].result.value == whole.value
    assert events[-1].result.token_ids() == whole.token_ids()


def test_a_branch_tells_its_own_text_from_where_it_was_forked():
    @program
    def forked(s):
        s += "shared "
        branches = s.fork(2)
        branches += gen("x")
        s += " end"
        return [branch.text() for branch in branches]

    events = list(forked.with_options(backend=ScriptedBackend(["one", "two"])).stream())
    assert texts(events) == "shared  end"
    for index, text in enumerate(events[-1].result.value):
        assert "shared " + texts(events, f"root/{index}") == text


def test_several_samples_tell_of_their_own_branch_each():
    @program
    def sampled(s):
        s += "Q " + gen("x", n=3)
        return [branch.text() for branch in s["x"]]

    backend = ScriptedBackend(lambda request, prompt: ["a1", "b2", "c3"][len(backend.requests) - 1])
    events = list(sampled.with_options(backend=backend).stream())
    assert [texts(events, f"root/{index}") for index in range(3)] == [
        text.removeprefix("Q ") for text in events[-1].result.value
    ]
    assert texts(events) == events[-1].result.text()


def test_an_exception_of_the_function_reaches_the_reader_after_what_came_before():
    @program
    def buggy(s):
        s += "text" + gen("x")
        return {}[s["x"]]

    seen = []
    events = map(seen.append, buggy.with_options(backend=ScriptedBackend(["value"])).stream())
    with pytest.raises(KeyError, match="value") as caught:
        list(events)
    assert texts(seen) == "textvalue"
    assert 'in program "buggy"' in caught.value.__notes__[0]


def test_a_failed_call_reaches_the_reader_as_it_reaches_run():
    runner = turns.with_options(backend=ScriptedBackend(["a"], fail_at={1}))
    stream = runner.stream("One?", "Two?")
    with pytest.raises(ProgramError, match=r'gen\("b"\) failed at .*EngineStopped'):
        list(stream)
    with pytest.raises(ProgramError, match=r'gen\("b"\) failed'):
        stream.result()
    with pytest.raises(ProgramError, match=r'gen\("b"\) failed'):
        stream["a"]


def test_leaving_the_loop_early_cancels_everything():
    unwound = []

    @program
    def endless(s):
        try:
            branches = s.fork(3)
            for index in range(1000):
                branches += gen(f"x{index}")
                branches.join()
        finally:
            unwound.append(True)

    backend = ScriptedBackend(["ab"], delay_s=0.005)
    stream = endless.with_options(backend=backend).stream()
    for event in stream:  # the stream itself stays referenced
        if isinstance(event, TextDelta):
            break
    wait_until(lambda: unwound and backend.running == 0)
    wait_until(lambda: not backend.open_scopes)
    num_calls = backend.num_calls
    time.sleep(0.05)
    assert backend.num_calls == num_calls < 1000


def test_an_exception_in_the_readers_loop_cancels_everything():
    backend = ScriptedBackend(["ab"], delay_s=30)

    def read():
        for _ in turns.with_options(backend=backend).stream("One?", "Two?"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    wait_until(lambda: backend.aborted == 1 and backend.running == 0)


def test_a_dropped_stream_and_a_closed_one_cancel_the_program():
    backend = ScriptedBackend(delay_s=30)
    runner = turns.with_options(backend=backend)
    stream = runner.stream("One?", "Two?")
    wait_until(lambda: backend.running == 1)
    del stream
    gc.collect()
    wait_until(lambda: backend.running == 0)
    with runner.stream("One?", "Two?") as stream:
        wait_until(lambda: backend.running == 1)
    assert backend.running == 0
    with pytest.raises(RequestAborted, match="the stream was closed"):
        stream.result()


def test_a_stream_leaves_no_thread():
    threads = NewThreads()
    list(turns.with_options(backend=ScriptedBackend()).stream("One?", "Two?"))
    wait_until(lambda: not threads.names())


def test_control_c_while_reading_ends_the_program():
    backend = ScriptedBackend(delay_s=60)
    pressing = act_once(lambda: backend.running, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        list(turns.with_options(backend=backend).stream("One?", "Two?"))
    pressing.join()
    assert (backend.aborted, backend.running) == (1, 0)


def test_text_iter_gives_all_text_or_one_variable():
    runner = turns.with_options(backend=ScriptedBackend(["first", "second"]))
    stream = runner.stream("One?", "Two?")
    assert "".join(stream.text_iter("b")) == "second"
    assert "".join(stream.text_iter("a")) == "first"  # each reader starts at the beginning
    assert "".join(stream.text_iter()) == stream.text() == stream.result().text()
    assert (stream["b"], stream.messages()[2]["content"]) == ("second", "first")


def test_the_text_of_a_variable_that_is_never_set_is_an_error_as_reading_it_is():
    runner = turns.with_options(backend=ScriptedBackend(["first", "second"]))
    with pytest.raises(ProgramError, match='has set no "aa"'):
        list(runner.stream("One?", "Two?").text_iter("aa"))

    async def read(stream):
        return [text async for text in stream.text_async_iter("aa")]

    async def main():
        with pytest.raises(ProgramError, match='has set no "aa"'):
            await read(runner.astream("One?", "Two?"))
        with pytest.raises(ProgramError, match='has set no "aa"'):
            await read(runner.stream("One?", "Two?"))

    asyncio.run(main())


def test_text_iter_gives_text_before_the_call_is_done():
    @program
    def slow(s):
        s += gen("x", max_tokens=100)

    gate = threading.Event()

    class Gated(ScriptedBackend):
        async def stream(self, request):
            async for chunk in super().stream(request):
                if chunk.usage is not None:
                    await asyncio.to_thread(gate.wait)
                yield chunk

    parts = slow.with_options(backend=Gated(["ab"])).stream().text_iter("x")
    assert next(parts) == "a"
    gate.set()
    assert list(parts) == ["b"]


def test_a_program_streams_another_on_its_own_loop():
    @program
    def inner(s, q):
        s += q + gen("x")

    @program
    def outer(s):
        assert threading.get_ident() == main
        parts = [event.text for event in inner.stream("Q") if isinstance(event, TextDelta)]
        for _ in inner.stream("left early"):
            break
        return parts

    main = threading.get_ident()
    backend = ScriptedBackend(["abc"])
    assert outer.with_options(backend=backend).run().value == ["Q", "a", "b", "c"]
    assert backend.running == 0


def test_astream_gives_the_same_events():
    async def main():
        runner = turns.with_options(backend=ScriptedBackend(["first", "second"]))
        stream = runner.astream("One?", "Two?")
        events = [event async for event in stream]
        parts = [part async for part in stream.text_async_iter("b")]
        return events, parts, await stream.result()

    events, parts, result = asyncio.run(main())
    assert texts(events) == result.text()
    assert "".join(parts) == "second"
    assert events[-1].result is result


def test_leaving_astream_early_cancels_and_errors_reach_the_reader():
    backend = ScriptedBackend(["a"], delay_s=0.01)
    failing = ScriptedBackend(["a"], fail_at={1})

    async def main():
        async for _ in turns.with_options(backend=backend).astream("One?", "Two?"):
            break
        await asyncio.sleep(0.1)
        num_calls = backend.num_calls
        with pytest.raises(ProgramError, match=r'gen\("b"\) failed'):
            async for _ in turns.with_options(backend=failing).astream("One?", "Two?"):
                pass
        async with turns.with_options(backend=backend).astream("One?", "Two?") as stream:
            pass
        with pytest.raises(RequestAborted, match="the stream was closed"):
            await stream.result()
        return num_calls

    assert asyncio.run(main()) <= 1
    assert backend.running == 0


def test_a_stream_inside_someone_elses_loop_lets_that_loop_go_on():
    has_ticked = threading.Event()

    class Waiting(ScriptedBackend):
        async def stream(self, request):
            assert await asyncio.to_thread(has_ticked.wait, 30)
            async for chunk in super().stream(request):
                yield chunk

    async def main():
        stream = turns.with_options(backend=Waiting(["first", "second"])).stream("a", "b")
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1
                if ticks > 10:
                    has_ticked.set()

        ticking = asyncio.ensure_future(tick())
        parts = [part async for part in stream.text_async_iter("b")]
        ticking.cancel()
        return "".join(parts)

    assert asyncio.run(main()) == "second"


def test_on_an_engine_every_kind_of_statement_adds_up_and_decodes_to_its_text(tmp_path):
    def add(a: int, b: int) -> int:
        return a + b

    @program
    def everything(s):
        s += system("Short.") + user("Hi")
        with s.assistant(), s.var_scope("whole"):
            s += "http:" + gen("healed", heal=True, stop=["e", "\n"]) + " " + gen("number", type=int)
        s += user("Pick") + assistant(select("pick", ["yes", "no"]))
        s += assistant(gen("call", tools=[add], max_tokens=80)) + user("And?")
        s += assistant(gen("answer", tools=[add], max_rounds=1, max_tokens=80))
        s.decide({"sure": predicate("Sure?")})
        branches = s.fork(2)
        branches += user("Go") + assistant(gen("x", n=2))
        branches.join()
        s += user("End") + assistant("Done " + gen("end", n=2))

    folder = tiny_model("qwen3", tmp_path / "tiny", max_position_embeddings=2048)
    with Engine(folder, dtype="float32", checks="step", num_pages=900, page_size=4, threads=1) as engine:
        runner = everything.with_options(engine=engine, max_tokens=12, temperature=0)
        events = list(runner.stream())
        result = events[-1].result
        assert texts(events) == result.text()
        whole = runner.run()
        assert whole.text() == result.text()
        shown = [engine.tokenizer.decode(whole.token_ids()), whole.text()]
        assert shown[0] == shown[1].replace("<|im_start|>", "").replace("<|im_end|>", "")
        paths = {event.branch for event in events if isinstance(event, TextDelta)}
        assert {"root/0/1", "root/1/0", "root/2", "root/3"} <= paths
