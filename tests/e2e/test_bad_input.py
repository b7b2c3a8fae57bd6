"""Each bad input is one clear error, while a neighbour's request goes on to its end."""

import queue
import shutil

import pytest

from radixrt import (
    Engine,
    GenerateRequest,
    GrammarSpec,
    InvalidRequest,
    ModelLoadError,
    Namespace,
    NeverFits,
    PromptTooLong,
    RequestError,
    SamplingParams,
    UnknownModel,
    UnsupportedGrammar,
)
from tests.support.engines import tiny_engine

NEIGHBOUR = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def engine(folder):
    with tiny_engine(folder, num_pages=20) as engine:
        yield engine


def object_schema(**keywords):
    return GrammarSpec.json_schema({"type": "object", "properties": {"a": keywords}, "required": ["a"]})


CASES = {
    "empty prompt": (lambda e: e.generate(""), InvalidRequest, "at least one token"),
    "no prompt": (lambda e: e.generate([]), InvalidRequest, "at least one token"),
    "prompt of a wrong type": (lambda e: e.generate(7), InvalidRequest, "text, token ids"),
    "bytes for a prompt": (lambda e: e.generate(b"abc"), InvalidRequest, "text, token ids"),
    "booleans for token ids": (lambda e: e.generate([True, False]), InvalidRequest, "whole numbers"),
    "a number in a list of prompts": (lambda e: e.generate(["a", 3]), InvalidRequest, "text or token ids"),
    "fractional token id": (lambda e: e.generate([1, 2.5]), InvalidRequest, "whole numbers"),
    "token id outside the vocabulary": (lambda e: e.generate([1, 99999]), InvalidRequest, "99999"),
    "negative token id": (lambda e: e.generate([-1]), InvalidRequest, "-1"),
    "prompt longer than the context": (lambda e: e.generate([1] * 512, ONE), PromptTooLong, "512"),
    "request that never fits": (
        lambda e: e.generate([1] * 300, SamplingParams(max_tokens=100)),
        NeverFits,
        "pool of 304 tokens",
    ),
    "max_tokens 0": (lambda e: SamplingParams(max_tokens=0), InvalidRequest, "max_tokens"),
    "temperature -1": (lambda e: SamplingParams(temperature=-1), InvalidRequest, r"temperature .*-1"),
    "temperature nan": (lambda e: SamplingParams(temperature=float("nan")), InvalidRequest, "temperature"),
    "top_p 1.5": (lambda e: SamplingParams(top_p=1.5), InvalidRequest, r"top_p must be in \(0, 1\], got 1.5"),
    "repetition_penalty near 0": (
        lambda e: SamplingParams(repetition_penalty=1e-300),
        InvalidRequest,
        r"repetition_penalty must be in \[0.01, 10\]",
    ),
    "temperature beyond floats": (
        lambda e: SamplingParams(temperature=10**400),
        InvalidRequest,
        "temperature",
    ),
    "bias of a token id that is none": (
        lambda e: SamplingParams(logit_bias={-1: 3.0}),
        InvalidRequest,
        "a token id in logit_bias must be",
    ),
    "bias beyond floats": (lambda e: SamplingParams(logit_bias={1: 10**400}), InvalidRequest, "logit_bias"),
    "sampling of a wrong type": (lambda e: e.generate("a", 5), InvalidRequest, "sampling"),
    "namespace of a wrong type": (
        lambda e: e.generate("a", namespace={"salt": 1}),
        InvalidRequest,
        "namespace",
    ),
    "salt of a wrong type": (lambda e: Namespace(salt=["a"]), InvalidRequest, "salt"),
    "priority of a wrong type": (
        lambda e: GenerateRequest((1,), priority="high"),
        InvalidRequest,
        "priority",
    ),
    "fractional logprob_start": (
        lambda e: GenerateRequest((1,), ONE, logprob_start=1.5),
        InvalidRequest,
        "logprob_start",
    ),
    "unknown latency class": (
        lambda e: GenerateRequest((1,), latency_class="fast"),
        InvalidRequest,
        "latency_class",
    ),
    "grammar of a wrong kind": (lambda e: GrammarSpec("regex", "a", "compact"), InvalidRequest, "kind"),
    "grammar of a wrong text": (lambda e: GrammarSpec.regex(5), InvalidRequest, "regex"),
    "stop of a wrong type": (lambda e: SamplingParams(stop=3), InvalidRequest, "stop"),
    "bias outside the vocabulary": (
        lambda e: e.generate("a", SamplingParams(logit_bias={99999: 1.0})),
        InvalidRequest,
        "logit_bias",
    ),
    "unknown option": (lambda e: Engine("x", page_sise=4), InvalidRequest, 'Did you mean "page_size"'),
    "unknown model": (lambda e: Engine("smollm-135m"), UnknownModel, 'Did you mean "smollm2-135m"'),
    "keyword that cannot be enforced": (
        lambda e: e.generate("a", SamplingParams(grammar=object_schema(type="array", uniqueItems=True))),
        UnsupportedGrammar,
        "/properties/a/uniqueItems",
    ),
    "invalid regex": (
        lambda e: e.generate("a", SamplingParams(grammar=GrammarSpec.regex("(a"))),
        RequestError,
        "regex",
    ),
    "empty choice list": (lambda e: GrammarSpec.choice([]), InvalidRequest, "choices"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_error_and_the_neighbour_finishes(engine, name):
    call, error, text = CASES[name]
    inbox = queue.Queue()
    engine.submit(GenerateRequest((1, 2, 3), NEIGHBOUR), inbox.put)
    with pytest.raises(error, match=text) as caught:
        call(engine)
    if isinstance(caught.value, RequestError):
        assert caught.value.parameter
    item = inbox.get(timeout=30)
    while item.usage is None:
        item = inbox.get(timeout=30)
    assert item.usage.output_tokens == 60
    engine.check()


def test_one_bad_prompt_of_a_list_starts_nothing(engine):
    before = engine.stats().num_finished_requests
    with pytest.raises(InvalidRequest):
        engine.generate(["fine", ""], ONE)
    assert engine.stats().num_finished_requests == before


def test_unsupported_architecture_is_named(tmp_path, folder):
    other = tmp_path / "bert"
    shutil.copytree(folder, other)
    text = (other / "config.json").read_text().replace("LlamaForCausalLM", "BertForMaskedLM")
    (other / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="BertForMaskedLM"):
        Engine(other)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_or_cut_model_file_is_named(tmp_path, folder, file):
    missing, cut = tmp_path / "missing", tmp_path / "cut"
    for copy in (missing, cut):
        shutil.copytree(folder, copy)
    (missing / file).unlink()
    (cut / file).write_bytes((cut / file).read_bytes()[:100])
    for copy in (missing, cut):
        with pytest.raises(ModelLoadError, match=file.split(".")[0]):
            Engine(copy)
