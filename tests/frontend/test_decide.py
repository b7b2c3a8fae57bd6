"""Many questions about one input: each one row of logits, exact, and nothing of it stays."""

import math

import pytest

from frontend_lang import ProgramError, choice, decide, gen, predicate, program, score, system, user
from radixrt import (
    Engine,
    GenerateRequest,
    GenerationOutput,
    InvalidRequest,
    SamplingParams,
    TokenLogprob,
)
from tests.support.backends import ScriptedBackend
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(60)
QUESTIONS = {
    "is_spam": predicate("Is it spam?"),
    "topic": choice("Which topic?", ["sport", "food", "art"]),
    "anger": score("How angry?"),
}


@program
def judged(s, text, questions):
    s += "Mail: " + text
    before = s.text()
    decisions = s.decide(questions)
    assert s.text() == before
    s += gen("next", max_tokens=2)
    return decisions


@program
def chat_judged(s, text, questions):
    s += system("Read.") + user(text)
    return s.decide(questions)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    with Engine(folder, dtype="float32", checks="step", num_pages=900, page_size=4, threads=1) as engine:
        yield engine


def logprob(engine, prompt_ids, token_ids):
    """Score token ids behind a prompt, in a request of their own."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    output = engine.generate([*prompt_ids, *token_ids], sampling)
    return math.fsum(entry.logprob for entry in output.prompt_logprobs[-len(token_ids) :])


def test_probabilities_are_the_models_own(engine):
    engine.clear_cache()
    result = judged.with_options(engine=engine).run("Win a prize now!", QUESTIONS)
    prefix = engine.tokenizer.encode("Mail: Win a prize now!")
    for name, question in QUESTIONS.items():
        prompt = prefix + engine.tokenizer.encode_continuation(f"\n\nQuestion: {question.text}\nAnswer: ")
        totals = [
            logprob(engine, prompt, engine.tokenizer.encode_continuation(label)[:1])
            for label in question.labels
        ]
        whole = math.fsum(map(math.exp, totals))
        decision = result.value[name]
        for value, total in zip(question.values, totals, strict=True):
            assert decision.probabilities[value] == pytest.approx(math.exp(total) / whole, abs=1e-4)
        assert decision.value == question.values[totals.index(max(totals))]
        assert math.fsum(decision.probabilities.values()) == pytest.approx(1)
        # the space before the labels is a token of its own here: the mass is what follows it
        assert decision.label_mass == pytest.approx(whole, abs=1e-4)


def test_every_question_computes_only_itself(engine):
    engine.clear_cache()
    text = "a long mail " * 20
    runner = judged.with_options(engine=engine)
    runner.run(text, {"first": QUESTIONS["is_spam"]})
    result = runner.run(text, QUESTIONS)
    call = next(call for call in result.calls if call.kind == "decide")
    suffixes = sum(len(f"\n\nQuestion: {question.text}\nAnswer: ") for question in QUESTIONS.values())
    missed = call.usage.prompt_tokens - call.usage.cached_tokens
    assert missed <= suffixes + 2 * sum(len(question.labels) for question in QUESTIONS.values())
    assert call.usage.cached_tokens >= len(QUESTIONS) * len(call.prompt_ids) - 8


def test_in_a_chat_the_question_is_the_users_and_the_answer_the_assistants():
    prompts = []

    class Rows(ScriptedBackend):
        async def generate(self, request: GenerateRequest) -> GenerationOutput:
            prompts.append(self.decode(request.prompt_ids))
            output = await super().generate(request)
            top = tuple((ord(label) + 10, -float(rank)) for rank, label in enumerate("ynBA"))
            sample = output.samples[0]
            return GenerationOutput(
                output.prompt_ids,
                (
                    type(sample)(
                        sample.text, sample.token_ids, sample.finish_reason, (TokenLogprob(0, -9.0, top),)
                    ),
                ),
                output.usage,
            )

    backend = Rows()
    questions = {"spam": QUESTIONS["is_spam"], "topic": choice("Which?", ["a", "b"])}
    decisions = chat_judged.with_options(backend=backend).run("Hello", questions).value
    assert prompts[0].endswith("user\nIs it spam?\nAnswer yes or no.\nassistant\n")
    assert decisions["spam"].value is True
    assert decisions["spam"].probability == pytest.approx(1 / (1 + math.exp(-1)))
    assert decisions["topic"].value == "b"
    assert decisions["spam"].mean == decisions["spam"].probabilities[True]
    assert backend.requests[0].sampling.max_tokens == 1


def test_labels_that_others_begin_with_count_only_as_far_as_none_goes_on():
    @program
    def levels(s):
        s += "X"
        return s.decide({"level": score("How much?", [1, 10, 12, 7])})

    halves = {
        "1": [math.log(0.8)],
        "10": [math.log(0.8), math.log(0.5)],
        "12": [math.log(0.8), math.log(0.25)],
    }
    scores = {**halves, "7": [math.log(0.2)]}
    decision = levels.with_options(backend=ScriptedBackend(scores=scores)).run().value["level"]
    expected = {1: 0.8 * 0.25, 10: 0.8 * 0.5, 12: 0.8 * 0.25, 7: 0.2}
    for value, weight in expected.items():
        assert decision.probabilities[value] == pytest.approx(weight)
    assert decision.mean == pytest.approx(sum(value * weight for value, weight in expected.items()))


def test_a_label_that_is_far_from_likely_has_its_exact_probability_too(engine):
    many = choice("Which of all?", [f"option {index}" for index in range(26)])
    result = judged.with_options(engine=engine).run("Mail", {"many": many})
    assert len(result.value["many"].probabilities) == 26
    prefix = engine.tokenizer.encode("Mail: Mail")
    prompt = prefix + engine.tokenizer.encode_continuation(f"\n\nQuestion: {many.text}\nAnswer: ")
    totals = [
        math.exp(logprob(engine, prompt, engine.tokenizer.encode_continuation(label)))
        for label in many.labels
    ]
    for value, total in zip(many.values, totals, strict=True):
        assert result.value["many"].probabilities[value] == pytest.approx(total / math.fsum(totals), abs=1e-4)


def test_decisions_are_variables_and_fail_like_every_call():
    call = decide("all", QUESTIONS)

    @program
    def handled(s):
        s += "X" + call
        return s[call], s["all"]

    with pytest.raises(ProgramError, match="decide needs a runtime that gives log-probabilities"):
        handled.with_options(backend=ScriptedBackend()).run()
    backend = ScriptedBackend(fail_at={0, 1, 2})
    with pytest.raises(ProgramError, match=r'decide\("all"\) failed at .*EngineStopped'):
        handled.with_options(backend=backend).run()
    assert backend.running == 0


def test_questions_are_checked_where_they_are_written():
    with pytest.raises(InvalidRequest, match="dict of questions"):
        decide("x", {})
    with pytest.raises(InvalidRequest, match="'a' must be predicate"):
        decide("x", {"a": "Is it?"})
    with pytest.raises(InvalidRequest, match="a question must be text"):
        predicate("  ")
    with pytest.raises(InvalidRequest, match="options must be distinct"):
        choice("Which?", ["a", "a"])
    with pytest.raises(InvalidRequest, match="options must be a list of 2 to 26"):
        choice("Which?", ["a"])
    with pytest.raises(InvalidRequest, match="levels must be whole numbers"):
        score("How?", [1, "2"])
