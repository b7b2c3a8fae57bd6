"""/generate, /explain, /scopes, and the tokenizer's routes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from radixrt import GenerateRequest, SamplingParams, TextPiece
from tests.support.asking import chat_ids, get, post, run
from tests.support.servers import events

GREEDY = {"max_tokens": 8, "temperature": 0}


def num_open(engine):
    stats = engine.stats()  # one moment: a request can begin to run between two
    return stats.num_running + stats.num_waiting


def test_generate_is_token_exact(engine):
    expected = engine.generate("hello", SamplingParams(max_tokens=8, temperature=0, logprobs=2, n=2, seed=5))
    body = {"prompt": "hello", **GREEDY, "logprobs": 2, "n": 2, "seed": 5}
    answer = post(engine, "/generate", body).json()
    assert [tuple(sample["token_ids"]) for sample in answer["samples"]] == [
        sample.token_ids for sample in expected.samples
    ]
    for got, wanted in zip(answer["samples"][0]["logprobs"], expected.logprobs, strict=True):
        assert got["token_id"] == wanted.token_id
        assert got["logprob"] == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token_id for token_id, _ in got["top"]] == [token_id for token_id, _ in wanted.top]
    assert set(answer["usage"]) == {
        "prompt_tokens",
        "cached_tokens",
        "computed_tokens",
        "forced_tokens",
        "output_tokens",
    }


def test_segments_keep_control_tokens_of_content_plain(engine):
    pieces = [
        TextPiece("<|im_start|>user\n", is_template=True),
        TextPiece("say <|im_end|>"),
        TextPiece("<|im_end|>", is_template=True),
    ]
    expected = engine.tokenizer.encode_pieces(pieces)
    segments = [{"text": piece.text, "is_template": piece.is_template} for piece in pieces]
    tokens = post(engine, "/tokenize", {"segments": segments}).json()["tokens"]
    assert tokens == expected
    end_id = engine.tokenizer.encode("<|im_end|>")[0]
    assert tokens.count(end_id) == 1
    by_segments = post(engine, "/generate", {"segments": segments, **GREEDY}).json()
    by_ids = post(engine, "/generate", {"prompt_ids": expected, **GREEDY}).json()
    assert by_segments["samples"] == by_ids["samples"]


def test_scoring_from_a_position_equals_the_engines(engine):
    prompt_ids = tuple(engine.tokenizer.encode("score this text"))
    request = GenerateRequest(
        prompt_ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), logprob_start=10
    )
    inbox = []
    done = __import__("threading").Event()

    def deliver(item):
        inbox.append(item)
        if isinstance(item, BaseException) or item.usage is not None:
            done.set()

    engine.submit(request, deliver)
    assert done.wait(30)
    body = {
        "prompt_ids": prompt_ids,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
        "logprob_start": 10,
    }
    answer = post(engine, "/generate", body).json()
    assert [item["logprob"] for item in answer["prompt_logprobs"]] == pytest.approx(
        [item.logprob for item in inbox[0].prompt_logprobs], abs=1e-4
    )
    assert [item["token_id"] for item in answer["prompt_logprobs"]] == list(prompt_ids[10:])


def test_stream_adds_up_and_positions_count(engine):
    whole = post(engine, "/generate", {"prompt": "hello", **GREEDY}).json()["samples"][0]
    response = post(engine, "/generate", {"prompt": "hello", **GREEDY, "stream": True})
    first, *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert first["id"].startswith("gen-")
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == whole["token_ids"]
    ids = [int(line[4:]) for line in response.text.splitlines() if line.startswith("id: ")]
    assert ids == list(range(len(ids)))


def test_a_resumable_stream_can_be_read_on_from_any_position(engine):
    async def work(http):
        body = {"prompt": "resume", **GREEDY, "stream": True, "is_resumable": True}
        whole = (await http.post("/generate", json=body)).text
        name = events(whole)[0]["id"]
        parts = whole.split("\n\n")
        for position in (0, 3, len(parts) - 2):
            again = (await http.get(f"/generate/{name}", params={"position": position})).text
            assert again == "\n\n".join(parts[position:])
        by_header = await http.get(f"/generate/{name}", headers={"Last-Event-ID": "2"})
        assert by_header.text == "\n\n".join(parts[3:])
        beyond = await http.get(f"/generate/{name}", params={"position": 999})
        assert beyond.status_code == 410
        await http.delete(f"/generate/{name}")
        gone = await http.get(f"/generate/{name}")
        assert gone.status_code == 404

    run(engine, work)


def test_another_tenant_cannot_resume(engine):
    async def work(http):
        mine, other = ({"Authorization": f"Bearer key-number-{number}"} for number in (1, 2))
        body = {"prompt": "mine", **GREEDY, "stream": True, "is_resumable": True}
        name = events((await http.post("/generate", json=body, headers=mine)).text)[0]["id"]
        assert (await http.get(f"/generate/{name}", headers=mine)).status_code == 200
        assert (await http.get(f"/generate/{name}", headers=other)).status_code == 404

    run(engine, work, api_keys="a=key-number-1,b=key-number-2")


def test_kept_events_are_bounded(engine):
    async def work(http):
        body = {
            "prompt": "bounded",
            "max_tokens": 60,
            "temperature": 0,
            "stream": True,
            "is_resumable": True,
            "ignore_eos": True,
        }
        name = events((await http.post("/generate", json=body)).text)[0]["id"]
        assert (await http.get(f"/generate/{name}", params={"position": 0})).status_code == 410
        stop = int(
            (await http.get(f"/generate/{name}", params={"position": 999}))
            .json()["error"]["message"]
            .split()[3]
        )
        tail = await http.get(f"/generate/{name}", params={"position": stop - 1})
        assert events(tail.text) == ["[DONE]"]

    run(engine, work, resume_bytes=1024)


def test_explain_tells_what_is_cached(engine):
    text = "explain this prompt, which is long enough to have pages of its own"
    post(engine, "/generate", {"prompt": text, **GREEDY})
    report = post(engine, "/explain", {"prompt": text + " and more"}).json()
    assert report["num_cached_tokens"] >= len(engine.tokenizer.encode(text)) - 1
    assert report["before_text"].endswith("its own")
    chat = post(engine, "/explain", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["num_prompt_tokens"] == len(chat_ids(engine, [{"role": "user", "content": "x"}]))


def test_scopes_hold_pages_until_closed(engine):
    async def work(http):
        scope = (await http.post("/scopes", json={"ttl_s": 100})).json()["scope"]
        before = engine.stats().cache.num_held_pages
        await http.post("/generate", json={"prompt": "held " * 30, **GREEDY, "scope": scope})
        assert engine.stats().cache.num_held_pages > before
        assert (await http.delete(f"/scopes/{scope}")).json()["was_open"] is True
        assert engine.stats().cache.num_held_pages == before
        refused = await http.post("/generate", json={"prompt": "x", **GREEDY, "scope": scope})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "scope")

    run(engine, work)


@pytest.mark.parametrize(
    "hint",
    [
        {"prompt_cache_options": {"ttl": "30m"}},
        {"prompt_cache_retention": "24h"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "keep " * 30, "prompt_cache_breakpoint": {"mode": "explicit"}}]}]},
    ],
)  # fmt: skip
def test_retention_hints_hold_pages(engine, hint):
    before = engine.stats().cache.num_held_pages
    body = {
        "messages": [{"role": "user", "content": "keep " * 30}],
        **GREEDY,
        "prompt_cache_key": str(hint)[:60],
        **hint,
    }
    assert post(engine, "/v1/chat/completions", body).status_code == 200
    assert engine.stats().cache.num_held_pages > before


def test_retention_longer_than_allowed_is_refused(engine):
    body = {"prompt": "x", "prompt_cache_options": {"ttl": "9d"}}
    response = post(engine, "/v1/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_cache_options/ttl")


def test_cache_keys_divide_the_cache(engine):
    def cached(**fields):
        body = {"prompt": "divided by keys, a prompt of some length", **GREEDY, **fields}
        return post(engine, "/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(prompt_cache_key="one"), cached(prompt_cache_key="two")] == [0, 0]
    assert cached(prompt_cache_key="one") > 0
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    assert [cached(**explicit), cached(**explicit)] == [0, 0]


def test_tokenizer_routes(engine):
    tokenizer = engine.tokenizer
    assert post(engine, "/tokenize", {"prompt": "abc", "add_special_tokens": False}).json()[
        "tokens"
    ] == tokenizer.encode("abc", add_special_tokens=False)
    ids = tokenizer.encode("héllo 🙂")
    assert post(engine, "/detokenize", {"tokens": ids}).json() == {"prompt": "héllo 🙂"}
    info = get(engine, "/tokenizer_info").json()
    assert info["eos_token"] == tokenizer.special_tokens["eos_token"]
    assert info["eos_token_ids"] == list(tokenizer.eos_ids)
    assert info["start_ids"] == tokenizer.encode("")
    before, after = tokenizer.chat.open_role([{"role": "user", "content": ""}], "assistant")
    assert post(engine, "/open_role", {"history": ["user"], "role": "assistant"}).json() == {
        "before": before,
        "after": after,
    }
    continued = post(engine, "/tokenize", {"segments": [{"text": "abc"}], "is_start": False}).json()["tokens"]
    assert continued == tokenizer.encode_continuation("abc")
    assert post(engine, "/detokenize", {"tokens": [10**7]}).status_code == 400


def test_a_client_can_build_the_tokenizer(engine):
    import tokenizers

    from radixrt.text.tokenizer import Tokenizer

    given = get(engine, "/tokenizer").json()
    built = Tokenizer(
        tokenizers.Tokenizer.from_str(given["tokenizer_json"]),
        special_tokens=given["special_tokens"],
        eos_ids=given["eos_ids"],
        chat_template=given["chat_template"],
        add_bos=given["add_bos"],
    )
    assert built.fingerprint == given["fingerprint"] == engine.tokenizer.fingerprint
    assert built.eos_ids == engine.tokenizer.eos_ids
    assert built.encode("<|im_start|>héllo") == engine.tokenizer.encode("<|im_start|>héllo")


def test_a_disconnected_resumable_stream_goes_on_and_an_abandoned_one_ends(engine):
    """The reader leaves at once: the stream is kept for resume_s, then its request is aborted."""
    from radixrt.config import ServerConfig
    from radixrt.server import create_app
    from tests.support.servers import client_of, scope_of

    async def go():
        app = create_app(engine, ServerConfig(resume_s=1))
        body = b'{"prompt":"left","max_tokens":1500,"temperature":0,"stream":true,"is_resumable":true,"ignore_eos":true}'
        sent = []
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            if (message := next(messages, None)) is not None:
                return message
            while not any(b"gen-" in part for part in sent):
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message.get("body", b""))

        await app(scope_of("POST", "/generate"), receive, send)
        name = events(b"".join(sent).decode())[0]["id"]
        async with client_of(app) as http:
            assert num_open(engine) == 1
            for _ in range(400):
                await asyncio.sleep(0.05)
                if num_open(engine) == 0:
                    break
            gone = await http.get(f"/generate/{name}")
        return gone.status_code

    assert asyncio.run(go()) == 404


def test_until_the_tokenizer_is_warm_short_text_waits_in_a_thread_as_well(engine, monkeypatch):
    """The first control token in a content costs most of a second, which the event loop has not."""
    from radixrt.server import create_app
    from radixrt.server.gate import Visit

    async def go():
        engine.tokenizer.warm()
        monkeypatch.setattr(engine.tokenizer, "warm", lambda: None)  # the service's own call may come late
        service = create_app(engine).state.service
        visit = Visit("a", num_body_bytes=10)
        warm = await service.on_text(visit, threading.current_thread)
        monkeypatch.setattr(engine.tokenizer, "_masked", None)
        cold = await service.on_text(visit, threading.current_thread)
        service.close()
        return warm, cold

    warm, cold = asyncio.run(go())
    assert warm is threading.main_thread()
    assert cold is not warm


def test_nobody_is_served_before_the_tokenizer_is_warm(engine, monkeypatch):
    """Warming holds the interpreter's lock: in a thread, it would hold up the event loop all the same."""
    from radixrt.server import create_app

    warm = engine.tokenizer.warm

    def slow():
        time.sleep(0.3)
        warm()

    async def go():
        monkeypatch.setattr(engine.tokenizer, "_masked", None)
        monkeypatch.setattr(engine.tokenizer, "warm", slow)
        app = create_app(engine)
        async with app.router.lifespan_context(app):
            return engine.tokenizer.is_warm

    assert asyncio.run(go())
