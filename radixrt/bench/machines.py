"""Machines for the simulator: how long a step takes, and how many tokens fit."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """How long a step takes and how many tokens fit.

    Attributes:
        fixed_s: seconds of a step however little it does.
        per_token_s: seconds per new token.
        per_pair_s: seconds per (query, key) pair of attention, all layers.
        pool_tokens: KV slots.
        text: where the constants come from.
    """

    name: str
    fixed_s: float
    per_token_s: float
    per_pair_s: float
    pool_tokens: int
    text: str

    def seconds(self, num_tokens: int, num_pairs: float, *, num_steps: int = 1) -> float:
        """Give the time of num_steps steps with this load in all. Pure."""
        return num_steps * self.fixed_s + num_tokens * self.per_token_s + num_pairs * self.per_pair_s


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            "h200-8b",
            fixed_s=6e-3,
            per_token_s=40e-6,
            per_pair_s=2e-9,
            pool_tokens=900_000,
            text="an 8B model of Llama's shape in bfloat16 on one H200; calculated from its data sheet, not measured",
        ),
        Machine(
            "epyc-smollm2",
            fixed_s=40e-3,
            per_token_s=1.4e-3,
            per_pair_s=50e-9,
            pool_tokens=180_000,
            text="SmolLM2-135M in bfloat16 on 2 cores of an AMD EPYC; from `radixrt bench engine`",
        ),
    )
}
DEFAULT_MACHINE = "h200-8b"


def processor_name() -> str:
    """Give the name of this machine's processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()
