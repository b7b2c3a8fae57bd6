"""The device runner with Triton's kernels (a GPU, else the interpreter) against the plain runner; and its graphs."""

import threading
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from radixrt import Engine, GrammarSpec, SamplingParams
from radixrt.exec import graphs
from radixrt.exec.device import CudaDevice
from radixrt.exec.graphs import Bucket
from radixrt.exec.staging import Staging
from radixrt.model.device_kernels import TRITON, AttentionPlanner
from radixrt.model.spec import ModelSpec
from tests.support.devices import TORCH, FakeDevice, device_engine
from tests.support.models import tiny_model
from tests.support.paged import DEVICE
from tests.support.threads import begin_together

# The interpreter computes with numpy, which warns of what kernels meet on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
SHAPE = {"head_dim": 64, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
STEM = [11, 12, 13, 14, 15, 16, 17, 18, 19]
SEEDED = SamplingParams(max_tokens=5, temperature=1.2, seed=77, ignore_eos=True)
MIXED = {
    "greedy": SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
    "seeded": SEEDED,
    "filters": replace(SEEDED, top_k=30, top_p=0.9, min_p=0.01, seed=(1 << 64) - 3),
    "penalties": replace(SEEDED, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.7),
    "bias": replace(SEEDED, logit_bias={5: 100.0}, min_tokens=3, stop_token_ids=(5,), ignore_eos=False),
    "samples": replace(SEEDED, n=2, max_tokens=4),
    "logprobs": replace(SEEDED, logprobs=2, prompt_logprobs=1, logprob_token_ids=(3, 4)),
    "chosen logprob": replace(SEEDED, logprobs=0),
    "regex": replace(SEEDED, grammar=GrammarSpec.regex("(yes|no): [a-z]{1,3}[.]"), max_tokens=12),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", **SHAPE)


def answers(engine, names):
    """Ask all at once: whatever the engine has begun by when, it runs the same batches."""
    prompts, params = [[*STEM, index, 3] for index in range(len(names))], [MIXED[name] for name in names]
    begin_together(engine, sum(sampling.n for sampling in params))
    outputs = engine.generate(prompts, params)
    return [[sample.token_ids for sample in output.samples] for output in outputs], outputs


@pytest.mark.timeout(600)
def test_triton_gives_the_plain_runners_tokens(folder, monkeypatch):
    """Alone and together, sampled with seeds, under masks, penalties and bias; graphs and eager steps."""
    options = {"page_size": 4, "num_pages": 200, "device": DEVICE.type}
    with Engine(folder, dtype="float32", kernels="torch", **options) as engine:
        expected, expected_outputs = answers(engine, list(MIXED))
    device = FakeDevice() if DEVICE.type == "cpu" else CudaDevice(DEVICE)
    options = {"max_running": 4, "max_context": 40, "overlap": "on"}
    with device_engine(monkeypatch, folder, kernels=TRITON, device=device, **options) as engine:
        got, outputs = answers(engine, list(MIXED))
    assert got == expected
    for one, other in zip(outputs, expected_outputs, strict=True):
        for left, right in zip(one.logprobs, other.logprobs, strict=True):
            assert left.token_id == right.token_id
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert [token_id for token_id, _ in left.top] == [token_id for token_id, _ in right.top]


def test_decodes_replay_and_the_rest_runs_eagerly(folder, monkeypatch):
    device = FakeDevice()
    with device_engine(monkeypatch, folder, device=device, max_running=3, max_context=40) as engine:
        assert device.num_captures == 3  # buckets of 1, 2 and 3 rows
        engine.generate([[1, 2, 3]] * 3, [replace(SEEDED, seed=seed) for seed in range(3)])
        num_replays = device.num_replays
        assert num_replays >= 4
        engine.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=1))
        assert device.num_replays == num_replays  # a prefill


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (8,), (5,)])
def test_padded_rows_and_the_bucket_change_nothing(folder, monkeypatch, sizes):
    """Attention leaves NaN in rows that no item names: it must reach no answer."""
    names = ["greedy", "seeded", "filters", "logprobs", "regex"]
    with Engine(folder, dtype="float32", kernels="torch", page_size=4, num_pages=200) as engine:
        expected, _ = answers(engine, names)
    monkeypatch.setattr(graphs, "BUCKETS", sizes)
    device = FakeDevice()
    with device_engine(monkeypatch, folder, device=device, max_context=40) as engine:
        assert answers(engine, names)[0] == expected
        engine._runner.store.data[0] = float("nan")  # what padded rows write there, nobody reads
        assert answers(engine, names)[0] == expected
    assert device.num_replays > 3


@pytest.mark.parametrize("field", ["num_items", "num_slots", "num_pages"])
def test_a_decode_that_fits_no_graph_runs_eagerly(folder, monkeypatch, field):
    def run():
        device = FakeDevice()
        with device_engine(monkeypatch, folder, device=device, max_context=40) as engine:
            return answers(engine, ["greedy", "seeded"])[0], device.num_replays

    expected, num_replays = run()
    real = Bucket.of

    def small(num_rows, planner, *, max_context):
        return replace(real(num_rows, planner, max_context=max_context), **{field: 1})

    monkeypatch.setattr(Bucket, "of", small)
    got, num_fewer = run()
    assert got == expected
    assert num_fewer < num_replays


def test_buckets_hold_every_tree_of_pages(folder):
    """Batches over chains, bushes and nothing shared fit the bucket of their size, in items as in partial results."""
    rng = np.random.default_rng(0)
    spec = replace(ModelSpec.load(folder), num_heads=32, num_kv_heads=8, head_dim=128)
    planner = AttentionPlanner(spec, 4, torch.bfloat16)
    for num_rows in (1, 2, 8, 24, 64):
        bucket = Bucket.of(num_rows, planner, max_context=4096)
        for kind in range(12):
            table = rng.integers(1, 1 << 20, (num_rows, 1024)).astype(np.int32)
            lengths = rng.integers(1, 4096, num_rows)
            for row in range(1, num_rows):
                shared = (0, row * 15, 512, int(rng.integers(0, 1000)))[kind % 4]
                table[row, :shared] = table[row - 1, :shared]
            [plan] = planner.plan(table, (1,) * num_rows, tuple(lengths.tolist()))
            assert len(plan.decode.items) <= bucket.num_items
            assert len(plan.decode.members) <= bucket.num_slots
            assert plan.decode.num_slots <= bucket.num_slots


class Depth(threading.local):
    """How many calls of each kind this thread is in: the engine's thread may run a last step beside the test's."""

    watched = kernels = 0


def test_launch_and_sample_wait_for_nothing(folder, monkeypatch):
    """They read no tensor: on a card, each read would wait for all that was asked for before."""
    reads, depth = [], Depth()

    def exempt(kernel):
        def call(*arguments, **options):
            depth.kernels += 1
            try:
                return kernel(*arguments, **options)
            finally:
                depth.kernels -= 1

        return call

    kernels = replace(TORCH, **{field.name: exempt(getattr(TORCH, field.name)) for field in fields(TORCH)})
    with device_engine(monkeypatch, folder, kernels=kernels, max_context=40, overlap="on") as engine:
        runner = engine._runner
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"):
            real = getattr(torch.Tensor, name)

            def read(tensor, *arguments, name=name, real=real):
                if depth.watched and not depth.kernels:
                    reads.append(name)
                return real(tensor, *arguments)

            monkeypatch.setattr(torch.Tensor, name, read)
        for part in ("launch", "sample"):
            real = getattr(runner, part)

            def watch(*arguments, real=real):
                depth.watched += 1
                try:
                    return real(*arguments)
                finally:
                    depth.watched -= 1

            monkeypatch.setattr(runner, part, watch)
        for _ in range(3):  # buffers on the host grow at first, and are looked at
            reads.clear()
            answers(engine, list(MIXED))
        assert reads == []
        depth.watched += 1
        torch.ones(1).item()
        assert reads == ["item"]  # the watch does see


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_host_buffer_is_written_again_when_its_step_is_over(folder, monkeypatch, overlap):
    """Before that, a card may still be copying from it."""
    users, collected, present, num_copies = {}, set(), [], []
    real_copy = Staging.copy

    def copy(staging, layout, arrays):
        real_copy(staging, layout, arrays)
        if present:
            buffer = staging._host[staging._turn].data_ptr()
            before = users.get(buffer)
            assert before is None or before is present[-1] or before in collected
            users[buffer] = present[-1]
            num_copies.append(before)

    monkeypatch.setattr(Staging, "copy", copy)
    with device_engine(monkeypatch, folder, max_context=40, overlap=overlap) as engine:
        runner, numbers = engine._runner, {}
        launch, sample, collect = runner.launch, runner.sample, runner.collect

        def launching(plan):
            present.append(number := object())
            step = launch(plan)
            numbers[id(step)] = (number, step)
            return step

        def sampling(step, plan):
            present.append(numbers[id(step)][0])
            sample(step, plan)

        def collecting(step):
            result = collect(step)
            collected.add(numbers[id(step)][0])
            return result

        for name, call in (("launch", launching), ("sample", sampling), ("collect", collecting)):
            monkeypatch.setattr(runner, name, call)
        answers(engine, list(MIXED))
        assert engine.stats().num_running == 0  # an assertion in the engine's thread would have ended it
    assert len(num_copies) > 10
    assert any(before is not None for before in num_copies)


def test_the_fake_device_freezes_what_the_host_holds():
    """As a CUDA graph does: else a runner could pass the tests that a card fails."""
    device, numbers, tensor = FakeDevice(), [1.0], torch.zeros(3)
    kernels = device.kernels(replace(TORCH, silu_mul=lambda x: x * 2))
    graph = device.capture(lambda: kernels.silu_mul(tensor + numbers[0]))
    assert graph.output.tolist() == [2.0] * 3
    numbers[0] = 5.0
    tensor.fill_(1.0)
    graph.replay()
    assert graph.output.tolist() == [4.0] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_on_a_card_an_engine_gives_the_torch_decoders_tokens(folder, overlap):
    options = {"dtype": "float32", "device": "cuda", "num_pages": 400, "page_size": 4, "max_running": 16}
    with Engine(folder, kernels="torch", **options) as engine:
        expected, _ = answers(engine, list(MIXED))
    with Engine(folder, overlap=overlap, max_context=64, **options) as engine:
        assert isinstance(engine._runner._device, CudaDevice)
        assert answers(engine, list(MIXED))[0] == expected
