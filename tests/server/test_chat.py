"""/v1/chat/completions on a tiny model."""

from __future__ import annotations

import asyncio
import json

import pytest

from radixrt import GrammarSpec
from tests.support import asking
from tests.support.asking import chat_in_process, run
from tests.support.servers import events

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}


def post(engine, body):
    return asking.post(engine, CHAT, body)


def test_greedy_answer_equals_the_engines(engine):
    answer = post(engine, GREEDY).json()
    expected = chat_in_process(engine, HELLO, max_tokens=12, temperature=0)
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)


def test_streamed_and_among_sixteen_equals_alone(engine):
    questions = [[{"role": "user", "content": f"Question {index}?"}] for index in range(16)]
    expected = [
        chat_in_process(engine, messages, max_tokens=10, temperature=0).text for messages in questions
    ]

    async def work(http):
        bodies = [
            {**GREEDY, "messages": messages, "max_tokens": 10, "stream": index % 2 == 0}
            for index, messages in enumerate(questions)
        ]
        return await asyncio.gather(*(http.post(CHAT, json=body) for body in bodies))

    texts = []
    for response in run(engine, work):
        if response.headers["content-type"].startswith("text/event-stream"):
            chunks = events(response.text)
            assert chunks.pop() == "[DONE]"
            texts.append("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
        else:
            texts.append(response.json()["choices"][0]["message"]["content"])
    assert texts == expected


def test_stream_has_role_once_usage_last_and_done(engine):
    body = {
        **GREEDY,
        "n": 2,
        "temperature": 1,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *chunks, done = events(post(engine, body).text)
    assert done == "[DONE]"
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert sorted(roles) == [0, 1]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    finished = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(finished) == [0, 1]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_cached_tokens_are_always_told_and_details_on_request(engine):
    messages = [{"role": "user", "content": "cache me " * 20}]
    first = post(engine, {**GREEDY, "messages": messages, "radixrt": {"details": True}}).json()
    again = post(engine, {**GREEDY, "messages": messages}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    assert "radixrt" not in again
    details = first["radixrt"]
    assert details["computed_tokens"] >= first["usage"]["completion_tokens"]
    assert details["prefixes"][0]["next_text"]


@pytest.mark.parametrize(
    "surface",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_schema_surfaces_give_valid_answers(engine, surface):
    answer = post(engine, {**GREEDY, "max_tokens": 40, **surface}).json()
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert value["a"] in (1, 2)
    assert isinstance(value["b"], bool)
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("surface", "allowed"),
    [
        ({"regex": "ab|ba"}, {"ab", "ba"}),
        ({"structured_outputs": {"regex": "ab|ba"}}, {"ab", "ba"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, {"x", "y"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, {"x", "y"}),
        ({"ebnf": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"ebnf": '%llguidance {}\nstart: "x" | "y"'}, {"x", "y"}),
        ({"structured_outputs": {"grammar": '%llguidance {}\nstart: "x" | "y"'}}, {"x", "y"}),
    ],
)
def test_other_constraints_hold(engine, surface, allowed):
    answer = post(engine, {**GREEDY, **surface}).json()
    assert answer["choices"][0]["message"]["content"] in allowed


TAGS = [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}]
OLD_TAGS = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]
NEW_FORM = {
    "type": "triggered_tags",
    "triggers": ["<f>"],
    "tags": TAGS,
    "at_least_one": True,
    "stop_after_first": True,
}


@pytest.mark.parametrize(
    "surface",
    [
        {"response_format": {"type": "structural_tag", "format": NEW_FORM}},
        {
            "structured_outputs": {
                "structural_tag": json.dumps({"type": "structural_tag", "format": NEW_FORM})
            }
        },
        {"response_format": {"type": "structural_tag", "structures": OLD_TAGS, "triggers": ["<f>"]}},
    ],
)
def test_structural_tags_hold(engine, surface):
    bias = {"60": 90, "102": 90, "62": 90}  # towards "<", "f" and ">" in any order
    sampling = {"temperature": 8, "seed": 4, "logit_bias": bias}
    answer = post(engine, {**GREEDY, "max_tokens": 90, **sampling, **surface}).json()
    text = answer["choices"][0]["message"]["content"]
    _, begin, rest = text.partition("<f>")
    assert begin
    value, end, _ = rest.partition("</f>")
    assert json.loads(value)["a"] in (1, 2)
    assert end


def test_unenforceable_keywords_are_checked_on_request(engine):
    schema = {
        "type": "array",
        "items": {"type": "integer", "maximum": 3, "minimum": 0},
        "uniqueItems": True,
        "maxItems": 2,
    }
    surface = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    asked = {**GREEDY, "max_tokens": 30, **surface, "radixrt": {"on_unsupported": "check"}}
    answer = post(engine, asked).json()
    if "error" in answer:  # as long as the engine cannot check, it says so
        assert answer["error"]["param"] == "on_unsupported"
        return
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert len(set(value)) == len(value)


def test_json_object_gives_an_object(engine):
    answer = post(engine, {**GREEDY, "max_tokens": 60, "response_format": {"type": "json_object"}}).json()
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)


def test_logprobs_cover_every_token(engine):
    answer = post(engine, {**GREEDY, "logprobs": True, "top_logprobs": 2}).json()
    expected = chat_in_process(engine, HELLO, max_tokens=12, temperature=0, logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(
        [item.logprob for item in expected.logprobs]
    )
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    joined = b"".join(bytes(entry["bytes"] or []) for entry in content)
    assert joined.decode("utf-8", "replace") == expected.text


def test_streamed_logprobs_equal_whole_ones(engine):
    body = {**GREEDY, "logprobs": True, "top_logprobs": 1}
    whole = post(engine, body).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events(post(engine, {**body, "stream": True}).text)
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole


def test_seed_is_honoured(engine):
    body = {**GREEDY, "temperature": 1.5, "seed": 11}
    texts = {post(engine, body).json()["choices"][0]["message"]["content"] for _ in range(2)}
    assert texts == {chat_in_process(engine, HELLO, max_tokens=12, temperature=1.5, seed=11).text}


def test_logit_bias_and_penalties_reach_the_engine(engine):
    biased = post(engine, {**GREEDY, "logit_bias": {"65": 100}, "max_tokens": 5}).json()
    assert biased["choices"][0]["message"]["content"] == "AAAAA"
    punished = post(
        engine, {**GREEDY, "logit_bias": {"65": 100, "66": 99}, "frequency_penalty": 2, "max_tokens": 4}
    ).json()
    assert set(punished["choices"][0]["message"]["content"]) == {"A", "B"}


def test_stop_strings_end_the_text(engine):
    whole = post(engine, GREEDY).json()["choices"][0]["message"]["content"]
    stop = whole[3]
    answer = post(engine, {**GREEDY, "stop": stop}).json()["choices"][0]
    assert answer["message"]["content"] == whole.partition(stop)[0]
    assert answer["finish_reason"] == "stop"


def test_content_parts_and_nulls_are_accepted(engine):
    parts = [
        {"type": "text", "text": "Hel"},
        {"type": "text", "text": "lo", "prompt_cache_breakpoint": {"mode": "explicit"}},
    ]
    nulls = dict.fromkeys(
        (
            "tools",
            "tool_choice",
            "stop",
            "seed",
            "logprobs",
            "response_format",
            "user",
            "n",
            "stream",
            "top_p",
        )
    )
    answer = post(engine, {**GREEDY, **nulls, "messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 200
    assert (
        answer.json()["choices"][0]["message"]["content"]
        == chat_in_process(engine, HELLO, max_tokens=12, temperature=0).text
    )


def test_final_message_is_continued(engine):
    whole = post(engine, GREEDY).json()["choices"][0]["message"]["content"]
    begun = {"role": "assistant", "content": whole[:2]}
    body = {**GREEDY, "messages": [*HELLO, begun], "continue_final_message": True}
    assert post(engine, body).json()["choices"][0]["message"]["content"].startswith(whole[2:6])


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"temperatur": 1}, "temperatur", 'Did you mean "temperature"'),
        ({"temperature": -1}, "temperature", "temperature must be in"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be"),
        ({"n": 1000}, "n", "n must be"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}, "messages/0/content/0/type", "text"),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
        ({"functions": []}, "functions", "use tools"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "one constraint"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs/jsn", "unknown field"),
        ({"regex": "(a"}, "regex", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True, "type": "array"}}}}, "response_format/json_schema/schema/uniqueItems", "uniqueItems"),
        ({"model": "gpt-9"}, "model", "no model"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"ebnf": "root ::= nope"}, "ebnf", "nope"),
        ({"radixrt": {"on_unsupported": "check"}}, "radixrt/on_unsupported", "JSON Schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "needs format"),
        ({"response_format": {"type": "json_object", "triggers": ["x"]}}, "response_format/triggers", "needs type"),
        ({"structured_outputs": {"structural_tag": '{"type": "structural_tg"}'}}, "structured_outputs/structural_tag/type", "Input should be"),
        ({"store": True}, "store", "False"),
    ],
)  # fmt: skip
def test_bad_field_is_400_and_named(engine, change, param, text):
    response = post(engine, {**GREEDY, **change})
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert text in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"].startswith("req_")


def test_grammar_spec_of_choices_is_the_engines(engine):
    body = {**GREEDY, "structured_outputs": {"choice": ["alpha", "beta"]}}
    expected = chat_in_process(
        engine, HELLO, max_tokens=12, temperature=0, grammar=GrammarSpec.choice(["alpha", "beta"])
    )
    assert post(engine, body).json()["choices"][0]["message"]["content"] == expected.text


def test_template_variables_must_be_the_templates_own(engine):
    for kwargs in ({"chat_template": "x"}, {"tools": []}, {"tokenize": False}, {"enable_thinking": True}):
        response = post(engine, {**GREEDY, "chat_template_kwargs": kwargs})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"chat_template_kwargs/{next(iter(kwargs))}"
    offered = post(
        engine, {**GREEDY, "reasoning_effort": "low", "verbosity": "low"}
    )  # this template reads neither
    assert offered.json()["choices"] == post(engine, GREEDY).json()["choices"]
