"""What `radixrt bench workloads` runs and tells, with an engine and a peer that take no time."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from radixrt.bench import peers
from radixrt.bench.peers import PeerArm
from radixrt.bench.prompts import SIZES, Prompts, rounds_of
from radixrt.bench.served import measure_works, works_of, works_report
from radixrt.bench.workloads import SimRequest
from radixrt.cli import app
from radixrt.errors import EngineError, InvalidRequest
from tests.support.models import tiny_model

PEER = """
class Peer:
    version = "1.2"

    def __init__(self, model):
        self.model = model

    def reset(self):
        print("noise of a library")

    def generate(self, prompts, max_tokens):
        if max_tokens == [13]:
            raise SystemExit(3)
        return [[len(ids)] * count for ids, count in zip(prompts, max_tokens, strict=True)]

    def generate_json(self, prompts, schema, max_tokens):
        return [self.model for _ in prompts]
"""


class Echo:
    """Answers with the prompt's length; a call takes as many seconds as it has prompts."""

    def __init__(self):
        self.calls = []
        self.num_resets = 0

    def reset(self):
        self.num_resets += 1

    def generate(self, prompts, max_tokens):
        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        self.calls.append([list(ids) for ids in prompts])
        return [[len(ids)] * count for ids, count in zip(prompts, counts, strict=True)], float(len(prompts))

    def generate_json(self, prompts, schema, max_tokens):
        return ['{"name": 3}' for _ in prompts], float(len(prompts))

    def close(self):
        pass


def encode(text):
    return list(text.encode())


def works(**options):
    return works_of(Prompts(encode, chat=encode), SIZES["small"], **options)


def test_conversations_are_sent_with_all_that_was_said():
    arm = Echo()
    run = works()["fork"](arm)
    first, second = arm.calls
    assert len(first) == SIZES["small"].num_branches
    for before, after, spoken in zip(first, second, run.outputs, strict=True):
        assert after[: len(before)] == before
        assert after[len(before) : len(before) + 32] == spoken[:32]
    assert run.seconds == 2 * len(first)


def test_prompts_share_what_they_say_and_no_more():
    arm = Echo()
    works()["few_shot"](arm)
    (prompts,) = arm.calls
    assert all(ids[:1500] == prompts[0][:1500] for ids in prompts)
    assert len({tuple(ids[1500:]) for ids in prompts}) == len(prompts)


def test_recorded_calls_follow_their_parents():
    requests = [
        SimRequest(0.0, [1, 2], [7] * count, label="", parent=parent)
        for count, parent in ((2, None), (3, 0), (1, None), (2, 1))
    ]
    arm = Echo()
    run = works(agents=requests)["agents"](arm)
    assert [len(call) for call in arm.calls] == [2, 1, 1]
    assert [len(output) for output in run.outputs] == [2, 3, 1, 2]
    assert rounds_of([]) == []


def test_arms_take_turns_and_are_compared():
    arms = {"ours": Echo(), "other": Echo()}
    chosen = {name: work for name, work in works().items() if name in ("json", "chat")}
    measured = measure_works(arms, chosen, num_repetitions=2, reference="ours", pause_s=0)
    assert measured["json"]["num_valid"] == {"ours": 0, "other": 0}
    assert measured["chat"]["ratio"]["other"] == 1
    assert measured["chat"]["is_equal"]["other"]
    assert len(measured["chat"]["all_seconds"]["ours"]) == 2
    assert arms["other"].num_resets == 6
    assert "0/8" in works_report({"machine": {"text": "here"}, "workloads": measured})


@pytest.fixture
def peer(tmp_path, monkeypatch):
    (tmp_path / "drivers").mkdir()
    (tmp_path / "drivers" / "echo.py").write_text(PEER)
    (tmp_path / "drive.py").write_text((peers.FOLDER / "drive.py").read_text())
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "DRIVERS", ("echo",))


@pytest.mark.usefixtures("peer")
def test_a_peer_answers_from_its_own_process():
    arm = PeerArm("echo", python=sys.executable, model="the model", threads=1)
    try:
        arm.reset()
        outputs, seconds = arm.generate([[1, 2], [3]], 2)
        assert outputs == [[2, 2], [1, 1]]
        assert 0 <= seconds < 10
        assert arm.generate_json([[1]], {}, 5)[0] == ["the model"]
        assert arm.about["version"] == "1.2"
        with pytest.raises(EngineError, match="exit status 3"):
            arm.generate([[1]], 13)
    finally:
        arm.close()


@pytest.mark.usefixtures("peer")
def test_an_unknown_peer_is_refused():
    with pytest.raises(InvalidRequest, match="echo"):
        PeerArm("ecko", python=sys.executable, model="m", threads=1)


@pytest.mark.usefixtures("peer")
def test_a_python_that_cannot_be_run_is_refused(tmp_path):
    for python in (tmp_path / "none", tmp_path):
        with pytest.raises(InvalidRequest, match="peer-python must be a Python that can be run"):
            PeerArm("echo", python=python, model="m", threads=1)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 5", "exit status 5"),
        ("printf '\\377\\376 noise\\n'; exit 6", "exit status 6"),
        ("echo 'radixrt-peer {'; exec sleep 600", "not a JSON object: {"),
        ("echo 'radixrt-peer [1]'; exec sleep 600", "not a JSON object"),
    ],
)
def test_a_peer_that_does_not_answer_is_named_and_ended(tmp_path, monkeypatch, script, message):
    started, popen = [], subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=message):
        PeerArm("vllm_cpu", python=python, model="m", threads=1)
    assert started[0].poll() is not None


def test_drivers_are_listed():
    assert {"vllm_cpu", "llama_cpp", "transformers_generate"} <= set(peers.DRIVERS)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--size", "smal"], "small"),
        (["--arm", "cache_of"], "cache_off"),
        (["--vs", "vllm"], "vllm_cpu"),
        (["--vs", "vllm_cpu"], "peer-python"),
        (["--peer-python", sys.executable], "peer-python and peer-model need vs"),
        (["--peer-model", "m"], "peer-python and peer-model need vs"),
    ],
)
def test_wrong_options_are_refused(arguments, word):
    outcome = CliRunner().invoke(app, ["bench", "workloads", *arguments])
    assert outcome.exit_code != 0
    assert word in str(outcome.exception) + outcome.output


def test_arms_of_a_real_engine_give_equal_outputs(tmp_path):
    tiny_model("llama", tmp_path, max_position_embeddings=1024)
    arguments = ["--model", str(tmp_path), "--dtype", "float32", "--kernels", "torch", "--repetitions", "1"]
    outcome = CliRunner().invoke(
        app, ["bench", "workloads", *arguments, "--only", "prefill_512", "--arm", "cache_off", "--json"]
    )
    assert outcome.exit_code == 0, outcome.output
    measured = json.loads(outcome.stdout)
    assert measured["workloads"]["prefill_512"]["is_equal"] == {"radixrt": True, "cache_off": True}
    assert measured["workloads"]["prefill_512"]["seconds"]["radixrt"] > 0
