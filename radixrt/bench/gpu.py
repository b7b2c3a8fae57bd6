"""`radixrt bench gpu`: every kernel against float64 and against its floor, then the runner, on one CUDA device.

Times are of CUDA events around replays of a CUDA graph that holds the launch (events around plain calls where a graph
cannot hold it); each figure is a median. Data larger than the second-level cache is read from memory; smaller data
stays in the cache, so that a small case can beat its floor.
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from radixrt_kernels.gpu.checks import is_interpreted
from radixrt_kernels.gpu.compile import compile_variant
from radixrt_kernels.gpu.production import describe

from radixrt.bench import gpu_runner
from radixrt.bench.gpu_cases import COPY_BYTES_PER_S, MATRIX_FLOPS_PER_S, Case, DecodeCase, all_cases
from radixrt.errors import DeviceError, EngineError

NUM_WARM_UP = 3
NUM_BATCHES = 7
BATCH_S = 0.02  # long enough that the events' own resolution does not matter


@dataclass(frozen=True, slots=True)
class Figure:
    """One case on one device. Times in microseconds; error and its limit as Prepared.error says."""

    name: str
    time_us: float
    floor_us: float
    error: float
    max_error: float
    peers_us: dict[str, float]

    @property
    def is_correct(self) -> bool:
        return self.error <= self.max_error  # False for NaN

    @property
    def fraction_of_floor(self) -> float:
        return self.floor_us / self.time_us


def require_device() -> torch.device:
    """Give the CUDA device.

    Raises:
        DeviceError: there is none, or Triton interprets.
    """
    if not torch.cuda.is_available():
        raise DeviceError("radixrt bench gpu needs a CUDA device; --dry plans and compiles without one")
    refuse_interpreter()
    return torch.device("cuda")


def refuse_interpreter() -> None:
    """Raise DeviceError while Triton interprets kernels: nothing would be compiled."""
    if is_interpreted():
        raise DeviceError("radixrt bench gpu compiles kernels; unset TRITON_INTERPRET")


def machine() -> dict[str, Any]:
    """Describe where figures come from."""
    has_device = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_device else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(["radixrt", *sys.argv[1:]]),
        "floors": {"copy_bytes_per_s": COPY_BYTES_PER_S, "matrix_flops_per_s": MATRIX_FLOPS_PER_S},
    }


def dry_run(say: Callable[[str], None]) -> dict[str, Any]:
    """Compile what the cases need and give the plan; time the host's part of the runner's steps.

    Raises:
        EngineError: a kernel does not compile as it must.
    """
    refuse_interpreter()
    cases = all_cases()
    variants = {variant.name: variant for case in cases for variant in case.variants()}
    reports = []
    for variant in variants.values():
        reports.append(report := compile_variant(variant))
        say(describe(report))
    if broken := [report.name for report in reports if report.faults]:
        raise EngineError(f"kernels do not compile as they must: {', '.join(broken)}")
    for case in cases:
        say(f"{case.name:44} floor {1e6 * case.floor_s:9.1f} us")
    return {
        "machine": machine(),
        "kernels": [report.name for report in reports],
        "cases": [{"name": case.name, "floor_us": 1e6 * case.floor_s} for case in cases],
        "runner_host_us": gpu_runner.dry_run(say),
    }


def run(device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Check and time every case, then the runner; tables are said last."""
    torch.manual_seed(0)
    figures = []
    for case in all_cases():
        figures.append(figure := measure(case, device))
        say(f"{case.name}: {figure.time_us:.1f} us")
    for line in table(figures):
        say(line)
    return {
        "machine": machine(),
        "figures": [
            {
                "name": figure.name,
                "us": figure.time_us,
                "floor_us": figure.floor_us,
                "fraction_of_floor": figure.fraction_of_floor,
                "error": figure.error,
                "max_error": figure.max_error,
                "is_correct": figure.is_correct,
                "peers_us": figure.peers_us,
            }
            for figure in figures
        ],
        "cascade": cascade_gain({figure.name: figure.time_us for figure in figures}),
        "runner": gpu_runner.run(device, say),
    }


def measure(case: Case, device: torch.device) -> Figure:
    """Check one case, then time it and its peers."""
    prepared = case.prepare(device)
    error = prepared.error()
    time_us = 1e6 * time_s(prepared.run, is_graphable=prepared.is_graphable)
    peers_us = {name: 1e6 * time_s(peer, is_graphable=True) for name, peer in prepared.peers.items()}
    return Figure(case.name, time_us, 1e6 * case.floor_s, error, case.max_error, peers_us)


def time_s(launch: Callable[[], object], *, is_graphable: bool) -> float:
    """Give the median seconds of one launch."""
    for _ in range(NUM_WARM_UP):
        launch()
    torch.cuda.synchronize()
    repeat: Callable[[], object] = launch
    if is_graphable:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        repeat = graph.replay
    repeats = max(int(BATCH_S / max(_batch_s(repeat, 3), 1e-7)), 1)
    return statistics.median(_batch_s(repeat, repeats) for _ in range(NUM_BATCHES))


def _batch_s(repeat: Callable[[], object], count: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        repeat()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000 / count


def cascade_gain(times_us: dict[str, float]) -> dict[str, float]:
    """Give how much faster shared segments make decode, measured and by the count of bytes. Pure."""
    cases = [case for case in all_cases() if isinstance(case, DecodeCase) and case.num_shared_tokens]
    [plain] = [case for case in cases if not case.is_merged]
    [merged] = [case for case in cases if case.is_merged]
    return {
        "measured": times_us[plain.name] / times_us[merged.name],
        "by_bytes": plain.floor_s / merged.floor_s,
    }


def table(figures: list[Figure]) -> list[str]:
    """Give the lines of the summary. Pure."""
    lines = [f"{'case':44} {'us':>9} {'floor us':>9} {'of floor':>8} {'error':>8}"]
    for figure in figures:
        verdict = "" if figure.is_correct else f"  WRONG (at most {figure.max_error:g})"
        lines.append(
            f"{figure.name:44} {figure.time_us:9.1f} {figure.floor_us:9.1f} "
            f"{figure.fraction_of_floor:8.0%} {figure.error:8.1e}{verdict}"
        )
        lines += [f"{'  against ' + name:44} {peer_us:9.1f}" for name, peer_us in figure.peers_us.items()]
    return lines
