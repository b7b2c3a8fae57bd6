"""/v1/responses on a tiny model: items, events, and what needs a memory."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.asking import post
from tests.support.deadlines import LONG_S, deadlines_pass

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
BODY = {"input": "Hello", "max_output_tokens": 12, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
EVENT = TypeAdapter(ResponseStreamEvent)


def streamed(engine, body):
    """Give a stream's events; their names are their types, and OpenAI's own models take them."""
    text = post(engine, RESPONSES, {**body, "stream": True}).text
    found = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert EVENT.validate_python(event).type == event["type"]
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def plain(items):
    """Give items without their ids."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_the_answer_is_the_chats(engine):
    answer = post(engine, RESPONSES, {**BODY, "instructions": "Be brief"}).json()
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    chat = post(engine, CHAT, {"messages": messages, "max_tokens": 12, "temperature": 0}).json()
    response = Response.model_validate(answer)
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == 12
    assert answer["store"] is False
    again = post(engine, RESPONSES, {**BODY, "instructions": "Be brief"}).json()
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == again["usage"]["input_tokens"] - 1


def test_events_of_text_come_in_their_order(engine):
    events = streamed(engine, BODY)
    kinds = [event["type"].removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 1
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * num_deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == text
    assert [event["text"] for event in events if event["type"] == "response.output_text.done"] == [text]
    assert plain(last["output"]) == plain(post(engine, RESPONSES, BODY).json()["output"])
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_events_of_calls_come_in_their_order(engine):
    no_end = {str(token_id): -100 for token_id in engine.tokenizer.eos_ids}
    body = {
        **BODY,
        "tools": [TOOL],
        "tool_choice": "required",
        "max_output_tokens": 150,
        "logit_bias": no_end,
    }
    events = streamed(engine, body)
    calls = events[-1]["response"]["output"]
    assert len(calls) > 1
    assert events[-1]["type"] == "response.completed"
    for index, call in enumerate(calls):
        mine = [event for event in events if event.get("output_index") == index]
        kinds = [event["type"].removeprefix("response.") for event in mine]
        assert kinds[0] == "output_item.added"
        assert kinds[-2:] == ["function_call_arguments.done", "output_item.done"]
        assert set(kinds[1:-2]) == {"function_call_arguments.delta"}
        assert "".join(event["delta"] for event in mine[1:-2]) == call["arguments"] == mine[-2]["arguments"]
        assert json.loads(call["arguments"])["a"] in (1, 2)
        assert call["status"] == "completed"
        assert len({event.get("item_id", call["id"]) for event in mine}) == 1
    whole = post(engine, RESPONSES, body).json()
    assert plain(whole["output"]) == plain(calls)


def test_a_schema_stands_flat_in_text_format(engine):
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    answer = post(engine, RESPONSES, {**BODY, "text": text, "max_output_tokens": 40}).json()
    assert json.loads(answer["output"][0]["content"][0]["text"])["a"] in (1, 2)
    assert answer["text"]["format"] == text["format"]
    assert answer["status"] == "completed"


def test_logprobs_cover_every_token_streamed_or_not(engine):
    body = {**BODY, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = post(engine, RESPONSES, body).json()["output"][0]["content"][0]["logprobs"]
    assert len(whole) == 12
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    events = streamed(engine, body)
    told = [
        entry
        for event in events
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == whole
    assert told == whole[: len(told)]


def test_answers_and_results_are_taken_back(engine):
    first = post(
        engine, RESPONSES, {**BODY, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 60}
    ).json()
    text = post(engine, RESPONSES, BODY).json()["output"]
    call = first["output"][0]
    items = [
        {"role": "user", "content": "Hello"},
        *text,
        *first["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "fine"},
        {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
    ]
    answer = post(engine, RESPONSES, {**BODY, "input": items, "tools": [TOOL]})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"store": True}, "store", "keeps no responses"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"conversation": "c"}, "conversation", "keeps no responses"),
        ({"background": True}, "background", "keeps no responses"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"n": 2}, "n", "null"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ({"inputs": 1}, "inputs", 'Did you mean "input"'),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array", "uniqueItems": True}}}}, "text/format/schema/uniqueItems", "uniqueItems"),
        ({"tools": [{"type": "web_search"}]}, "tools/0/type", "function"),
        ({"tools": [TOOL, TOOL]}, "tools/1/name", "two tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice/name", "not in tools"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}], "instructions": "i"}, "input/1/tool_calls/0/function/arguments", "JSON object"),
        ({"input": [{"type": "input_image"}]}, "input/0", ""),
    ],
)  # fmt: skip
def test_a_bad_field_is_400_and_named(engine, change, param, text):
    response = post(engine, RESPONSES, {**BODY, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param)
    assert text in error["message"]


def test_a_failure_in_mid_stream_is_an_error_event(engine):
    body = {**BODY, "stream": True, "max_output_tokens": 1500, "radixrt": {"timeout_s": LONG_S}}
    with deadlines_pass(engine):
        text = post(engine, RESPONSES, body).text
    last = json.loads(text.strip().split("\n\n")[-1].split("\n")[1].removeprefix("data: "))
    assert last["type"] == "error"
    assert last["code"] == last["error"]["code"] == "deadline_exceeded"
    assert "response.completed" not in text
