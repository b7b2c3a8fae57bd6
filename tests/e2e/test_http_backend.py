"""Programs on a real radixrt server give, id for id, what they give on the engine in process."""

import asyncio

import httpx2
import pytest
from pydantic import BaseModel

from frontend_lang import HttpBackend, OpenAIBackend, assistant, gen, program, select, system, user
from radixrt import (
    DeadlineExceeded,
    Engine,
    GenerateRequest,
    GrammarSpec,
    InvalidRequest,
    SamplingParams,
    UnsupportedGrammar,
)
from radixrt.text.tokenizer import Tokenizer
from tests.support.models import tiny_model
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer

servers = pytest.importorskip("tests.support.servers", reason="the server is not part of this checkout")
pytestmark = pytest.mark.timeout(240)


class Point(BaseModel):
    x: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(
        "llama",
        tmp_path_factory.mktemp("models") / "tiny",
        tokenizer=byte_tokenizer(chat=True, extra=JSON_MERGES),
        max_position_embeddings=2048,
    )


@pytest.fixture(scope="module")
def url(folder):
    options = ["--dtype", "float32", "--kernels", "torch", "--num-pages", "2048", "--device", "cpu"]
    with servers.served(folder, *options) as (url, _):
        yield url


@pytest.fixture(params=["connected", "given"])
def backend(request, url, folder):
    if request.param == "connected":
        return HttpBackend.connect(url)
    return HttpBackend(url, Tokenizer.from_folder(folder))


@pytest.fixture(scope="module")
def engine(folder):
    with Engine(folder, dtype="float32", kernels="torch", num_pages=2048, device="cpu") as engine:
        yield engine


@program
def essay(s, topic):
    s += system("Short.") + user(f"About {topic}")
    branches = s.fork(3)
    for index, branch in enumerate(branches):
        branch += user(f"Tip {index}") + assistant("Tip: ", gen("tip", max_tokens=8, seed=index))
    s += user(" ".join(branch["tip"] for branch in branches))
    s += assistant(gen("all", max_tokens=12, temperature=0, stop="e", logprobs=2), " ")
    s += select("verdict", choices=["good", "bad", "bad enough"])
    s += " " + gen("point", schema=Point, max_tokens=24, temperature=0)
    return s["point"]


def test_a_program_on_a_server_equals_one_on_the_engine(backend, engine):
    remote = essay.with_options(backend=backend).run("trees")
    local = essay.with_options(engine=engine).run("trees")
    assert remote.text() == local.text()
    assert remote.token_ids() == local.token_ids()
    assert isinstance(remote.value, Point)
    by_branch = {(call.branch, call.name): call for call in local.calls}
    for call in remote.calls:
        other = by_branch[call.branch, call.name]
        assert (call.prompt_ids, call.token_ids) == (other.prompt_ids, other.token_ids)
        assert call.usage.prompt_tokens == other.usage.prompt_tokens
        assert call.usage.forced_tokens == other.usage.forced_tokens
        assert (call.origin is None) == (call.kind == "select")
        if call.origin is not None:
            assert call.origin.forced == other.origin.forced
            assert call.origin.num_measured == other.origin.num_measured
            assert 0 <= call.queued_s <= call.seconds
        assert [entry.token_id for entry in call.logprobs] == [entry.token_id for entry in other.logprobs]
        for choice, share in (call.distribution or {}).items():
            assert share == pytest.approx(other.distribution[choice], abs=1e-4)
    again = essay.with_options(backend=backend).run("trees")
    assert again.text() == remote.text()
    assert again.usage.cached_tokens >= 0.8 * again.usage.prompt_tokens
    assert 0 < again.trace.times(0).first_token_s <= again.calls[0].seconds


def test_samples_and_streams_come_through(backend, engine):
    prompt_ids = tuple(engine.tokenizer.encode("hello"))
    request = GenerateRequest(
        prompt_ids, SamplingParams(max_tokens=6, n=2, seed=3, stop_token_ids=(7,)), label="x"
    )

    async def main():
        output = await backend.generate(request)
        chunks = [chunk async for chunk in backend.stream(request)]
        return output, chunks

    output, chunks = asyncio.run(main())
    expected = engine.generate(list(prompt_ids), request.sampling)
    assert [sample.token_ids for sample in output.samples] == [
        sample.token_ids for sample in expected.samples
    ]
    assert len(chunks) > 2
    assert [chunk.usage is not None for chunk in chunks].index(True) == len(chunks) - 1


def test_what_the_server_refuses_is_an_error_of_its_own_kind(backend, engine):
    async def send(request):
        await backend.generate(request)

    prompt_ids = tuple(engine.tokenizer.encode("hello"))
    schema = {"type": "array", "contains": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(UnsupportedGrammar):
        asyncio.run(
            send(GenerateRequest(prompt_ids, SamplingParams(grammar=GrammarSpec.json_schema(schema))))
        )
    with pytest.raises(InvalidRequest, match="400"):
        asyncio.run(send(GenerateRequest((10**6,))))
    with pytest.raises(DeadlineExceeded):
        asyncio.run(
            send(
                GenerateRequest(prompt_ids, SamplingParams(max_tokens=1500, ignore_eos=True), timeout_s=0.05)
            )
        )


def test_another_tokenizer_is_refused_before_the_first_call(url, tmp_path):
    other = tiny_model("llama", tmp_path / "other", tokenizer=byte_tokenizer(chat=True))
    backend = HttpBackend(url, Tokenizer.from_folder(other))
    with pytest.raises(InvalidRequest, match="another tokenizer"):
        asyncio.run(backend.generate(GenerateRequest((5, 6))))


def test_a_chat_program_runs_on_the_servers_openai_routes(url, engine):
    @program
    def ask(s):
        s += system("Short.") + user("What?") + assistant(gen("a", max_tokens=8, temperature=0))
        s += user("And?") + assistant(gen("point", schema=Point, max_tokens=24, temperature=0))
        s += user("Or?") + assistant(gen("choice", choices=["yes", "no"], max_tokens=8, logprobs=1))

    backend = OpenAIBackend(f"{url}/v1", model_name(url), extensions=True)
    result = ask.with_options(backend=backend).run()
    local = ask.with_options(engine=engine).run()
    assert result["a"] == local["a"]
    assert isinstance(result["point"], Point)
    assert result["choice"] in ("yes", "no")
    assert backend.decode([entry.token_id for entry in result.record("choice").logprobs]) == result["choice"]
    assert result.record("a").prompt_tokens == local.record("a").prompt_tokens


def model_name(url):
    return httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]
