"""What the language itself costs: `python -m frontend_lang.bench`, with a backend that costs nothing.

Two measurements: CPU time per program of 100 programs that fork into 4 (the least of several rounds, and the median),
and wall time and memory of many programs that are all alive at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frontend_lang.backends import (
    FinishReason,
    GenerateRequest,
    GenerationOutput,
    OutputChunk,
    Sample,
    ScoredContinuation,
    TextPiece,
    ToolForm,
    Usage,
)
from frontend_lang.builders import gen
from frontend_lang.program import Program, program
from frontend_lang.state import State

_SAMPLE = Sample("ok", (1,), FinishReason.STOP)
_USAGE = Usage(output_tokens=1)


class FreeBackend:
    """Answer "ok" to everything.

    Args:
        delay_s: how long a call takes, without using the processor.
    """

    bos_ids: tuple[int, ...] = (0,)
    eos_ids: frozenset[int] = frozenset()
    has_token_ids = True
    transient_errors: tuple[type[Exception], ...] = ()

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self.num_running = 0
        self.most_running = 0

    @property
    def tool_form(self) -> ToolForm | None:
        return None

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool) -> list[int]:
        return [len(piece.text) for piece in pieces]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "ok" * len(token_ids)

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        return role, "\n"

    def open_scope(self) -> int | None:
        return None

    def close_scope(self, scope_id: int) -> None:
        raise AssertionError(f"no scope {scope_id} was opened")

    async def settle_scopes(self) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        self.num_running -= 1
        return GenerationOutput(request.prompt_ids, (_SAMPLE,), _USAGE)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        output = await self.generate(request)
        yield OutputChunk(0, _SAMPLE.text, _SAMPLE.token_ids, _SAMPLE.finish_reason, usage=output.usage)

    async def score(
        self,
        prefix_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        label: str = "",
        scope_id: int | None = None,
    ) -> list[ScoredContinuation]:
        return [ScoredContinuation((0.0,) * len(each), Usage()) for each in continuations]


@program
def forked(s: State, question: str) -> list[str]:
    s += question
    branches = s.fork(4)
    branches += gen("x", max_tokens=5)
    return [branch["x"] for branch in branches]


@program
def plain(s: State, question: str) -> str:
    s += question + gen("x", max_tokens=5)
    return str(s["x"])


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured.

    Attributes:
        forked_cpu_ms, least_forked_cpu_ms: per program of 4 branches with one call each, median and least.
        plain_cpu_ms: per program of one call, median.
        most_threads: in the process, while programs ran.
        num_alive: programs alive at once in the second measurement.
        alive_s, peak_rss_mb: its wall time, and the most memory the process had.
    """

    forked_cpu_ms: float
    least_forked_cpu_ms: float
    plain_cpu_ms: float
    most_threads: int
    num_alive: int
    alive_s: float
    peak_rss_mb: float


def measure(*, num_alive: int, num_rounds: int) -> Report:
    """Run both measurements."""
    most_threads = 0

    class Watching(FreeBackend):
        async def generate(self, request: GenerateRequest) -> GenerationOutput:
            nonlocal most_threads
            most_threads = max(most_threads, threading.active_count())
            return await super().generate(request)

    items = [("question",)] * 100

    def round_ms(runner: Program[..., Any]) -> float:
        started = time.process_time()
        runner.with_options(backend=FreeBackend()).map(items, max_concurrency=100)
        return (time.process_time() - started) * 1000 / len(items)

    forked_ms = [round_ms(forked) for _ in range(num_rounds)]
    plain_ms = [round_ms(plain) for _ in range(num_rounds)]
    backend = Watching(delay_s=1.0)
    started = time.perf_counter()
    outcomes = plain.with_options(backend=backend).map([("question",)] * num_alive, max_concurrency=num_alive)
    alive_s = time.perf_counter() - started
    for outcome in outcomes:
        outcome.unwrap()
    forked.with_options(backend=Watching()).map(items, max_concurrency=100)
    return Report(
        statistics.median(forked_ms),
        min(forked_ms),
        statistics.median(plain_ms),
        most_threads,
        backend.most_running,
        alive_s,
        _peak_rss_mb(),
    )


def _peak_rss_mb() -> float:
    """Give the most memory this process had. Not ru_maxrss: that one counts what the parent had when it forked."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the report as JSON to stdout."""
    parser = argparse.ArgumentParser(prog="python -m frontend_lang.bench", description=__doc__)
    parser.add_argument("--alive", type=int, default=10_000, help="programs alive at once")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 100 programs")
    options = parser.parse_args(arguments)
    report = measure(num_alive=options.alive, num_rounds=options.rounds)
    sys.stdout.write(json.dumps(asdict(report), indent=1) + "\n")


if __name__ == "__main__":
    main()
