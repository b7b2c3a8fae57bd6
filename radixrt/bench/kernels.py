"""Time the CPU kernels of one layer against plain torch and against reading the same bytes, on one thread.

The three take turns within one run. Several layers follow each other, together larger than any cache, as in a step.
"""

from __future__ import annotations

import itertools
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

NUM_LAYERS = 8
PAGE_SIZE = 16
NUM_KV_HEADS, NUM_GROUP_HEADS, HEAD_DIM = 3, 3, 64  # SmolLM2-135M
Attend = Callable[..., torch.Tensor]


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
        data = torch.empty(
            shape.num_pages + 1, NUM_LAYERS, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16
        )
        advise_huge_pages(data)
        self.data = data.normal_(generator=generator)
        order = (1 + torch.randperm(shape.num_pages, generator=generator)).int()
        num_shared = shape.num_shared // PAGE_SIZE
        shared, own = order[:num_shared], order[num_shared:]
        rows = own.view(shape.num_sequences, -1)
        self.page_table = torch.cat([shared.expand(shape.num_sequences, -1), rows], dim=1).contiguous()
        num_heads = NUM_KV_HEADS * NUM_GROUP_HEADS
        self.q = torch.randn(
            shape.num_sequences * shape.num_new, num_heads, HEAD_DIM, generator=generator
        ).to(torch.bfloat16)

    def run(self, attend: Attend, layer_index: int) -> torch.Tensor:
        """Attend in one layer."""
        return attend(
            self.q,
            self.data[:, layer_index],
            page_table=self.page_table,
            num_query_tokens=(self.shape.num_new,) * self.shape.num_sequences,
            num_context_tokens=(self.shape.num_context,) * self.shape.num_sequences,
            scale=HEAD_DIM**-0.5,
        )

    def read(self, layer_index: int) -> torch.Tensor:
        """Read as many bytes as the layers have on average, in one run."""
        words = self.data.view(-1).view(torch.float32)
        count = self.shape.num_read_bytes // words.element_size()
        return words[layer_index * count : (layer_index + 1) * count].sum()


def measure_kernels(*, num_rounds: int = 4, threads: int = 1) -> dict[str, Any]:
    """Time every CPU kernel; give plain JSON data with units in the names.

    Raises:
        EngineError: no compiler is there, or it fails (says why).
    """
    try:
        library = cpu.load_library(home_folder() / "build")
    except cpu.BuildError as error:
        raise EngineError(f"the CPU kernels cannot be built: {error}") from error
    attention = CpuAttention(library, num_threads=threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        measured: dict[str, Any] = {}
        for name, shape in SHAPES.items():
            case = Case(shape)
            times = _in_turn(
                {
                    "ours": partial(case.run, attention),
                    "torch": partial(case.run, reference.paged_attention),
                    "read": case.read,
                },
                num_rounds=num_rounds,
                # what else runs on the machine does not count, where one thread does all the work
                clock=time.thread_time if threads == 1 else time.perf_counter,
            )
            measured[name] = _row(shape, times, error=_error(case, attention))
        shared, plain = measured["paged_decode_shared"], measured["paged_decode"]
        shared["speedup_of_sharing"] = plain["us"] / shared["us"]
        return {
            "machine": {
                "processor": processor_name(),
                "variant": library.variant,
                "refused_variants": list(library.refusals),
                "threads": threads,
                "torch": torch.__version__,
            },
            "cpu": measured,
        }
    finally:
        torch.set_num_threads(before)


def _in_turn(
    runs: Mapping[str, Callable[[int], object]], *, num_rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Give each one's median seconds for a layer; in every round each goes through all layers."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_index, (name, run) in itertools.product(range(num_rounds + 1), runs.items()):
        for layer_index in range(NUM_LAYERS):
            started = clock()
            run(layer_index)
            if round_index:  # the first round warms up
                seconds[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _row(shape: Shape, seconds: Mapping[str, float], *, error: float) -> dict[str, float]:
    return {
        "us": 1e6 * seconds["ours"],
        "torch_us": 1e6 * seconds["torch"],
        "ratio_to_torch": seconds["torch"] / seconds["ours"],
        "read_us": 1e6 * seconds["read"],
        "fraction_of_read_bandwidth": seconds["read"] / seconds["ours"],
        "gflops_per_s": shape.num_flops / seconds["ours"] / 1e9,
        "max_error_against_float64": error,
    }


def _error(case: Case, attention: Attend) -> float:
    found = case.run(attention, 0).double()
    exact = reference.paged_attention(
        case.q.double(),
        case.data[:, 0].double(),
        page_table=case.page_table,
        num_query_tokens=(case.shape.num_new,) * case.shape.num_sequences,
        num_context_tokens=(case.shape.num_context,) * case.shape.num_sequences,
        scale=HEAD_DIM**-0.5,
    )
    return float((found - exact).abs().max())


def kernels_report(measured: Mapping[str, Any]) -> str:
    """Give the measurements as a table. Pure."""
    machine: Mapping[str, Any] = measured["machine"]
    rows: Sequence[tuple[str, Mapping[str, float]]] = list(measured["cpu"].items())
    lines = [
        f"one layer of SmolLM2-135M's shape in bfloat16, {machine['processor']}, variant {machine['variant']}, "
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
