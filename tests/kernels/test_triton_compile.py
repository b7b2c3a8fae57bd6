"""Kernels compiled for sm_90, in a process of their own: this one may interpret them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from radixrt_kernels.gpu.checks import is_interpreted
from radixrt_kernels.gpu.compile import (
    MAX_REGISTERS,
    MAX_SHARED_BYTES,
    Report,
    Variant,
    compile_variant,
    faults,
)
from radixrt_kernels.gpu.production import all_variants, sample_variants

ROOT = Path(__file__).parents[2]


def compile_production(*options: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "radixrt_kernels.gpu.production", "--json", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def assert_sound(reports: list[dict]) -> None:
    assert not {report["name"]: report["faults"] for report in reports if report["faults"]}
    for report in reports:
        assert report["num_spills"] == 0, report
        assert 0 < report["num_registers"] <= MAX_REGISTERS, report
        assert report["num_shared_bytes"] <= MAX_SHARED_BYTES, report


@pytest.mark.timeout(600)
def test_one_of_each_kernel_compiles_for_sm_90():
    reports = compile_production()
    assert_sound(reports)
    named = {report["name"]: report for report in reports}
    assert named["extend bf16 D128 R4 page 16"]["num_wgmma"] > 0
    assert named["tree_decode bf16 D128 R4 page 16"]["num_async_128"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_production_configuration_compiles_for_sm_90():
    reports = compile_production("--all")
    assert len(reports) == len(list(all_variants()))
    assert_sound(reports)


def report(**changes):
    numbers = dict.fromkeys(
        (
            "num_registers",
            "num_spills",
            "num_shared_bytes",
            "num_wgmma",
            "num_async_128",
            "num_async_narrow",
            "num_loads_128",
            "num_stores_128",
        ),
        0,
    )
    return Report("kernel", **{**numbers, **changes})


@pytest.mark.parametrize(
    ("needs", "found", "fault"),
    [
        ({}, {"num_spills": 4}, "4 spills"),
        ({}, {"num_registers": 256}, "256 registers"),
        ({}, {"num_shared_bytes": 232_449}, "232449 bytes of shared memory"),
        ({"needs_wgmma": True}, {}, "no wgmma"),
        ({"reads_kv": True}, {}, "no 128-bit loads of keys and values"),
        ({"reads_kv": True}, {"num_async_128": 2, "num_async_narrow": 3}, "3 narrow copies beside 2"),
        ({"moves_128_bits": True}, {"num_loads_128": 1}, "no 128-bit loads and stores"),
    ],
)
def test_a_broken_rule_is_a_fault(needs, found, fault):
    variant = Variant("kernel", None, {}, {}, **needs)
    assert any(text.startswith(fault) for text in faults(variant, report(**found)))
    assert not list(faults(Variant("kernel", None, {}, {}), report(num_registers=255)))


@pytest.mark.skipif(not is_interpreted(), reason="kernels are compiled in this process")
def test_the_interpreter_compiles_nothing():
    with pytest.raises(RuntimeError, match="while TRITON_INTERPRET is set"):
        compile_variant(next(sample_variants(torch.bfloat16)))
