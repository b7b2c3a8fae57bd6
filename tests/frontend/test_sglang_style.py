"""Programs as they are written for SGLang run after changing the import: here `import frontend_lang as sgl`."""

import asyncio

import pytest

import frontend_lang as sgl
from frontend_lang import Err, ProgramError, set_default_backend
from radixrt import Engine, InvalidRequest
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(60)


@sgl.function
def few_shot_qa(s, question):
    s += "Q: How many legs has a spider?\nA: 8\n"
    s += "Q: How many legs has an ant?\nA: 6\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0)


@sgl.function
def multi_turn(s, question_1, question_2):
    s += sgl.system("You are a helpful guide.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=16))
    s += sgl.user(question_2)
    s += sgl.assistant_begin()
    s += "Certainly. " + sgl.gen("answer_2", max_tokens=16)
    s += sgl.assistant_end()


@sgl.function
def react(s, question, tools):
    s += "Question: " + question + "\n"
    for step in range(1, 4):
        s += f"Thought {step}:" + sgl.gen("thought", stop="\n", max_tokens=16) + "\n"
        s += f"Action {step}: " + sgl.gen("action", choices=[*tools, "finish"]) + "["
        s += sgl.gen("argument", stop="]", max_tokens=8) + "]\n"
        if s["action"] == "finish":
            break
        s += f"Observation {step}: " + tools[s["action"]](s["argument"]) + "\n"


@sgl.function
def tree_of_thought(s, question, num_branches):
    s += sgl.user("Solve: " + question)
    plans = s.fork(num_branches)
    plans += sgl.assistant(sgl.gen("plan", max_tokens=8, temperature=0.8))
    for plan in plans:
        solutions = plan.fork(num_branches)
        solutions += sgl.user("Carry it out.")
        solutions += sgl.assistant(sgl.gen("solution", max_tokens=8, temperature=0.8))
        for solution in solutions:
            solution += sgl.user("Rate it from 1 to 3.")
            solution += sgl.assistant(sgl.gen("score", choices=["1", "2", "3"]))
        solutions.join()
    plans.join()
    s += sgl.assistant(f"{num_branches**2} solutions.")


@sgl.function
def judge(s, essay):
    s += sgl.user("Essay: " + essay)
    views = s.fork(3)
    for view, topic in zip(views, ("style", "facts", "length"), strict=True):
        view += sgl.user("Judge its " + topic + ".")
        view += sgl.assistant(sgl.gen("judgment", max_tokens=8, stop="END"))
    views.join()
    s += sgl.user("Three judgments: " + "; ".join(s["judgment"]) + " Grade?")
    s += sgl.assistant(sgl.select("grade", ["A", "B", "C"]))


CHARACTER = r'\{\n "name": "[a-z]{1,6}",\n "age": [0-9]{1,3}\n\}'


@sgl.function
def json_decode(s, name):
    s += name + " as JSON:\n" + sgl.gen("data", max_tokens=64, temperature=0, regex=CHARACTER)


@sgl.function
def parallel_sample(s, question, n):
    s += "Question: " + question + "\n"
    forks = s.fork(n)
    forks += "Reasoning:" + sgl.gen("reasoning", stop="\n", max_tokens=8) + "\n"
    forks += "Tool:" + sgl.gen("tool", choices=["calculator", "browser"]) + "\n"
    forks.join()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    with Engine(folder, dtype="float32", checks="step", num_pages=900, page_size=4, threads=1) as engine:
        yield engine


@pytest.fixture
def _on_engine(engine):
    sgl.set_default_engine(engine)
    yield
    set_default_backend(None)
    engine.check()


@pytest.fixture
def backend():
    backend = ScriptedBackend(lambda request, prompt: request.label)
    sgl.set_default_backend(backend)
    yield backend
    sgl.set_default_backend(None)


@pytest.mark.usefixtures("_on_engine")
def test_few_shot_and_batches_run_and_share_their_examples():
    states = few_shot_qa.run_batch(
        [{"question": f"{animal}?"} for animal in ("cat", "fly", "hen")],
        max_new_tokens=8,
        num_threads=2,
        progress_bar=False,
    )
    for state, animal in zip(states, ("cat", "fly", "hen"), strict=True):
        assert state.text().endswith(f"Q: {animal}?\nA:" + state["answer"])
    state = few_shot_qa.run(question="dog?", temperature=0, max_new_tokens=4)
    assert state.get_meta_info("answer")["completion_tokens"] <= 4
    assert state.get_meta_info("answer")["cached_tokens"] > 40


@pytest.mark.usefixtures("_on_engine")
def test_multi_turn_chat_runs():
    state = multi_turn.run(question_1="Where?", question_2="And what?")
    assert [message["role"] for message in state.messages()] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert state.messages()[-1]["content"] == "Certainly. " + state["answer_2"]


@pytest.mark.usefixtures("_on_engine")
def test_react_runs_its_tools():
    asked = []

    def search(text):
        asked.append(text)
        return "42"

    state = react.run(question="How many?", tools={"search": search}, temperature=0)
    assert "Thought 1:" in state.text()
    assert state.text().count("Observation") == len(asked)
    assert state["action"] in ("search", "finish")


@pytest.mark.usefixtures("_on_engine")
def test_tree_of_thought_runs():
    state = tree_of_thought.run(question="1 + 1", num_branches=2)
    assert [len(solutions) for solutions in state["solution"]] == [2, 2]
    assert all(score in ("1", "2", "3") for scores in state["score"] for score in scores)
    assert len(state["plan"]) == 2
    assert state.messages()[-1]["content"] == "4 solutions."


@pytest.mark.usefixtures("_on_engine")
def test_a_judge_gathers_its_views():
    state = judge.run(essay="A short one.")
    assert state["grade"] in ("A", "B", "C")
    assert "; ".join(state["judgment"]) in state.text()
    info = state.get_meta_info("grade")
    assert len(info["input_token_logprobs"]) == len(info["normalized_prompt_logprobs"]) == 3


@pytest.mark.usefixtures("_on_engine")
def test_json_decoding_runs():
    import json

    assert set(json.loads(json_decode.run(name="Ada")["data"])) == {"name", "age"}


@pytest.mark.usefixtures("_on_engine")
def test_parallel_samples_are_gathered_into_lists():
    state = parallel_sample.run(question="5 + 2", n=3, temperature=1.0)
    assert len(state["reasoning"]) == len(state["tool"]) == 3
    assert set(state["tool"]) <= {"calculator", "browser"}


@pytest.mark.usefixtures("_on_engine")
def test_streaming_by_text_iter():
    state = multi_turn.run(question_1="a", question_2="b", stream=True)
    assert "".join(state.text_iter(var_name="answer_2")) == state["answer_2"]
    assert "".join(state.text_iter()) == state.text()

    async def main():
        state = multi_turn.run(question_1="a", question_2="b", stream=True)
        return "".join([text async for text in state.text_async_iter(var_name="answer_2")]), state

    text, state = asyncio.run(main())
    assert text == state["answer_2"]


def test_options_of_run_never_take_an_argument_from_the_function(backend):
    @sgl.function
    def greedy(s, temperature, stream, backend=None, **rest):
        return temperature, stream, backend, rest

    assert greedy.run(temperature=3, stream=True, top_p=7).value == (3, True, None, {"top_p": 7})

    @sgl.function
    def plain(s, q):
        s += q + sgl.gen("x")

    other = ScriptedBackend(["other"])
    assert plain.run("a", backend=other, temperature=0.5, max_new_tokens=9)["x"] == "other"
    assert (other.requests[0].sampling.temperature, other.requests[0].sampling.max_tokens) == (0.5, 9)
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        plain.run("a", temprature=0)
    with pytest.raises(TypeError, match="run_batch has no option 'generator_style'"):
        plain.run_batch([("a",)], generator_style=True)
    with pytest.raises(InvalidRequest, match="temperature"):
        plain.run("a", temperature=-1)


def test_other_spellings_mean_the_same(backend):
    @sgl.function()
    def spelled(s):
        s.system("Be brief.")
        s.user("Count ", "to ten.")
        with s.assistant(), s.var_scope("whole"):
            s += sgl.gen("a", 5, dtype=int) + " and " + sgl.gen_string("b", stop="!")
        s += sgl.user_begin() + "More." + sgl.user_end()
        with s.copy() as other:
            other += sgl.assistant(sgl.gen_int("c"))
        s += sgl.assistant(sgl.gen("d", json_schema='{"type": "boolean"}', return_logprob=True))
        pick = sgl.gen("e", choices=["x", "y"], choices_method=sgl.greedy_token_selection, temperature=0)
        s += pick
        return other["c"], s.get_var("whole"), s["d"], s.error(), s["c"]

    answers = {"a": "3", "b": "bee!", "c": "7", "d": "true"}
    backend.script = lambda request, prompt: answers[request.label]
    result = spelled.run()
    assert result.ret_value == (7, "3 and bee", True, None, [7])
    assert result.messages()[:4] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count to ten."},
        {"role": "assistant", "content": "3 and bee"},
        {"role": "user", "content": "More."},
    ]
    by_name = {request.label: request.sampling for request in backend.requests}
    assert by_name["a"].max_tokens == 5
    assert by_name["d"].logprobs == 0
    assert result["e"] == "x"
    with pytest.raises(ProgramError, match="is not of one call"):
        result.record("whole")
    assert list(result.text_iter("e")) == ["x"]


def test_a_join_gathers_what_all_children_set_and_keeps_what_the_parent_set(backend):
    @sgl.function
    def joined(s):
        s += sgl.gen("own")
        for round_index in range(2):
            forks = s.fork(2)
            for index, fork in enumerate(forks):
                fork += f"{round_index}{index}" + sgl.gen("shared") + sgl.gen("own")
                fork += sgl.gen(f"only_{index}")
            forks.join()
        assert "only_0" not in s
        return s["shared"], s["own"]

    backend.script = lambda request, prompt: request.label + prompt[-2:]
    shared, own = joined.run().value
    assert [value[:-2] for value in shared] == ["shared", "shared"]
    assert [value[-2:] for value in shared] == ["10", "11"]  # the second round's
    assert own.startswith("own")


def test_a_gathered_variable_of_a_failed_child_raises_its_error(backend):
    @sgl.function
    def joined(s):
        forks = s.fork(2)
        forks += sgl.gen("x")
        outcomes = forks.join()
        with pytest.raises(ProgramError, match=r'gen\("x"\) failed'):
            s["x"]
        return [isinstance(outcome, Err) for outcome in outcomes]

    backend.fail_at = {1}
    assert joined.run().value == [False, True]


def test_what_has_no_meaning_here_is_refused_with_the_way_out(backend):
    for refused, hint in (
        (sgl.image, "text only"),
        (sgl.video, "text only"),
        (sgl.flush_cache, r"Engine.clear_cache\(\)"),
        (sgl.separate_reasoning, "two calls"),
    ):
        with pytest.raises(InvalidRequest, match=hint):
            refused("x")
    with pytest.raises(InvalidRequest, match="gen has no option 'stop_regex'"):
        sgl.gen("x", stop_regex="a")
    with pytest.raises(InvalidRequest, match="choices_method scores the choices: max_tokens has no effect"):
        sgl.gen("x", choices=["a"], choices_method=sgl.token_length_normalized, max_tokens=5)
    with pytest.raises(InvalidRequest, match="temperature must be 0 in select"):
        sgl.select("x", ["a"], temperature=0.5)
    with pytest.raises(TypeError, match="num_api_spec_tokens has no effect"):
        sgl.function(num_api_spec_tokens=8)

    @sgl.function
    def appended(s):
        forks = s.fork(2)
        forks.join("concate_and_append")

    with pytest.raises(ValueError, match="gather_variable"):
        appended.run()

    @sgl.function
    def unbalanced(s, parts):
        for part in parts:
            s += part

    with pytest.raises(ProgramError, match=r"user ends at .* no message is open"):
        unbalanced.run([sgl.user_end()])
    with pytest.raises(ProgramError, match=r"user ends at .* assistant\(...\) is open"):
        unbalanced.run([sgl.assistant_begin(), sgl.user_end()])
