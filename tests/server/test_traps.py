"""Where servers of this kind break real clients: the traps of the list, each a test. Clients themselves: tests/clients/."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from radixrt import Engine
from radixrt.config import ServerConfig
from radixrt.server import create_app
from radixrt.server.service import NUM_GRAMMAR_THREADS
from tests.support.asking import chat_in_process, get, post, run
from tests.support.deadlines import LONG_S, deadlines_pass
from tests.support.servers import client_of, events, scope_of
from tests.support.threads import wait_until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
FIELDS = {"message", "type", "param", "code"}


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == FIELDS
    assert response.headers["x-request-id"]
    return body["error"]


def test_validation_errors_are_400_and_never_422(engine):
    for body in (
        {},
        {"messages": "x"},
        {"messages": [{"role": "king", "content": "x"}]},
        {**GREEDY, "temperature": []},
        [],
        "x",
    ):
        response = post(engine, CHAT, body)
        assert response.status_code == 400
        error_of(response)

    async def work(http):
        return await http.post(CHAT, content=b"{not json", headers={"content-type": "application/json"})

    assert error_of(run(engine, work))["param"] == "body"


def test_unknown_model_is_404_model_not_found(engine):
    for response in (post(engine, CHAT, {**GREEDY, "model": "gpt-4o"}), get(engine, "/v1/models/gpt-4o")):
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"


def test_unknown_routes_and_methods_have_the_same_body(engine):
    assert error_of(get(engine, "/v1/nothing"))["code"] == "not_found"
    assert get(engine, CHAT).status_code == 405
    error_of(get(engine, CHAT))


def test_other_content_types_are_415(engine):
    async def work(http):
        return await http.post(CHAT, content=json.dumps(GREEDY), headers={"content-type": "text/plain"})

    assert run(engine, work).status_code == 415


def test_a_bad_schema_is_400_with_a_pointer_and_not_retried(engine):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    surface = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    response = post(engine, CHAT, {**GREEDY, **surface})
    assert response.status_code == 400  # the SDK retries 408, 409, 429 and 5xx only
    assert error_of(response)["param"] == "response_format/json_schema/schema/properties/a/uniqueItems"
    streamed = post(engine, CHAT, {**GREEDY, **surface, "stream": True})
    assert (streamed.status_code, streamed.json()) == (400, response.json())


def test_a_full_queue_is_429_with_retry_after(model_folder, engine):
    with Engine(
        model_folder,
        device="cpu",
        dtype="float32",
        kernels="torch",
        num_pages=64,
        max_running=1,
        max_waiting=1,
    ) as small:

        async def work(http):
            long = {**GREEDY, "max_tokens": 60, "ignore_eos": True}
            return await asyncio.gather(
                *(http.post(CHAT, json={**long, "stream": index % 2 == 0}) for index in range(8))
            )

        answers = run(small, work)
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert error_of(answer)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1

    async def too_many(http):
        return await asyncio.gather(*(http.post(CHAT, json=GREEDY) for _ in range(4)))

    codes = sorted(answer.status_code for answer in run(engine, too_many, max_requests=1))
    assert codes == [200, 429, 429, 429]


def test_a_deadline_is_504_and_not_retried(engine):
    body = {**GREEDY, "max_tokens": 1500, "ignore_eos": True, "radixrt": {"timeout_s": LONG_S}}
    with deadlines_pass(engine):
        response = post(engine, CHAT, body)
        streamed = events(post(engine, CHAT, {**body, "stream": True}).text)
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"
    assert streamed[-1]["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in streamed


def test_the_servers_own_longest_time_holds_too(engine):
    body = {**GREEDY, "max_tokens": 1900, "ignore_eos": True}
    assert post(engine, CHAT, body, max_request_s=1).status_code == 504


def test_an_error_in_mid_stream_is_a_chunk_with_error_and_no_done(engine, monkeypatch):
    real, steps = engine._runner.model.predict, []

    def breaking(*arguments, **options):
        steps.append(arguments)
        if len(steps) == 4:
            raise RuntimeError("broken")
        return real(*arguments, **options)

    monkeypatch.setattr(engine._runner.model, "predict", breaking)
    found = events(post(engine, CHAT, {**GREEDY, "stream": True, "ignore_eos": True}).text)
    assert set(found[-1]) == {"error"}
    assert "[DONE]" not in found
    assert any(choice["delta"].get("content") for chunk in found[:-1] for choice in chunk["choices"])


def test_constrained_json_closes_within_the_budget(engine):
    """`.parse()` raises on finish_reason "length", so an answer that must be JSON ends as JSON."""
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    }
    surface = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        }
    }
    for max_tokens in (12, 16, 40):
        choice = post(engine, CHAT, {**GREEDY, "max_tokens": max_tokens, **surface}).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert isinstance(json.loads(choice["message"]["content"])["text"], str)
    too_small = post(engine, CHAT, {**GREEDY, "max_tokens": 2, **surface})
    assert too_small.status_code == 400
    assert "tokens" in error_of(too_small)["message"]


def test_key_order_of_a_schema_is_kept(engine):
    names = ["zulu", "alpha", "mike"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    surface = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        }
    }
    answer = post(engine, CHAT, {**GREEDY, "max_tokens": 80, **surface}).json()
    assert list(json.loads(answer["choices"][0]["message"]["content"])) == names


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_key": "k"}, {"prompt_cache_options": {"ttl": "30m", "mode": "implicit"}}, {"prompt_cache_retention": "in_memory"},
        {"max_completion_tokens": 3, "max_tokens": None}, {"reasoning_effort": "low"}, {"metadata": {"a": "b"}}, {"service_tier": "auto"},
        {"verbosity": "low"}, {"user": "me"}, {"safety_identifier": "x"}, {"store": False}, {"parallel_tool_calls": True}, {"modalities": ["text"]},
        {"stream_options": None}, {"tool_choice": "none"}, {"tools": None}, {"tools": []}, {"response_format": {"type": "text"}}, {"logit_bias": {}},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_clients_send_are_taken(engine, fields):
    answer = post(engine, CHAT, {**GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    if "max_completion_tokens" in fields:
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_an_answer_as_the_sdk_dumps_it_can_be_sent_back(engine):
    message = post(engine, CHAT, GREEDY).json()["choices"][0]["message"]
    history = [
        *HELLO,
        {**message, "audio": None, "function_call": None, "tool_calls": None},
        {"role": "user", "content": "More"},
    ]
    assert post(engine, CHAT, {**GREEDY, "messages": history}).status_code == 200


def test_service_tiers_have_their_meaning(engine):
    seen = []
    submit = engine.submit
    engine.submit = lambda request, deliver: seen.append(request) or submit(request, deliver)
    try:
        for tier in ("flex", "priority", "default"):
            post(engine, CHAT, {**GREEDY, "service_tier": tier, "priority": 3})
    finally:
        del engine.submit
    assert [(item.latency_class, item.priority) for item in seen] == [
        ("throughput", 3),
        ("latency", 4),
        ("latency", 3),
    ]


def test_long_default_answers_fit_the_context(engine):
    """Without max_tokens the answer may be as long as what is left of the context."""
    words = [{"role": "user", "content": "x" * 1950}]
    answer = post(engine, CHAT, {"messages": words, "temperature": 0, "ignore_eos": True}).json()
    assert answer["usage"]["total_tokens"] == engine.config.max_context
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_prompt_over_the_context_is_400(engine):
    response = post(engine, CHAT, {**GREEDY, "messages": [{"role": "user", "content": "x" * 5000}]})
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


def test_every_choice_of_a_stream_has_its_index_and_half_characters_wait(engine):
    body = {
        **GREEDY,
        "max_tokens": 30,
        "n": 3,
        "temperature": 1.2,
        "seed": 8,
        "stream": True,
        "ignore_eos": True,
    }
    *chunks, _ = events(post(engine, CHAT, body).text)
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    whole = chat_in_process(engine, HELLO, max_tokens=30, n=3, temperature=1.2, seed=8, ignore_eos=True)
    assert list(texts.values()) == [sample.text for sample in whole.samples]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_no_event_holds_what_clients_take_for_a_line_break(engine, path):
    """httpx, requests and others cut lines at U+0085, U+2028 and U+2029 too."""
    text = "a\u0085b\u2028c\u2029d"
    asked = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    if path == "/v1/responses":
        token_ids = engine.tokenizer.encode_continuation(text)
        bias = {str(token_id): 100 for token_id in token_ids}
        body = {"input": "x", "max_output_tokens": 12, "logit_bias": bias}
    else:
        body = {**asked, "max_tokens": 40, "structured_outputs": {"choice": [text]}}
    raw = post(engine, path, {**body, "stream": True}).text
    assert not {"\u0085", "\u2028", "\u2029"} & set(raw)
    if path != "/v1/responses":
        parts = [choice for chunk in events(raw)[:-1] for choice in chunk["choices"]]
        assert (
            "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts) == text
        )


def test_guidance_may_say_its_grammar_twice_but_not_two_grammars(engine):
    """Its client writes the same grammar into vLLM's older field as well."""
    grammar = '%llguidance {}\n\nstart: is\nis[capture]: IS\nIS: "x" | "y"'
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "guided_decoding_backend": "guidance",
        "guided_grammar": grammar,
        "structured_outputs": {"grammar": grammar},
    }
    answer = post(engine, CHAT, body)
    assert answer.json()["choices"][0]["message"]["content"] in ("x", "y")
    for other in ({"structured_outputs": {"grammar": 'start: "z"'}}, {"structured_outputs": None}):
        refused = post(engine, CHAT, {**body, **other})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "guided_grammar"


@pytest.mark.parametrize("slow", ["encode", "compile"])
def test_a_deadline_counts_from_the_requests_arrival(engine, monkeypatch, slow):
    owner, name = (engine.tokenizer, "encode") if slow == "encode" else (engine.grammars, "get")
    work = getattr(owner, name)
    done = threading.Event()

    def slowly(*given, **options):
        time.sleep(0.4)
        try:
            return work(*given, **options)
        finally:
            done.set()

    monkeypatch.setattr(owner, name, slowly)
    body = {"prompt": "a", "max_tokens": 2, "regex": "[ab]+", "radixrt": {"timeout_s": 0.2}}
    num_begun = engine.stats().num_finished_requests
    response = post(engine, "/v1/completions", body)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert done.wait(timeout=30)
    assert engine.stats().num_finished_requests == num_begun
    assert post(engine, "/v1/completions", {**body, "radixrt": {"timeout_s": 60}}).status_code == 200


DETAILED = {"timeout_s": 30, "details": True}
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/responses": {"input": "a"},
    "/generate": {"prompt": "a"},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "name": "q", "instructions": "?"}]},
}


@pytest.mark.parametrize("path", ASKED)
def test_whatever_comes_before_the_engine_takes_from_a_requests_time(engine, monkeypatch, path):
    explain, submit, seen = engine.explain, engine.submit, []

    def slowly(*given, **options):
        time.sleep(0.3)
        return explain(*given, **options)

    def submitted(request, deliver):
        seen.append(request.timeout_s)
        return submit(request, deliver)

    monkeypatch.setattr(engine, "explain", slowly)
    monkeypatch.setattr(engine, "submit", submitted)
    body = {**ASKED[path], "radixrt": DETAILED}
    assert post(engine, path, body).status_code == 200
    assert seen
    assert max(seen) <= 30 - 0.3


def test_waiting_for_a_thread_takes_from_a_requests_time(engine, monkeypatch):
    get, submit, seen, holding = engine.grammars.get, engine.submit, [], []
    app = create_app(engine, ServerConfig())

    def slowly(spec, **options):
        if "slow" in spec.text:
            holding.append(spec)
            wait_until(lambda: app.state.service.load.num_open > NUM_GRAMMAR_THREADS)  # the late one is there
            time.sleep(0.3)
        return get(spec, **options)

    def submitted(request, deliver):
        seen.append((request.sampling.grammar.text, request.timeout_s))
        return submit(request, deliver)

    monkeypatch.setattr(engine.grammars, "get", slowly)
    monkeypatch.setattr(engine, "submit", submitted)

    async def go():
        body = {"prompt": "a", "max_tokens": 8, "radixrt": {"timeout_s": LONG_S}}

        def ask(text):
            return asyncio.ensure_future(http.post("/v1/completions", json={**body, "regex": text}))

        async with client_of(app) as http:
            asked = [ask(f"slow{number}") for number in range(NUM_GRAMMAR_THREADS)]
            while len(holding) < NUM_GRAMMAR_THREADS:  # else the late one could find a free thread
                await asyncio.sleep(0.01)
            asked.append(ask("late"))
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}

    asyncio.run(go())
    assert dict(seen)["late"] <= LONG_S - 0.3


@pytest.mark.parametrize("is_stream", [False, True])
def test_whoever_has_an_answer_may_ask_again_at_once(engine, is_stream):
    app = create_app(engine, ServerConfig(max_requests=1))
    body = json.dumps({**GREEDY, "stream": is_stream}).encode()

    async def ask(then):
        seen, messages = [], [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            seen.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                then()

        await app(scope_of("POST", CHAT), receive, send)
        return seen[0]["status"]

    async def go():
        asked = []
        first = await ask(lambda: asked.append(asyncio.ensure_future(ask(lambda: None))))
        return first, await asked[0]

    assert asyncio.run(go()) == (200, 200)
