"""OpenAI's own client against a real server."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
ASK = [{"role": "user", "content": "Name a colour. Answer with one word."}]


class Review(BaseModel):
    product: str
    stars: Literal[1, 2, 3, 4, 5]
    is_good: bool
    tags: list[Literal["cheap", "loud", "heavy"]]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="test-key-1", max_retries=0) as client:
        yield client


def ask(client, **fields):
    return client.chat.completions.create(
        **{"model": MODEL, "messages": ASK, "max_tokens": 16, "temperature": 0, **fields}
    )


def test_chat_whole_and_streamed_are_the_same(client):
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert whole._request_id.startswith("req_")


def test_parse_with_pydantic(client):
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "A lamp that broke after two days. Write a review as JSON."}],
        response_format=Review,
        max_completion_tokens=64,
        temperature=0,
    )
    assert isinstance(completion.choices[0].message.parsed, Review)
    assert completion.choices[0].finish_reason == "stop"


def test_parse_raises_on_an_answer_that_is_cut_off_only_if_it_is(client):
    with pytest.raises(
        openai.BadRequestError
    ):  # no review fits into so few tokens: told before, not by half a JSON
        client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Review, max_completion_tokens=4
        )


def test_stream_helper_parses_and_tells_events(client):
    kinds = set()
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Review a chair as JSON."}],
        response_format=Review,
        max_completion_tokens=64,
        temperature=0,
        logprobs=True,
    ) as stream:
        for event in stream:
            kinds.add(event.type)
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Review)
    assert {
        "chunk",
        "content.delta",
        "content.done",
        "logprobs.content.delta",
        "logprobs.content.done",
    } <= kinds


def test_logprobs(client):
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    assert (
        b"".join(bytes(item.bytes or []) for item in choice.logprobs.content).decode()
        == choice.message.content
    )
    for item in choice.logprobs.content:
        assert item.logprob == pytest.approx(item.top_logprobs[0].logprob)  # greedy: the likeliest is taken
        assert len(item.top_logprobs) == 3


def test_completions_and_samples(client):
    answer = client.completions.create(
        model=MODEL, prompt=["One, two,", "Red, green,"], max_tokens=6, n=2, seed=1, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(answer.choices[0].logprobs.tokens) == 6
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(
            model=MODEL, prompt="One, two,", max_tokens=6, seed=1, stream=True
        )
        if chunk.choices
    )
    assert text == answer.choices[0].text


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "radixrt"


def test_decisions(client):
    decision = client.decisions.create(
        model=MODEL,
        input="I love this lamp, it is wonderful and bright.",
        questions=[
            {"type": "predicate", "instructions": "The customer is happy.", "name": "happy"},
            {"type": "choice", "instructions": "What is it about?", "choices": [{"value": "lamp"}, {"value": "car"}]},
            {"type": "score", "instructions": "How positive is it?", "levels": [{"label": "bad"}, {"label": "fine"}, {"label": "great"}]},
        ],
    )  # fmt: skip
    predicate, choice, score = decision.answers
    assert predicate.name == "happy"
    assert 0 < predicate.probability < 1
    assert choice.choice in ("lamp", "car")
    assert 1 <= score.score <= 3
    assert decision.usage.input_tokens_details.cached_tokens < decision.usage.input_tokens


def test_error_classes(client, server):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, temperature=9000)
    assert (caught.value.param, caught.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="gpt-4o")
    assert missing.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=f"{server}/v1", api_key="wrong-key-1", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        ask(stranger)
    with pytest.raises(openai.BadRequestError) as unsupported:
        ask(client, extra_body={"guided_json": {}})
    assert unsupported.value.param == "guided_json"
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError) as keyword:
        ask(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert keyword.value.param.endswith("/uniqueItems")
    with pytest.raises(openai.InternalServerError) as late:
        ask(client, max_tokens=2000, extra_body={"ignore_eos": True, "radixrt": {"timeout_s": 0.1}})
    assert late.value.status_code == 504


def test_an_error_in_mid_stream_raises(client):
    late = {"ignore_eos": True, "radixrt": {"timeout_s": 1.5}}
    with pytest.raises(openai.APIError) as caught:
        for _ in ask(client, max_tokens=4000, stream=True, extra_body=late):
            pass
    assert "timeout" in str(caught.value) or "deadline" in str(caught.value).lower()


def test_extensions_travel_in_extra_body(client):
    answer = ask(
        client, extra_body={"structured_outputs": {"choice": ["red", "blue"]}, "radixrt": {"details": True}}
    )
    assert answer.choices[0].message.content in ("red", "blue")
    assert answer.model_extra["radixrt"]["forced_tokens"] >= 0


def test_the_async_client_and_cancellation(server):
    async def go():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="test-key-1") as client:
            answers = await asyncio.gather(*(ask(client, max_tokens=8) for _ in range(8)))
            stream = await ask(client, max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
            async for _ in stream:
                break
            await stream.close()
            return {answer.choices[0].message.content for answer in answers}

    assert len(asyncio.run(go())) == 1


def test_a_full_server_is_retried_until_it_has_room(server):
    """429 carries retry-after, which the client obeys."""
    from tests.support.servers import served

    with served("smollm2-135m", "--max-requests", "1", "--num-pages", "512") as (url, _):

        async def go():
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8) as client:
                return await asyncio.gather(*(ask(client, max_tokens=4) for _ in range(3)))

        assert len(asyncio.run(go())) == 3
