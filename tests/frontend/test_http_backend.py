"""The road to a radixrt server: what goes out, and what a broken answer becomes (e2e/ has the real server)."""

import asyncio
from dataclasses import fields

import pytest

from frontend_lang import HttpBackend, RemoteError, RemoteUnavailable
from frontend_lang.backends.http import body_of as body_with
from frontend_lang.backends.remote import Remote
from frontend_lang.backends.remote_scopes import RemoteScopes
from radixrt import (
    DeadlineExceeded,
    GenerateRequest,
    GrammarSpec,
    InvalidRequest,
    Namespace,
    PromptTooLong,
    SamplingParams,
)
from tests.support.chat_server import DONE, Answer, serving

pytestmark = pytest.mark.timeout(60)
FINGERPRINT = "f"
CHANGED = {
    "logit_bias": {3: 1},
    "stop": ("x",),
    "stop_token_ids": (4,),
    "grammar": GrammarSpec.regex("a"),
    "ignore_eos": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logprob_token_ids": (5,),
    "shown_token_ids": (6,),
}


class OneToken:
    """A tokenizer that has no text to turn into ids."""

    fingerprint = FINGERPRINT
    eos_ids = (1,)
    chat = None

    def encode(self, text):
        return []


def body_of(request):
    return body_with(request, RemoteScopes())


def ask(server):
    backend = HttpBackend(server.url, OneToken(), remote=Remote(server.url, max_retries=0))
    server.info.setdefault("fingerprint", FINGERPRINT)
    return asyncio.run(backend.generate(GenerateRequest((5,))))


def test_every_option_that_is_not_the_default_goes_out():
    for item in fields(SamplingParams):
        value = CHANGED.get(item.name, (4,) if isinstance(item.default, tuple) else 3)
        more = {"logprobs": 1} if item.name == "logprob_token_ids" else {}
        body = body_of(GenerateRequest((5, 6), SamplingParams(**{item.name: value, **more})))
        sent = {"logit_bias": {"3": 1.0}, "grammar": {"kind": "regex", "text": "a"}}.get(item.name, value)
        assert body[item.name] == sent
    assert set(body_of(GenerateRequest((5, 6)))) == {"prompt_ids", "logprob_start", "stream", "radixrt"}


def test_what_the_program_says_beyond_sampling_goes_out():
    request = GenerateRequest(
        (5,), priority=2, latency_class="throughput", label="x" * 600, timeout_s=3, logprob_start=1
    )
    body = body_of(request)
    assert (body["priority"], body["logprob_start"]) == (2, 1)
    assert body["radixrt"] == {"latency_class": "throughput", "label": "x" * 512, "timeout_s": 3.0}


def test_a_namespace_is_refused():
    with pytest.raises(InvalidRequest, match="namespace"):
        body_of(GenerateRequest((5,), namespace=Namespace(salt="a")))


def test_chunks_come_back_as_they_are():
    usage = {"prompt_tokens": 1, "cached_tokens": 1, "output_tokens": 2}
    entry = {"token_id": 7, "logprob": -0.5, "top": [[7, -0.5]]}
    events = [
        {"id": "gen", "model": "m"},
        {"sample_index": 0, "text": "a", "token_ids": [7], "finish_reason": None, "logprobs": [entry]},
        {"sample_index": 0, "text": "b", "token_ids": [8], "finish_reason": "length", "usage": usage},
        DONE,
    ]
    with serving(Answer(events)) as server:
        output = ask(server)
    assert (output.text, output.token_ids, output.finish_reason) == ("ab", (7, 8), "length")
    assert output.logprobs[0].top == ((7, -0.5),)
    assert (output.usage.cached_tokens, output.usage.output_tokens) == (1, 2)


BROKEN = {
    "early end": ([{"id": "gen"}, DONE], RemoteUnavailable, "before it was whole"),
    "no end": (
        [{"sample_index": 0, "text": "a", "token_ids": [7]}],
        RemoteUnavailable,
        "before it was whole",
    ),
    "chunk": ([{"sample_index": 0, "text": 5}], RemoteError, "chunk that is none"),
    "error": ([{"error": {"message": "died", "code": "internal_error"}}], RemoteError, "died"),
    "deadline": ([{"error": {"message": "late", "code": "deadline_exceeded"}}], DeadlineExceeded, "late"),
    "long": ([{"error": {"message": "long", "code": "context_length_exceeded"}}], PromptTooLong, "long"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_answer_is_an_error(case):
    events, kind, message = BROKEN[case]
    with serving(Answer(events)) as server, pytest.raises(kind, match=message):
        ask(server)


@pytest.mark.parametrize(
    ("info", "kind"), [({"fingerprint": "other"}, InvalidRequest), ({"fingerprint": None}, RemoteError)]
)
def test_a_server_with_other_ids_is_never_asked(info, kind):
    with serving(Answer([DONE])) as server:
        server.info = info
        with pytest.raises(kind):
            ask(server)
        assert server.bodies == []


@pytest.mark.parametrize("told", [{}, [], {"tokenizer_json": "{"}, {"tokenizer_json": 5}])
def test_a_server_that_tells_no_tokenizer_is_refused(told):
    with serving(Answer([DONE])) as server:
        server.info = told
        with pytest.raises(RemoteError, match="not what a radixrt server tells"):
            HttpBackend.connect(server.url)


def test_scores_that_a_server_leaves_out_are_an_error():
    chunk = {"sample_index": 0, "text": "", "token_ids": [], "finish_reason": "length", "usage": {}}
    with serving(Answer([chunk, DONE])) as server:
        server.info["fingerprint"] = FINGERPRINT
        backend = HttpBackend(server.url, OneToken(), remote=Remote(server.url, max_retries=0))
        with pytest.raises(InvalidRequest, match="log-probabilities"):
            asyncio.run(backend.score((5,), [(6,), (7, 8)]))
