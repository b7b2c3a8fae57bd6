"""Time the CPU kernels against plain torch and against reading the same bytes, on one thread.

What is timed is a layer within a step: one call attends in all layers of a model, and its time is divided by their number,
with what a step does once (the call from Python, its checks, the planning of work) in it. The layers together are
larger than any cache. All kernels, torch and the reading take turns within every round, in an order turned around from
round to round; ratios are medians of the rounds' ratios, so other work on the machine meets both sides of one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from radixrt_kernels import cpu, reference
from radixrt_kernels.cpu.attention import CpuAttention

from radixrt.bench.machines import processor_name
from radixrt.config import home_folder
from radixrt.errors import EngineError
from radixrt.memory import advise_huge_pages

NUM_LAYERS, NUM_KV_HEADS, NUM_GROUP_HEADS, HEAD_DIM = 30, 3, 3, 64  # SmolLM2-135M
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal sequences.

    Attributes:
        num_new: new tokens of each; they are the last of its context.
        num_shared: leading positions that all have in the same pages, whole pages.
    """

    num_sequences: int
    num_new: int
    num_context: int
    num_shared: int = 0

    @property
    def num_pages(self) -> int:
        """Pages that hold the batch, shared ones counted once, page 0 left out."""
        num_own = (self.num_context - self.num_shared + PAGE_SIZE - 1) // PAGE_SIZE
        return self.num_shared // PAGE_SIZE + self.num_sequences * num_own

    @property
    def num_read_bytes(self) -> int:
        """Bytes of keys and values in bfloat16 that one layer must read."""
        num_tokens = self.num_shared + self.num_sequences * (self.num_context - self.num_shared)
        return num_tokens * 2 * NUM_KV_HEADS * HEAD_DIM * 2

    @property
    def num_flops(self) -> float:
        """Multiplications and additions of one layer's two products."""
        mean_seen = self.num_context - (self.num_new - 1) / 2
        return 4.0 * self.num_sequences * self.num_new * mean_seen * NUM_KV_HEADS * NUM_GROUP_HEADS * HEAD_DIM


SHAPES = {
    "paged_decode": Shape(32, 1, 1024),
    "paged_decode_shared": Shape(32, 1, 1024, num_shared=896),
    "extend": Shape(1, 512, 1024),
}


class Case:
    """A batch over scattered pages of NUM_LAYERS layers, bfloat16."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shape = shape
        layer = torch.empty(
            shape.num_pages + 1, 1, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16
        )
        layer.normal_(generator=generator)
        self.data = torch.empty(len(layer), NUM_LAYERS, *layer.shape[2:], dtype=torch.bfloat16)
        advise_huge_pages(self.data)
        self.data.copy_(layer)  # all layers alike: their values do not matter
        order = (1 + torch.randperm(shape.num_pages, generator=generator)).int()
        num_shared = shape.num_shared // PAGE_SIZE
        shared, own = order[:num_shared], order[num_shared:]
        rows = own.view(shape.num_sequences, -1)
        self.page_table = torch.cat([shared.expand(shape.num_sequences, -1), rows], dim=1).contiguous()
        num_tokens, num_heads = shape.num_sequences * shape.num_new, NUM_KV_HEADS * NUM_GROUP_HEADS
        q = torch.randn(NUM_LAYERS, num_tokens, num_heads, HEAD_DIM, generator=generator)
        self.q = q.to(torch.bfloat16)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of all implementations."""
        return {
            "page_table": self.page_table,
            "num_query_tokens": (self.shape.num_new,) * self.shape.num_sequences,
            "num_context_tokens": (self.shape.num_context,) * self.shape.num_sequences,
            "scale": HEAD_DIM**-0.5,
        }

    def attend_layers(self, attention: CpuAttention) -> torch.Tensor:
        """Attend in all layers in one call."""
        return attention.attend_layers(self.q, self.data, **self.options)

    def attend_with_torch(self, layer_index: int = 0) -> torch.Tensor:
        """Attend in one layer: the reference is slow enough to need no more."""
        return reference.paged_attention(self.q[layer_index], self.data[:, layer_index], **self.options)

    def read_layers(self) -> torch.Tensor:
        """Read as many bytes as the layers have on average, in one run each."""
        words = self.data.view(-1).view(torch.float32)
        count = self.shape.num_read_bytes // words.element_size()
        sums = [words[i * count : (i + 1) * count].sum() for i in range(NUM_LAYERS)]
        return torch.stack(sums)

    def error(self, attention: CpuAttention) -> float:
        """Give the largest difference from float64 in the first and the last layer."""
        found, ends = self.attend_layers(attention).double(), (0, NUM_LAYERS - 1)
        exact = [
            reference.paged_attention(self.q[i].double(), self.data[:, i].double(), **self.options)
            for i in ends
        ]
        return float((found[list(ends)] - torch.stack(exact)).abs().max())


@dataclass(frozen=True, slots=True)
class Arm:
    """Something that is timed.

    Attributes:
        num_layers: that one run goes through.
    """

    run: Callable[[], object]
    num_layers: int


Rounds = Mapping[str, Sequence[float]]  # seconds of a layer, round by round


def measure_kernels(*, num_rounds: int = 16, threads: int = 1) -> dict[str, Any]:
    """Time every CPU kernel; give plain JSON data with units in the names.

    Raises:
        EngineError: no compiler is there, or it fails (says why).
    Cost: 900 MB.
    """
    try:
        library = cpu.load_library(home_folder() / "build")
    except cpu.BuildError as error:
        raise EngineError(f"the CPU kernels cannot be built: {error}") from error
    attention = CpuAttention(library, num_threads=threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cases = {name: Case(shape) for name, shape in SHAPES.items()}
        rounds = _in_turn(
            _arms(cases, attention),
            num_rounds=num_rounds,
            # what else runs on the machine does not count, where one thread does all the work
            clock=time.thread_time if threads == 1 else time.perf_counter,
        )
        measured: dict[str, Any] = {
            name: _row(name, case.shape, rounds, error=case.error(attention)) for name, case in cases.items()
        }
        gain = _median_ratio(rounds["paged_decode"], rounds["paged_decode_shared"])
        measured["paged_decode_shared"]["speedup_of_sharing"] = gain
        return {
            "machine": {
                "processor": processor_name(),
                "variant": library.variant,
                "refused_variants": list(library.refusals),
                "threads": threads,
                "torch": torch.__version__,
            },
            "num_layers": NUM_LAYERS,
            "num_rounds": num_rounds,
            "cpu": measured,
        }
    finally:
        torch.set_num_threads(before)


def _arms(cases: Mapping[str, Case], attention: CpuAttention) -> dict[str, Arm]:
    """Ours and the reading side by side, torch's long runs apart from them."""
    arms: dict[str, Arm] = {}
    for name, case in cases.items():
        arms[name] = Arm(partial(case.attend_layers, attention), NUM_LAYERS)
        arms[f"{name} read"] = Arm(case.read_layers, NUM_LAYERS)
    return arms | {f"{name} torch": Arm(case.attend_with_torch, 1) for name, case in cases.items()}


def _in_turn(arms: Mapping[str, Arm], *, num_rounds: int, clock: Callable[[], float]) -> Rounds:
    """Time every arm once a round."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_index in range(num_rounds + 1):
        order = list(arms.items())
        for name, arm in order if round_index % 2 else order[::-1]:
            started = clock()
            arm.run()
            if round_index:  # the first round warms up
                seconds[name].append((clock() - started) / arm.num_layers)
    return seconds


def _median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    return statistics.median(x / y for x, y in zip(numerator, denominator, strict=True))


def _row(name: str, shape: Shape, rounds: Rounds, *, error: float) -> dict[str, float]:
    ours, theirs, read = rounds[name], rounds[f"{name} torch"], rounds[f"{name} read"]
    seconds = statistics.median(ours)
    return {
        "us": 1e6 * seconds,
        "torch_us": 1e6 * statistics.median(theirs),
        "ratio_to_torch": _median_ratio(theirs, ours),
        "read_us": 1e6 * statistics.median(read),
        "fraction_of_read_bandwidth": _median_ratio(read, ours),
        "gflops_per_s": shape.num_flops / seconds / 1e9,
        "max_error_against_float64": error,
    }


def kernels_report(measured: Mapping[str, Any]) -> str:
    """Give the measurements as a table. Pure."""
    machine: Mapping[str, Any] = measured["machine"]
    rows: Sequence[tuple[str, Mapping[str, float]]] = list(measured["cpu"].items())
    lines = [
        f"a layer within a step over {measured['num_layers']} layers of SmolLM2-135M's shape in bfloat16, the call and its plan in it",
        f"medians of {measured['num_rounds']} rounds, ratios too; {machine['processor']}, variant {machine['variant']}, "
        f"{machine['threads']} thread(s), torch {machine['torch']}",
        *(f"not used: {refusal}" for refusal in machine["refused_variants"]),
        "",
        f"{'kernel':22}{'us':>9}{'torch us':>11}{'ratio':>8}{'of reading':>12}{'GFLOP/s':>9}{'error':>10}",
    ]
    for name, row in rows:
        lines.append(
            f"{name:22}{row['us']:9.0f}{row['torch_us']:11.0f}{row['ratio_to_torch']:8.2f}"
            f"{100 * row['fraction_of_read_bandwidth']:11.0f}%{row['gflops_per_s']:9.0f}"
            f"{row['max_error_against_float64']:10.1e}"
        )
    gain = measured["cpu"]["paged_decode_shared"]["speedup_of_sharing"]
    lines.append(f"sharing 896 of 1,024 positions: {gain:.2f} times faster than sharing nothing")
    return "\n".join(lines)
