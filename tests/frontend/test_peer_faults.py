"""What is broken in the other language of this kind (facts/peers.md, first section) holds here: a test per fault."""

import asyncio
import enum
import warnings

import pytest
from pydantic import BaseModel

from frontend_lang import (
    Err,
    Ok,
    ProgramError,
    Retry,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)
from radixrt import DeadlineExceeded, EngineStopped, InvalidRequest
from tests.support.backends import ScriptedBackend
from tests.support.places import place
from tests.support.threads import NewThreads

pytestmark = pytest.mark.timeout(60)  # whatever is wrong, nothing hangs


@function
def asked(s, q):
    s += q + gen("x")


def test_after_a_backend_failure_run_raises_and_no_warning_stands_for_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ProgramError, match=r'gen\("x"\) failed') as caught:
            asked.with_options(backend=ScriptedBackend(fail_at={0})).run("q")
    assert caught.value.location == place(asked, "gen(")


def test_reading_a_failed_variable_raises_the_cause_not_a_key_error():
    @function
    def reads(s):
        s += gen("x")
        with pytest.raises(ProgramError) as caught:
            s["x"]
        assert not isinstance(caught.value, KeyError)
        return caught.value.__cause__

    cause = reads.with_options(backend=ScriptedBackend(fail_at={0})).run().value
    assert isinstance(cause, EngineStopped)


def test_an_append_after_the_failure_hangs_neither_sync_nor_text_nor_the_batch():
    @function
    def appends(s, q):
        s += q + gen("x")
        try:
            s.sync()
        except ProgramError:
            s += "more" + gen("y")
            for read in (s.sync, s.text, lambda: s["y"]):
                with pytest.raises(ProgramError):
                    read()
            return "handled"
        return s.text()

    backend = ScriptedBackend(["A"], fail_at={1})
    outcomes = appends.with_options(backend=backend).run_batch([{"q": q} for q in "abc"], num_threads=1)
    assert [outcome.unwrap().value for outcome in outcomes] == ["aA", "handled", "cA"]


def test_a_failed_child_keeps_its_place_and_the_parent_sees_its_error():
    @function
    def forks(s):
        children = s.fork(3)
        children += gen("x")
        outcomes = children.join()
        return [type(outcome) for outcome in outcomes], outcomes[2]["x"]

    assert forks.with_options(backend=ScriptedBackend(list("abc"), fail_at={1})).run().value == (
        [Ok, Err, Ok],
        "c",
    )

    @function
    def ignores(s):
        children = s.fork(3)
        children += gen("x")
        children.join()

    with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
        ignores.with_options(backend=ScriptedBackend(fail_at={1})).run()


def test_a_second_fork_and_join_with_the_same_name_has_its_own_values():
    @function
    def twice(s):
        seen = []
        for _ in range(2):
            children = s.fork(2)
            children += gen("x")
            children.join()
            seen.append(s["x"])
        return seen

    result = twice.with_options(backend=ScriptedBackend(list("abcd"))).run()
    assert result.value == [["a", "b"], ["c", "d"]]


def test_streaming_shows_the_exceptions_of_the_users_function():
    @function
    def buggy(s):
        s += "text"
        raise LookupError("mine")

    state = buggy.with_options(backend=ScriptedBackend()).run(stream=True)
    with pytest.raises(LookupError, match="mine"):
        list(state.text_iter())
    with pytest.raises(LookupError, match="mine"):
        state["x"]

    async def main():
        async for _ in buggy.with_options(backend=ScriptedBackend()).astream():
            pass

    with pytest.raises(LookupError, match="mine"):
        asyncio.run(main())


def test_several_samples_are_no_type_error():
    @function
    def sampled(s):
        s += gen("x", n=3)
        return [branch["x"] for branch in s["x"]]

    assert sampled.with_options(backend=ScriptedBackend(list("abc"))).run().value == ["a", "b", "c"]


def test_a_callers_stop_list_is_never_changed():
    stop = ["\n"]

    @function
    def stops(s):
        s += user("q") + assistant(gen("x", stop=stop))

    runner = stops.with_options(backend=ScriptedBackend(), stop=["END"])
    for _ in range(3):
        runner.run()
    assert stop == ["\n"]


def test_program_parameters_of_any_name_reach_the_function():
    @function
    def named(s, n, stop, temperature=None, stream=None):
        return n, stop, temperature, stream

    runner = named.with_options(backend=ScriptedBackend())
    assert runner.run(n=1, stop=2, temperature=3, stream=4).value == (1, 2, 3, 4)
    assert runner.run_batch([{"n": 1, "stop": 2}])[0].unwrap().value == (1, 2, None, None)


def test_bind_keeps_settings_and_writes_into_no_dict_of_the_caller():
    arguments = {"q": "b"}
    backend = ScriptedBackend()
    bound = asked.with_options(backend=backend, temperature=0.5).bind(q="bound")
    assert bound.run().text() == "boundok"
    assert backend.requests[0].sampling.temperature == 0.5
    asked.with_options(backend=backend).run_batch([arguments])
    assert arguments == {"q": "b"}


def test_gen_with_choices_heeds_every_other_option_or_refuses_it():
    @function
    def chosen(s):
        s += gen("x", choices=["a", "b"], max_tokens=7, temperature=0.3, seed=5)

    backend = ScriptedBackend(["a"])
    chosen.with_options(backend=backend).run()
    sampling = backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.3, 5)
    with pytest.raises(InvalidRequest, match="max_tokens has no effect"):
        gen("x", choices=["a"], choices_method="greedy_token", max_tokens=7)


def test_unnamed_calls_overwrite_nothing():
    @function
    def unnamed(s):
        first, second = gen(), gen()
        s += first + second
        return s[first], s[second]

    result = unnamed.with_options(backend=ScriptedBackend(["a", "b"])).run()
    assert result.value == ("a", "b")
    assert [call.text for call in result.calls] == ["a", "b"]


def test_a_batch_runs_the_users_code_with_its_own_arguments_only():
    table, seen = {"a": 1, "b": 2}, []

    @function
    def keyed(s, key):
        seen.append(key)
        s += str(table[key]) + gen("x")

    outcomes = keyed.with_options(backend=ScriptedBackend()).run_batch([{"key": key} for key in "ab"])
    assert all(outcome.is_ok for outcome in outcomes)
    assert sorted(seen) == ["a", "b"]


def test_a_hundred_forking_programs_share_a_thread():
    threads, most = NewThreads(), 0

    def answer(request, prompt):
        nonlocal most
        most = max(most, len(threads.names()))
        return "ok"

    @function
    def forks(s, q):
        children = s.fork(4)
        children += q + gen("x")
        children.join()

    backend = ScriptedBackend(answer, delay_s=0.001)
    outcomes = forks.with_options(backend=backend).map([("q",)] * 100, max_concurrency=100)
    assert all(outcome.is_ok for outcome in outcomes)
    assert backend.most_running > 100
    assert most <= 1


def test_a_generated_token_is_never_tokenized_again():
    class Merging(ScriptedBackend):
        """A tokenizer in which "ab" is one token, and a model that writes "a" alone."""

        def encode(self, pieces, *, is_start=False):
            ids = []
            for piece in pieces:
                assert "a" not in piece.text.replace("ab", ""), "generated text came back to be encoded"
                ids += [900] * piece.text.count("ab") + [
                    ord(letter) + 10 for letter in piece.text.replace("ab", "")
                ]
            return ids

        async def generate(self, request):
            output = await super().generate(request)
            sample = type(output.samples[0])("a", (ord("a") + 10,), output.samples[0].finish_reason)
            return type(output)(output.prompt_ids, (sample,), output.usage)

    @function
    def joined(s):
        s += "x" + gen("one") + "b" + gen("two")

    backend = Merging(["-"])
    result = joined.with_options(backend=backend).run()
    assert result.text() == "xaba"
    second = backend.requests[1].prompt_ids
    assert second[: len(backend.requests[0].prompt_ids) + 1] == (
        *backend.requests[0].prompt_ids,
        ord("a") + 10,
    )
    assert 900 not in second


def test_values_have_types_and_calls_have_seeds_tools_deadlines_retries_and_can_be_cancelled():
    class Person(BaseModel):
        name: str

    Colour = enum.Enum("Colour", {"RED": "red"})

    def add(a: int, b: int) -> int:
        return a + b

    answers = {
        "person": '{"name": "Ada"}',
        "number": "7",
        "colour": "red",
        "sum": '{"name": "add", "arguments": {"a": 2, "b": 3}}',
    }

    @function
    def typed(s):
        person, number = gen("person", schema=Person, seed=3), gen("number", type=int)
        s += person + number + gen("colour", type=Colour) + gen("sum", tools=[add])
        return s[person], s[number], s["colour"], s["sum"].value

    backend = ScriptedBackend(lambda request, prompt: answers[request.label])
    assert typed.with_options(backend=backend).run().value == (Person(name="Ada"), 7, Colour.RED, 5)
    assert backend.requests[0].sampling.seed == 3

    slow = ScriptedBackend(delay_s=30)
    with pytest.raises(ProgramError) as caught:
        asked.with_options(backend=slow, timeout_s=0.02).run("q")
    assert isinstance(caught.value.__cause__, DeadlineExceeded)
    flaky = ScriptedBackend(["A"], fail_at={0}, error=OSError("lost"), transient_errors=(OSError,))
    assert asked.with_options(backend=flaky, retries=Retry(1, wait_s=0)).run("q")["x"] == "A"

    async def cancelled():
        task = asyncio.ensure_future(asked.with_options(backend=slow).arun("q"))
        while not slow.running:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled())
    assert slow.running == 0


def test_chat_templates_are_the_models_own():
    class Odd(ScriptedBackend):
        def open_role(self, history, role):
            return f"[{role}:", "]"

    @function
    def chat(s):
        s += system("S") + user("U") + assistant(gen("x"))

    assert chat.with_options(backend=Odd()).run().text() == "[system:S][user:U][assistant:ok]"


def test_select_tells_the_whole_distribution():
    @function
    def judged(s):
        s += "Good? " + select("x", ["yes", "no"])
        return s.distribution("x")

    odds = judged.with_options(backend=ScriptedBackend()).run().value
    assert set(odds) == {"yes", "no"}
    assert sum(odds.values()) == pytest.approx(1)
