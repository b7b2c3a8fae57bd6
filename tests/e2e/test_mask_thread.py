"""Masks are filled in a thread while the forward pass runs; a failure of either leaves nothing behind."""

import re
import shutil
import threading
import time

import pytest
from radixrt_kernels.cpu.build import COMPILER

from radixrt import DeviceError, Engine, FinishReason, GrammarSpec, SamplingParams
from radixrt.exec import sampler
from radixrt.exec.batch import MEASURE_FIRST
from radixrt.grammar.engines.llg import LLMatcher
from tests.support.engines import tiny_engine
from tests.support.models import tiny_model
from tests.support.threads import NewThreads

GRAMMAR = GrammarSpec.json_schema(
    {"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 5}
)
SAMPLING = SamplingParams(max_tokens=40, temperature=1.0, seed=1, grammar=GRAMMAR)
MASK_THREAD = "radixrt-masks"
WAIT_S = 20.0


class Watched:
    """A model that calls something at each forward pass."""

    def __init__(self, model, watch):
        self.device = model.device
        self._model, self._watch = model, watch

    def predict(self, inputs, store, **options):
        self._watch()
        return self._model.predict(inputs, store, **options)


@pytest.fixture
def engine(folder):
    with tiny_engine(folder) as engine:
        yield engine


def watch_forward(engine, monkeypatch, watch):
    monkeypatch.setattr(engine._runner, "model", Watched(engine._runner.model, watch))


def watch_masks(monkeypatch, watch):
    fill_mask = LLMatcher.fill_mask

    def watched(self, row):
        watch()
        fill_mask(self, row)

    monkeypatch.setattr(LLMatcher, "fill_mask", watched)


def test_masks_are_filled_while_the_forward_pass_runs(engine, monkeypatch):
    begun, met = threading.Event(), []
    watch_masks(monkeypatch, begun.set)
    watch_forward(engine, monkeypatch, lambda: met.append(begun.wait(WAIT_S)))
    assert engine.generate("x", SAMPLING).finish_reason is FinishReason.STOP
    assert met
    assert all(met)


def test_a_forward_pass_that_fails_waits_for_the_masks(engine, monkeypatch):
    expected = engine.generate("x", SAMPLING).text
    filling, num_passes = set(), []

    def fill():
        filling.add(number := object())
        time.sleep(0.05)
        filling.discard(number)

    def forward():
        num_passes.append(1)
        if len(num_passes) == 4:
            raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        watch_masks(patch, fill)
        watch_forward(engine, patch, forward)
        with pytest.raises(DeviceError, match="no such luck"):
            engine.generate(["x", "y"], SAMPLING)
        assert not filling
    engine.check()
    assert engine.generate("x", SAMPLING).text == expected


def test_a_mask_that_fails_ends_the_step_and_no_more(engine, monkeypatch):
    expected = engine.generate("x", SAMPLING).text
    num_masks = []

    def fill():
        num_masks.append(1)
        if len(num_masks) == 3:
            raise RuntimeError("no mask")

    with monkeypatch.context() as patch:
        watch_masks(patch, fill)
        with pytest.raises(DeviceError, match="no mask"):
            engine.generate(["x", "y"], SAMPLING)
    engine.check()
    assert engine.generate("x", SAMPLING).text == expected


def test_every_row_gets_its_own_mask(engine):
    patterns = [f"[{letter}{letter.upper()}]{{3,9}}" for letter in "abcdefgh"]
    params = [
        SamplingParams(max_tokens=10, temperature=2.0, seed=seed, grammar=GrammarSpec.regex(pattern), n=2)
        for seed, pattern in enumerate(patterns)
    ]
    outputs = engine.generate(["x"] * len(params), params)
    for pattern, output in zip(patterns, outputs, strict=True):
        assert all(re.fullmatch(pattern, sample.text) for sample in output.samples)


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_rows_under_masks_need_no_logits(tmp_path, monkeypatch, dtype):
    """But for those whose removed probability is measured; and with them they get the same tokens."""
    greedy = SamplingParams(max_tokens=40, temperature=0, grammar=GRAMMAR)
    scored = SamplingParams(max_tokens=40, temperature=0, grammar=GRAMMAR, prompt_logprobs=1)
    params = [greedy, scored, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True), greedy]
    prompts = ["x", "yes", "z", "zero"]

    def generate(engine):
        before = engine.stats().grammar.num_masks
        outputs = engine.generate(prompts, params)
        return [output.token_ids for output in outputs], engine.stats().grammar.num_masks - before

    with Engine(tiny_model("llama", tmp_path / "tiny"), dtype=dtype, threads=2) as engine:
        predict, predicted = engine._runner.model.predict, []

        def watched(*arguments, **options):
            predicted.append(predict(*arguments, **options))
            return predicted[-1]

        monkeypatch.setattr(engine._runner.model, "predict", watched)
        found = generate(engine)
        without = sum(prediction.logits is None for prediction in predicted)
        assert without > 10
        assert len(predicted) - without >= MEASURE_FIRST
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "wants_logits", lambda sequence: True)
            assert generate(engine) == found
        assert predicted[-1].logits is not None
        assert found[1] > 20  # every mask counts


def test_a_closed_engine_leaves_no_thread(tmp_path):
    threads = NewThreads()
    with Engine(tiny_model("llama", tmp_path / "tiny"), dtype="float32", threads=1) as engine:
        engine.generate("x", SAMPLING)
        assert any(name.startswith(MASK_THREAD) for name in threads.names())
    assert not [name for name in threads.names() if name.startswith("radixrt")]
