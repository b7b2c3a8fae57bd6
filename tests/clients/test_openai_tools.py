"""OpenAI's own client against a real server: tools and responses."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"


class GetWeather(BaseModel):
    """Tell the weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    unit: Literal["C", "F"]


TOOL = openai.pydantic_function_tool(GetWeather)
ASK = [{"role": "user", "content": "How warm is it in Rome, in C?"}]
FLAT = {
    "type": "function",
    "name": "GetWeather",
    "description": "Tell the weather of a city.",
    "parameters": TOOL["function"]["parameters"],
    "strict": True,
}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="test-key-1", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "GetWeather"}}], ids=str
)
def test_parse_gives_arguments_as_the_model_that_was_asked_for(client, choice):
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=ASK,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=80,
        temperature=0,
    )
    [answer] = completion.choices
    [call] = answer.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert answer.finish_reason == "tool_calls"


def test_auto_answers_and_takes_the_conversation_back(client):
    first = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=80, temperature=0
    )
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temperature": 21})}
        for call in message.tool_calls
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=[*ASK, message, *results], tools=[TOOL], max_tokens=30, temperature=0
    )
    assert second.choices[0].message.content or second.choices[0].message.tool_calls


def test_the_stream_helper_puts_calls_together(client):
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=80, temperature=0
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    [call] = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_responses_are_the_chats_answers(client):
    response = client.responses.create(
        model=MODEL, instructions="Be brief.", input="Name a colour.", max_output_tokens=16, temperature=0
    )
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}],
        max_tokens=16,
        temperature=0,
    )
    assert response.output_text == chat.choices[0].message.content


def test_responses_parse_text_and_calls(client):
    parsed = client.responses.parse(
        model=MODEL, input="Rome, in C, as JSON.", text_format=GetWeather, max_output_tokens=60, temperature=0
    )
    assert isinstance(parsed.output_parsed, GetWeather)
    called = client.responses.parse(
        model=MODEL,
        input=ASK,
        tools=[openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=80,
        temperature=0,
    )
    assert called.output[0].type == "function_call"
    GetWeather.model_validate_json(called.output[0].arguments)


def test_responses_stream_helper_follows_the_events(client):
    with client.responses.stream(
        model=MODEL, input=ASK, tools=[FLAT], tool_choice="required", max_output_tokens=80, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    GetWeather.model_validate_json(final.output[0].arguments)
    with client.responses.stream(
        model=MODEL, input="Name a colour.", max_output_tokens=12, temperature=0
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text


def test_what_needs_a_memory_is_a_bad_request(client):
    for fields in ({"store": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            client.responses.create(model=MODEL, input="x", **fields)


def test_a_strict_schema_that_cannot_be_enforced_is_a_bad_request(client):
    class Bag(BaseModel):
        words: set[str]

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[openai.pydantic_function_tool(Bag)], max_tokens=20
        )
    assert caught.value.param == "tools/0/function/parameters/properties/words/uniqueItems"
