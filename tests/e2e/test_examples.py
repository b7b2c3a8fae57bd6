"""Every example runs on the small default model, does what its first line says, and computes no token twice."""

import contextlib
import functools
import importlib.util
import io
import json
from pathlib import Path

import pytest

from frontend_lang import Ok, ProgramResult, Trace
from radixrt import Engine

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture(scope="module")
def engine():
    with Engine("smollm2-135m") as engine:
        yield engine


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run_example(engine):
    """Run an example on an empty cache, once for all tests; give its module, what main gave and what it printed."""

    @functools.cache
    def run(name):
        module = load(name)
        engine.clear_cache()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            returned = module.main(engine)
        return module, returned, printed.getvalue()

    return run


def results_of(returned):
    """Give the results of an example, whether it ran its program once or for many items."""
    if isinstance(returned, ProgramResult):
        return [returned]
    assert all(isinstance(outcome, Ok) for outcome in returned)
    return [outcome.unwrap() for outcome in returned]


def test_every_example_has_a_test():
    tested = {name.removeprefix("test_the_").removesuffix("_example") for name in globals()}
    assert set(NAMES) <= tested


def test_the_hello_example(run_example):
    _, result, printed = run_example("hello")
    assert "Paris" in result["answer"]
    assert "Paris" in printed


def test_the_chat_example(run_example):
    module, result, _ = run_example("chat")
    assert len(result.value) == len(module.QUESTIONS)
    assert [message["role"] for message in result.messages()] == ["system", *["user", "assistant"] * 3]


def test_the_few_shot_example(run_example, engine):
    module, outcomes, _ = run_example("few_shot")
    results = [outcome.unwrap() for outcome in outcomes]
    assert [result.value for result in results][:2] == [8, 30]
    shared = len(engine.tokenizer.encode(results[0].text().split(module.QUESTIONS[0])[0]))
    firsts = [result.calls[0] for result in results]
    assert sum(call.cached_tokens >= shared - 1 for call in firsts) >= len(firsts) - 1


def test_the_react_example(run_example):
    _, result, _ = run_example("react")
    actions = [json.loads(call.text) for call in result.calls if call.name == "call"]
    assert actions[0] == {"name": "population", "arguments": {"country": "France"}}
    assert actions[-1]["name"] == "finish"
    assert "Observation: 68 million" in result.text()
    assert result.value == actions[-1]["arguments"]["answer"] == "68 million"


def test_the_tree_of_thought_example(run_example):
    module, result, _ = run_example("tree_of_thought")
    ideas = [call for call in result.calls if call.name == "idea"]
    assert len(ideas) == module.NUM_IDEAS * (1 + module.NUM_KEPT)
    assert len({call.branch for call in ideas}) == len(ideas)
    assert result.value.count("Step ") == module.NUM_STEPS
    ratings = {
        call.branch.rpartition("/")[0]: call.distribution[" yes"]
        for call in result.calls
        if call.distribution
    }
    firsts = sorted((path for path in ratings if path.count("/") == 1), key=ratings.get, reverse=True)
    grown = {path.rpartition("/")[0] for path in ratings if path.count("/") == 2}
    assert grown == set(firsts[: module.NUM_KEPT])


def test_the_skeleton_of_thought_example(run_example):
    module, result, _ = run_example("skeleton_of_thought")
    sentences = [call for call in result.calls if call.name == "sentence"]
    assert [call.branch for call in sentences] == [f"root/{index}" for index in range(module.NUM_POINTS)]
    assert result.value.splitlines() == [
        f"{result[f'point {index + 1}'].strip()}: {call.text}" for index, call in enumerate(sentences)
    ]


def test_the_judge_example(run_example):
    module, result, _ = run_example("judge")
    assert list(result.value) == module.DIMENSIONS
    assert result["verdict"] in ("good", "bad")
    assert sum(result.record("verdict").distribution.values()) == pytest.approx(1.0)
    assert [call.branch for call in result.calls] == ["root/0", "root/1", "root/2", "root"]


def test_the_json_extract_example(run_example):
    module, outcomes, _ = run_example("json_extract")
    orders = [outcome.unwrap().value for outcome in outcomes]
    assert len(orders) == len(module.DOCUMENTS)
    assert all(isinstance(order, module.Order) for order in orders)
    assert (orders[0].customer, orders[0].quantity, orders[0].size) == ("Clara", 12, "large")
    assert all(outcome.unwrap().usage.forced_tokens > 0 for outcome in outcomes)


def test_the_retrieval_example(run_example):
    module, outcomes, _ = run_example("retrieval")
    assert "40 minutes" in outcomes[0]["answer"]
    assert "12 crowns" in outcomes[1]["answer"]
    first, second = (module.retrieve(question) for question in module.QUESTIONS[:2])
    assert first == second  # so the second question shares the passages with the first
    calls = [result.calls[0] for result in results_of(outcomes)]
    shared = sum(one == other for one, other in zip(calls[0].prompt_ids, calls[1].prompt_ids, strict=False))
    assert max(calls[0].cached_tokens, calls[1].cached_tokens) >= shared - 10 > 80


def test_the_self_consistency_example(run_example):
    module, result, _ = run_example("self_consistency")
    assert sum(count for _, count in result.value.counts) == module.NUM_SAMPLES
    assert result.value.value == 30
    steps = [call for call in result.calls if call.name == "steps"]
    assert sum(call.cached_tokens >= call.prompt_tokens - 1 for call in steps) >= module.NUM_SAMPLES - 1


def test_the_decisions_example(run_example):
    module, result, _ = run_example("decisions")
    assert set(result.value) == set(module.QUESTIONS)
    for name, question in module.QUESTIONS.items():
        decision = result.value[name]
        assert decision.value in question.values
        assert sum(decision.probabilities.values()) == pytest.approx(1)
        assert 0 < decision.label_mass <= 1
    (call,) = result.calls
    letter = len(result.token_ids())
    num_asked = len(module.QUESTIONS)
    assert call.cached_tokens >= (num_asked - 1) * (letter - 1)  # the letter is computed once


def kept_ids(call, engine):
    """Give a call's tokens as far as they say its text and nothing beyond (a stop string may cut one in two)."""
    for num_kept in range(len(call.token_ids), 0, -1):
        if call.text.startswith(engine.tokenizer.decode(list(call.token_ids[:num_kept]))):
            return call.token_ids[:num_kept]
    return ()


def before(call, result):
    """Give the last call whose text stands in a call's transcript: of its own branch, or one that it parted from."""
    text = result.trace.prompt(call.index)
    earlier = [
        other
        for other in result.calls
        if other is not call
        and (call.branch == other.branch or call.branch.startswith(f"{other.branch}/"))
        and text.startswith(result.trace.prompt(other.index) + other.text)
    ]
    return max(earlier, key=lambda other: len(other.prompt_ids), default=None)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_never_tokenized_again(run_example, engine, name):
    """What a call sent and got stands in the prompt of the next one id for id."""
    _, returned, _ = run_example(name)
    num_followers = 0
    for result in results_of(returned):
        for call in result.calls:
            if (earlier := before(call, result)) is not None:
                num_followers += 1
                known = (*earlier.prompt_ids, *kept_ids(earlier, engine))
                assert call.prompt_ids[: len(known)] == known
    assert num_followers >= NUM_FOLLOWERS.get(name, 0)


NUM_FOLLOWERS = {
    "chat": 2,
    "few_shot": 6,
    "react": 3,
    "self_consistency": 5,
    "skeleton_of_thought": 5,
    "tree_of_thought": 15,
}


def sent(recorded):
    """Give all that a recorded call sent, and all of it that the model has computed when the call is done."""
    prompt = recorded.request.prompt_ids
    if recorded.continuations:
        return [prompt] * len(recorded.continuations), [
            (*prompt, *continuation) for continuation in recorded.continuations
        ]
    written = tuple(token_id for chunk in recorded.chunks for token_id in chunk.token_ids)
    usage = usages_of(recorded)[0]
    # What was drawn last, or forced at the very end, was never put into the model.
    return [prompt], [(*prompt, *written)[: usage.cached_tokens + usage.computed_tokens]]


def num_shared(left, right):
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))


def usages_of(recorded):
    return [score.usage for score in recorded.scores] or [
        chunk.usage for chunk in recorded.chunks if chunk.usage is not None
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_computed_is_never_computed_again(run_example, name):
    """Of what earlier calls of the run have computed, a call takes all but its prompt's last token from the cache."""
    _, returned, printed = run_example(name)
    num_known = 0
    for result in results_of(returned):
        calls = result.trace.recording.calls
        for call in calls:
            known = [
                ids
                for other in calls
                if other.started_s + other.seconds <= call.started_s
                for ids in sent(other)[1]
            ]
            prompts, _ = sent(call)
            least = [
                min(max((num_shared(prompt, ids) for ids in known), default=0), len(prompt) - 1)
                for prompt in prompts
            ]
            assert sum(usage.cached_tokens for usage in usages_of(call)) >= sum(least)
            num_known += sum(least)
    assert num_known > 20 or name not in NUM_FOLLOWERS
    assert "cached" in printed
    assert str(sum(result.usage.cached_tokens for result in results_of(returned))) in printed


def test_the_second_level_of_a_fork_computes_its_own_tokens_only(run_example, engine):
    _, result, _ = run_example("tree_of_thought")
    seconds = [call for call in result.calls if call.name == "idea" and call.branch.count("/") == 2]
    assert seconds
    for call in seconds:
        parent = next(
            other
            for other in result.calls
            if other.name == "idea" and other.branch == call.branch.rpartition("/")[0]
        )
        own = len(call.prompt_ids) - len(parent.prompt_ids) - len(kept_ids(parent, engine))
        assert call.prompt_tokens - call.cached_tokens <= own + 1


# name -> its program, the first arguments it is run with, the options of the run
RUNS = {
    "chat": ("converse", "QUESTIONS", {}),
    "decisions": ("read_letter", "LETTER", {}),
    "few_shot": ("solve", "QUESTIONS", {"temperature": 0}),
    "hello": ("answer", "QUESTION", {}),
    "json_extract": ("extract", "DOCUMENTS", {}),
    "judge": ("judge", "ESSAY", {}),
    "react": ("agent", "QUESTION", {"temperature": 0}),
    "retrieval": ("answer", "QUESTIONS", {}),
    "self_consistency": ("solve", "QUESTION", {}),
    "skeleton_of_thought": ("explain", "QUESTION", {}),
    "tree_of_thought": ("plan", "TASK", {}),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_saved_run_of_an_example_replays_to_the_bit(run_example, name, tmp_path):
    module, returned, _ = run_example(name)
    result = results_of(returned)[0]
    result.trace.save(tmp_path / "run.json")
    trace = Trace.load(tmp_path / "run.json")
    assert trace == result.trace
    program, given, options = RUNS[name]
    argument = getattr(module, given)
    if len(results_of(returned)) > 1:
        argument = argument[0]
    replay = trace.replay()
    again = getattr(module, program).with_options(backend=replay, **options).run(argument)
    assert replay.unused == ()
    assert (again.value, again.variables) == (result.value, result.variables)
    assert (again.text(), again.token_ids()) == (result.text(), result.token_ids())
    for branch in trace.branches:
        assert again.trace.text(branch.path) == trace.text(branch.path)
    assert by_place(again.calls) == by_place(result.calls)


def by_place(calls):
    """Give all of the calls but when they ran: their times, and who of several branches was first."""
    names = [name for name in calls[0].__dataclass_fields__ if name not in ("index", "seconds")]
    return [
        [getattr(call, name) for name in names]
        for call in sorted(calls, key=lambda call: (call.branch, call.index))
    ]
