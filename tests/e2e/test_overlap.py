"""Steps that overlap on a device change no answer: overlap on == overlap off == the plain runner (float32)."""

import random
import threading

import pytest

from radixrt import DeviceError, Engine, GrammarSpec, InvalidRequest, RequestAborted, SamplingParams
from tests.support.devices import FakeDevice, device_engine
from tests.support.models import tiny_model
from tests.support.threads import begin_together

JSON = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["anna", "bob"]},
            "ages": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
)
CHECKED = GrammarSpec.json_schema(
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2, "maxItems": 3},
    on_unsupported="check",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", head_dim=64, seed=3)


def random_sampling(rng):
    kind = rng.choice(["plain", "plain", "json", "regex", "checked", "stop", "logprobs", "penalties", "bias"])
    fields = {
        "max_tokens": rng.choice([1, 2, 5, 12]),
        "temperature": rng.choice([0.0, 0.8, 1.5]),
        "seed": rng.randrange(1 << 64),
        "top_k": rng.choice([0, 0, 40]),
        "top_p": rng.choice([1.0, 0.9]),
        "min_p": rng.choice([0.0, 0.05]),
        "n": rng.choice([1, 1, 1, 3]),
        "ignore_eos": rng.random() < 0.5,
    }
    if kind == "json":
        fields |= {"grammar": JSON, "max_tokens": rng.choice([30, 50]), "ignore_eos": False}
    elif kind == "regex":
        # With few tokens left, what is drawn gives way to the run that ends the text in time.
        fields |= {"grammar": GrammarSpec.regex("(yes|no), because [a-z ]{3,20}[.]")}
        fields["max_tokens"] = rng.choice([19, 22, 30])
    elif kind == "checked":
        fields |= {"grammar": CHECKED, "max_tokens": 24}
    elif kind == "stop":
        fields |= {"stop": ("e", "ab"), "stop_token_ids": tuple(range(60, 75))}
    elif kind == "penalties":
        fields |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    elif kind == "bias":
        fields |= {"logit_bias": {7: 20.0, 9: -100.0}, "min_tokens": 1, "stop_token_ids": (7,)}
    if kind == "logprobs" or rng.random() < 0.25:
        fields |= {"logprobs": rng.choice([0, 2]), "prompt_logprobs": rng.choice([None, 0, 3])}
        fields["logprob_token_ids"] = rng.choice([(), (5, 6)])
    if fields["n"] > 1:
        fields["temperature"] = 0.9
    return SamplingParams(**fields)


def random_requests(seed, count=12):
    rng = random.Random(seed)
    stem = [rng.randrange(256) for _ in range(20)]
    prompts = [
        [*stem[: rng.randrange(20)], *(rng.randrange(256) for _ in range(rng.randrange(1, 6)))]
        for _ in range(count)
    ]
    return prompts, [random_sampling(rng) for _ in prompts]


def comparable(output):
    """Give what must be equal to the bit, and the logprobs beside it."""
    samples = [(item.token_ids, item.text, item.finish_reason) for item in output.samples]
    logprobs = [item for sample in output.samples for item in sample.logprobs] + list(
        output.prompt_logprobs or ()
    )
    return samples, logprobs


def assert_same(outputs, expected):
    for index, pair in enumerate(zip(outputs, expected, strict=True)):
        (got, got_logprobs), (wanted, wanted_logprobs) = map(comparable, pair)
        assert got == wanted, index
        for one, other in zip(got_logprobs, wanted_logprobs, strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=2e-4)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
            for (_, left), (_, right) in zip(one.top, other.top, strict=True):
                assert left == pytest.approx(right, abs=2e-4)


VARIANTS = [
    {},
    {"max_step_tokens": 7},
    {"prefill_mode": "separate", "max_step_tokens": 16},
    {"page_size": 1, "num_pages": 1000, "prefix_cache": False},
    {"max_running": 3, "policy": "fcfs"},
]


@pytest.mark.parametrize(("seed", "variant"), list(enumerate(VARIANTS)))
def test_overlap_on_equals_off_equals_plain(folder, monkeypatch, seed, variant):
    prompts, params = random_requests(seed)
    options = {"num_pages": 400, "max_context": 128, "seed": 5, "page_size": 4, **variant}
    with Engine(folder, dtype="float32", kernels="torch", **options) as engine:
        expected = engine.generate(prompts, params)
    for overlap in ("off", "on"):
        with device_engine(monkeypatch, folder, overlap=overlap, **options) as engine:
            assert_same(engine.generate(prompts, params), expected)
            assert_same(engine.generate(prompts, params), expected)  # now much is cached
            assert engine.stats().num_running == 0


def test_preempted_equals_undisturbed(folder, monkeypatch):
    prompts, params = random_requests(7, count=8)
    with Engine(folder, dtype="float32", kernels="torch", num_pages=400) as engine:
        expected = engine.generate(prompts, params)
    options = {"num_pages": 32, "prefix_cache": False, "max_context": 128, "overlap": "on"}
    with device_engine(monkeypatch, folder, **options) as engine:
        for _ in range(8):  # short outputs are expected now, so that more is admitted than will fit
            engine.generate([1], SamplingParams(max_tokens=1))
        begin_together(engine, sum(sampling.n for sampling in params))
        assert_same(engine.generate(prompts, params), expected)
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("part", ["launch", "sample", "collect"])
def test_a_step_that_fails_ends_its_sequences_only(folder, monkeypatch, part):
    long, short = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True), SamplingParams(max_tokens=3)
    with device_engine(monkeypatch, folder, max_context=64, overlap="on") as engine:
        expected = engine.generate([5, 6, 7], long).token_ids
        runner, num_calls = engine._runner, []
        real = getattr(runner, part)

        def failing(*arguments):
            num_calls.append(1)
            if len(num_calls) == 6:
                raise RuntimeError("no such luck")
            return real(*arguments)

        monkeypatch.setattr(runner, part, failing)
        with pytest.raises(DeviceError, match="no such luck"):
            engine.generate([[5, 6, 7], [8, 9]], long)
        engine.check()
        assert engine.generate([5, 6, 7], long).token_ids == expected
        assert engine.generate([1, 2], short).token_ids
        assert engine.stats().num_running == 0


def test_aborts_leave_nothing_behind(folder, monkeypatch):
    prompts, params = random_requests(11, count=16)
    with Engine(folder, dtype="float32", kernels="torch", num_pages=400) as engine:
        expected = engine.generate(prompts, params)
    endless = SamplingParams(max_tokens=100, ignore_eos=True)
    with device_engine(monkeypatch, folder, num_pages=400, max_context=128, overlap="on") as engine:
        ended = []
        gone = threading.Barrier(9)

        def deliver(item):
            if isinstance(item, BaseException):
                ended.append(item)
                threading.Thread(target=gone.wait, args=(30,)).start()

        tickets = [engine.submit(engine.request([index, 2, 3], endless), deliver) for index in range(8)]
        for ticket in tickets:
            ticket.abort()
        gone.wait(30)
        assert all(isinstance(item, RequestAborted) for item in ended)
        assert_same(engine.generate(prompts, params), expected)
        engine.check()


def test_a_surplus_token_is_neither_delivered_nor_counted(folder, monkeypatch):
    sampling = SamplingParams(
        max_tokens=20, temperature=0, stop_token_ids=tuple(range(5)), stop=("a", "b", "c")
    )
    usages = []
    for overlap in ("off", "on"):
        with device_engine(monkeypatch, folder, max_context=64, overlap=overlap) as engine:
            outputs = engine.generate([[1], [2], [3]], sampling)
            usages.append([(output.token_ids, output.usage) for output in outputs])
    assert usages[0] == usages[1]


def test_steps_do_overlap(folder, monkeypatch):
    """A step is launched before the one before it is waited for, and never two before that."""
    device = FakeDevice()
    with device_engine(monkeypatch, folder, device=device, max_context=64, overlap="on") as engine:
        real, order = engine._runner.launch, []
        monkeypatch.setattr(engine._runner, "launch", lambda plan: (order.append("launch"), real(plan))[1])
        collect = engine._runner.collect
        monkeypatch.setattr(
            engine._runner, "collect", lambda step: (order.append("collect"), collect(step))[1]
        )
        engine.generate([1, 2, 3], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    assert order[:4] == ["launch", "launch", "collect", "launch"]
    under_way = 0
    for call in order:
        under_way += 1 if call == "launch" else -1
        assert 0 <= under_way <= 2
    waits = [entry[1] for entry in device.log if entry != "record"]
    assert waits == sorted(waits)


def test_overlap_that_cannot_be_is_refused(folder):
    with pytest.raises(InvalidRequest, match="overlap must be auto or off here"):
        Engine(folder, dtype="float32", kernels="torch", overlap="on")
