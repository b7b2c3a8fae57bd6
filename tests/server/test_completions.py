"""/v1/completions on a tiny model: what lm-eval and others need of it."""

from __future__ import annotations

import math
import threading

import pytest

from radixrt import SamplingParams
from tests.support import asking
from tests.support.servers import events

PATH = "/v1/completions"


def post(engine, body, **options):
    return asking.post(engine, PATH, body, **options)


def test_prompts_as_text_and_ids_keep_their_order(engine):
    prompts = ["one", "two", "three"]
    expected = [item.text for item in engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0))]
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    for given in (prompts, ids):
        answer = post(engine, {"prompt": given, "max_tokens": 6, "temperature": 0}).json()
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["usage"]["completion_tokens"] == 18
    alone = post(engine, {"prompt": ids[1], "max_tokens": 6, "temperature": 0}).json()
    assert alone["choices"][0]["text"] == expected[1]


def test_streamed_batch_equals_whole(engine):
    body = {"prompt": ["aa", "bb"], "max_tokens": 5, "temperature": 0, "n": 2, "seed": 1}
    whole = [choice["text"] for choice in post(engine, body).json()["choices"]]
    *chunks, done = events(post(engine, {**body, "stream": True}).text)
    texts = [""] * 4
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert (done, texts) == ("[DONE]", whole)


def test_echo_with_logprobs_is_what_lm_eval_reads(engine):
    context, continuation = engine.tokenizer.encode("the cat "), engine.tokenizer.encode("sat")
    body = {"prompt": [context + continuation], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}  # fmt: skip
    choice = post(engine, body).json()["choices"][0]
    table = choice["logprobs"]
    num_tokens = len(context) + len(continuation) + 1
    assert all(
        len(table[name]) == num_tokens for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert table["token_logprobs"][0] is None
    assert table["top_logprobs"][0] is None
    expected = engine.generate(
        context + continuation, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    )
    assert table["token_logprobs"][1:-1] == pytest.approx([item.logprob for item in expected.prompt_logprobs])
    for token, value, top in zip(
        table["tokens"][1:], table["token_logprobs"][1:], table["top_logprobs"][1:], strict=True
    ):
        assert top[token] == value
        assert max(top.values()) >= value
    assert choice["text"].startswith("the cat sat")


def test_an_echoed_prompt_is_put_into_words_once_and_off_the_event_loop(engine, monkeypatch):
    """For each of thousands of samples, on the event loop, it held up everyone for seconds."""
    prompt, decode, threads = "echo me", engine.tokenizer.decode, []

    def spied(token_ids):
        text = decode(token_ids)
        if text == prompt:
            threads.append(threading.current_thread())
        return text

    monkeypatch.setattr(engine.tokenizer, "decode", spied)
    answer = post(engine, {"prompt": prompt, "echo": True, "n": 3, "max_tokens": 2}).json()
    assert all(choice["text"].startswith(prompt) for choice in answer["choices"])
    [thread] = threads
    assert thread is not threading.main_thread()


def test_echo_without_new_tokens(engine):
    body = {"prompt": "hello", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = post(engine, body).json()
    assert answer["choices"][0]["text"] == "hello"
    assert answer["usage"]["completion_tokens"] == 0
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(engine.tokenizer.encode("hello"))


def test_offsets_find_the_tokens_in_the_text(engine):
    answer = post(engine, {"prompt": "abc name", "echo": True, "logprobs": 0, "max_tokens": 0}).json()
    table, text = answer["choices"][0]["logprobs"], answer["choices"][0]["text"]
    for token, offset in zip(table["tokens"], table["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, 10**6]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt/1"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "stream": True}, "echo"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_bad_field_is_400_and_named(engine, change, param):
    response = post(engine, {"prompt": "a", **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_more_prompts_than_allowed_are_refused(engine):
    response = post(engine, {"prompt": ["a"] * 4}, max_prompts=3)
    assert response.status_code == 400
    assert "3" in response.json()["error"]["message"]


def test_logprobs_of_new_tokens_sum_to_the_engines(engine):
    expected = engine.generate("abc", SamplingParams(max_tokens=5, temperature=0, logprobs=0)).logprobs
    table = post(engine, {"prompt": "abc", "max_tokens": 5, "temperature": 0, "logprobs": 3}).json()[
        "choices"
    ][0]["logprobs"]
    assert math.fsum(table["token_logprobs"]) == pytest.approx(math.fsum(item.logprob for item in expected))
    assert all(len(top) in (3, 4) for top in table["top_logprobs"])
