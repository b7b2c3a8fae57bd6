"""`radixrt bench gpu` without a GPU: its plan, its refusals, and its cases at small sizes in the interpreter."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from radixrt.bench import gpu, gpu_runner
from radixrt.bench.gpu import Figure, cascade_gain, table
from radixrt.bench.gpu_cases import (
    CopyCase,
    DecodeCase,
    ExtendCase,
    NormCase,
    RopeCase,
    SampleCase,
    Shape,
    SiluCase,
    all_cases,
)
from radixrt.errors import DeviceError
from radixrt.model.spec import RopeSpec
from tests.support.devices import TORCH, FakeDevice
from tests.support.paged import DEVICE

ROOT = Path(__file__).parents[2]
SMALL = Shape(
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=64,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=1000,
)
# The interpreter cuts bfloat16 off where the card rounds.
INTERPRETED = 2e-2


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(2, 40),
        DecodeCase(5, 300, num_shared_tokens=256),
        DecodeCase(5, 300, num_shared_tokens=256, is_merged=False),
        ExtendCase(40, 40),
        ExtendCase(100, 130),
        RopeCase(5),
        NormCase(3),
        SiluCase(3),
        SampleCase(3, has_filters=False),
        SampleCase(3, has_filters=True),
        CopyCase(3),
    ],
    ids=lambda case: case.name,
)
def test_every_case_finds_its_kernel_right(case):
    torch.manual_seed(0)
    prepared = replace(case, shape=SMALL).prepare(DEVICE)
    assert prepared.error() <= (INTERPRETED if case.max_error else 0.0)
    for peer in prepared.peers.values():
        peer()


def test_a_wrong_kernel_is_found(monkeypatch):
    prepared = replace(NormCase(3), shape=SMALL).prepare(DEVICE)
    monkeypatch.setattr("radixrt.bench.gpu_cases.EPSILON", 1.0)
    good = prepared.error()
    monkeypatch.setattr("radixrt.bench.gpu_cases.add_norm", lambda x, residual, **_: x)
    assert prepared.error() > 0.1 > good


@pytest.mark.parametrize(
    ("name", "floor_us"),
    [
        # from the issue: bytes at 4.3 TB/s, operations at 790 TFLOP/s
        ("tree_decode 64 x 2048", 125),
        ("tree_decode 1 x 32768", 31),
        ("rope_write 64", 0.4),
        ("rope_write 8192", 47),
        ("add_norm 8192", 62),
        ("silu_mul 8192", 164),
    ],
)
def test_floors_are_those_computed_by_hand(name, floor_us):
    [case] = [case for case in all_cases() if case.name == name]
    assert 1e6 * case.floor_s == pytest.approx(floor_us, rel=0.1)


def test_names_are_distinct_and_the_gain_is_told():
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    gain = cascade_gain({name: 50.0 if "merged" not in name else 200.0 for name in names})
    assert gain["measured"] == 4.0
    assert gain["by_bytes"] == pytest.approx(64 * 2176 / (64 * 128 + 2048), rel=0.05)


def test_the_table_says_what_is_wrong():
    figures = [
        Figure("good", 10.0, 8.0, 1e-4, 1e-3, {"peer": 20.0}),
        Figure("bad", 10.0, 8.0, 1e-2, 1e-3, {}),
        Figure("nan", 10.0, 8.0, float("nan"), 1e-3, {}),
    ]
    _, good, peer, bad, nan = table(figures)
    assert "80%" in good
    assert "WRONG" not in good
    assert "20.0" in peer
    assert "WRONG" in bad
    assert "WRONG" in nan


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_and_names_dry():
    with pytest.raises(DeviceError, match=r"needs a CUDA device; --dry plans and compiles without one"):
        gpu.require_device()
    with pytest.raises(DeviceError, match="unset TRITON_INTERPRET"):
        gpu.dry_run(print)


def test_the_runners_cases_run_on_any_device(monkeypatch):
    """The same steps as on a card, on one that records and replays; a second run computes its prompts anew."""
    spec = replace(
        gpu_runner.llama_spec(),
        hidden_size=64,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=500,
        sliding_windows=(None, None),
        rope=RopeSpec(tuple(10_000.0 ** -(i / 32) for i in range(32))),
    )
    monkeypatch.setattr(gpu_runner, "NUM_STEPS", 4)
    cases = [gpu_runner.RunnerCase(2, 20), gpu_runner.RunnerCase(3, 40, num_shared_tokens=32)]
    device, lines = FakeDevice(), []
    drive = gpu_runner.make_drive(spec, device, cases, kernels=device.kernels(TORCH))
    found = gpu_runner.time_cases(drive, cases, lines.append)
    assert list(found) == ["decode 2 x 20", "decode 3 x 40, 32 shared"]
    assert len(lines) == 3
    assert device.num_replays > 2 * 2 * gpu_runner.NUM_STEPS
    for figures in found.values():
        assert 0 < figures["us"] < float("inf")
        assert figures["prefill_us"] > figures["prefill_floor_us"] > 0
    # Of the second case's prompts, two of three take the first one's prefix, in both runs.
    assert drive.scheduler.cache.counters.num_shared_tokens == 2 * 2 * 32


def test_floors_of_the_runner_are_those_computed_by_hand():
    floors = {case.name: 1e3 * case.floor_s for case in gpu_runner.CASES}
    assert floors["decode 1 x 128"] == pytest.approx(3.49, rel=0.01)
    assert floors["decode 64 x 2048"] == pytest.approx(7.49, rel=0.01)
    assert 2048 / gpu_runner.RunnerCase(1, 2048).prefill_floor_s == pytest.approx(54_500, rel=0.05)


def radixrt(*arguments: str):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "radixrt", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=600
    )


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    done = radixrt("bench", "gpu", "--dry", "--json-file", str(tmp_path / "none" / "gpu.json"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("radixrt: json-file must be a file that can be written, got ")


@pytest.mark.timeout(600)
def test_dry_plans_and_compiles_every_case(tmp_path):
    done = radixrt("bench", "gpu", "--dry", "--json-file", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "gpu.json").read_text())
    assert [case["name"] for case in outcome["cases"]] == [case.name for case in all_cases()]
    for case in gpu_runner.CASES:
        assert set(outcome["runner_host_us"][case.name]) == {*gpu_runner.HOST_PARTS, "step"}
    compiled = set(outcome["kernels"])
    for case in all_cases():
        assert {variant.name for variant in case.variants()} <= compiled
        assert case.name in done.stdout
