"""/v1/decisions: many questions about one input, one row of logits each."""

from __future__ import annotations

import math

import pytest

from tests.support.asking import chat_in_process, post

PATH = "/v1/decisions"
QUESTIONS = [
    {"type": "predicate", "instructions": "Is it about animals?", "name": "animals"},
    {"type": "choice", "instructions": "Which one?", "choices": [{"value": "cat"}, {"value": True, "description": "a truth"}, {"value": "true"}]},
    {"type": "score", "instructions": "How good?", "levels": [{"label": "bad"}, {"label": "good", "description": "fine"}]},
]  # fmt: skip


def test_answers_are_in_order_and_add_up(engine):
    answer = post(engine, PATH, {"input": "A cat sat on a mat.", "questions": QUESTIONS}).json()
    predicate, choice, score = answer["answers"]
    assert (predicate["type"], predicate["name"]) == ("predicate", "animals")
    assert 0 < predicate["probability"] < 1
    assert math.fsum(item["probability"] for item in choice["probabilities"]) == pytest.approx(1)
    assert [item["value"] for item in choice["probabilities"]] == ["cat", True, "true"]
    assert choice["confidence"] == max(item["probability"] for item in choice["probabilities"])
    expected = math.fsum(item["value"] * item["probability"] for item in score["probabilities"])
    assert score["score"] == pytest.approx(expected)


def test_probabilities_are_the_models_own(engine):
    question = {"type": "choice", "instructions": "Pick.", "choices": [{"value": "x"}, {"value": "y"}]}
    answer = post(engine, PATH, {"input": "Some input.", "questions": [question]}).json()["answers"][0]
    text = "Some input.\n\nPick.\nA. x\nB. y\nAnswer with the letter of one option only."
    ids = tuple(engine.tokenizer.encode_continuation(letter)[0] for letter in "AB")
    entry = chat_in_process(
        engine,
        [{"role": "user", "content": text}],
        max_tokens=1,
        temperature=0,
        logprobs=0,
        logprob_token_ids=ids,
        ignore_eos=True,
    ).logprobs[0]
    weights = [math.exp(value) for _, value in entry.top]
    assert [item["probability"] for item in answer["probabilities"]] == pytest.approx(
        [weight / sum(weights) for weight in weights], rel=1e-4
    )


def test_the_input_is_computed_once(engine):
    text = "A long input that all questions share. " * 12
    questions = [{"type": "predicate", "instructions": f"Is number {index} in it?"} for index in range(12)]
    usage = post(engine, PATH, {"input": text, "questions": questions, "radixrt": {"details": True}}).json()
    shared = len(engine.tokenizer.encode(text))
    assert usage["usage"]["input_tokens"] < shared + 12 * 100
    assert usage["radixrt"]["computed_tokens"] < shared + 12 * 100  # and not 12 times the input


def test_messages_and_parts_are_taken(engine):
    body = {
        "input": [
            {"role": "developer", "content": "Be strict."},
            {"role": "user", "content": [{"type": "input_text", "text": "Here is data:"}, {"type": "input_json", "data": {"a": [1, {"b": None}]}}]},
            {"role": "assistant", "content": "Thanks."},
        ],
        "questions": [{"type": "predicate", "instructions": [{"type": "input_text", "text": "Is a a list?"}]}],
    }  # fmt: skip
    assert post(engine, PATH, body).status_code == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [{"type": "guess", "instructions": "?"}]}, "questions/0"),
        ({"questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "x"}]}]}, "questions/0/choices"),
        ({"questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "x"}, {"value": "x"}]}]}, "questions"),
        ({"questions": QUESTIONS * 200}, "questions"),
        ({"temperature": 1}, "temperature"),
    ],
)  # fmt: skip
def test_bad_questions_are_refused(engine, change, param):
    response = post(engine, PATH, {"input": "x", "questions": QUESTIONS, **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
