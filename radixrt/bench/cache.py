"""Compare orders of the waiting list and kinds of cache on one workload, by simulation.

| arm | what it is |
|---|---|
| no_cache | nothing is reused, first come first served |
| flat | a table of whole pages, first come first served |
| fcfs, random, dfs, cache_aware | the radix cache under an order of the waiting list |
| longest_prefix | cache_aware without a bound on how often a request is passed over |
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from radixrt.bench.machines import DEFAULT_MACHINE, MACHINES, Machine
from radixrt.bench.optimum import belady_tokens, infinite_pool_tokens
from radixrt.bench.simulator import Replay, Simulation
from radixrt.bench.workloads import Workload
from radixrt.config import EngineConfig, SchedConfig
from radixrt.errors import InvalidRequest
from radixrt.kv.cache import PrefixCache
from radixrt.kv.radix import PrefixMatch
from radixrt.types import Namespace

ARMS = ("no_cache", "flat", "fcfs", "random", "longest_prefix", "dfs", "cache_aware")
DEFAULT_SCHED = SchedConfig()


class FlatCache(PrefixCache):
    """Find whole pages only, as a hash table of pages does."""

    def lookup(
        self, namespace: Namespace, token_ids: array[int], *, max_tokens: int | None = None
    ) -> PrefixMatch:
        match = super().lookup(namespace, token_ids, max_tokens=max_tokens)
        num_tokens = len(match.pages) * self.page_size
        return match._replace(partial_page=None, num_partial_tokens=0, num_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class CacheBench:
    """What is compared: one workload on one machine with one pool.

    Attributes:
        pool_tokens: KV slots; None = the workload's own choice, else the machine's.
    """

    workload: Workload
    machine: Machine = MACHINES[DEFAULT_MACHINE]
    pool_tokens: int | None = None
    page_size: int = 16
    sched: SchedConfig = DEFAULT_SCHED

    @property
    def num_pool_pages(self) -> int:
        """Pages that can be used."""
        num_tokens = self.pool_tokens or self.workload.pool_tokens or self.machine.pool_tokens
        return max(num_tokens // self.page_size, 1)

    def fitting(self) -> CacheBench:
        """Leave out what never fits into the pool. Pure."""
        workload = self.workload.fitting(self.num_pool_pages * self.page_size)
        return dataclasses.replace(self, workload=workload, pool_tokens=self.num_pool_pages * self.page_size)


def build_cache(bench: CacheBench, arm: str) -> PrefixCache:
    """Give an arm's empty cache."""
    kind = FlatCache if arm == "flat" else PrefixCache
    return kind(bench.num_pool_pages + 1, page_size=bench.page_size, is_enabled=arm != "no_cache")


def prepare(bench: CacheBench, arm: str) -> Simulation:
    """Set one arm up over a workload that fits.

    Raises:
        InvalidRequest: no such arm.
        InvariantViolation: a request never fits.
    """
    if arm not in ARMS:
        raise InvalidRequest(f"arm must be one of {', '.join(ARMS)}, got {arm!r}", parameter="arm")
    policy = "fcfs" if arm in ("no_cache", "flat") else arm
    config = EngineConfig.from_options({**dataclasses.asdict(bench.sched), "policy": policy}).sched
    return Simulation(
        bench.workload.requests, cache=build_cache(bench, arm), config=config, machine=bench.machine
    )


def replay(bench: CacheBench, arm: str) -> Replay:
    """Run one arm over a workload that fits; raises what `prepare` and `Simulation.run` do."""
    return prepare(bench, arm).run()


def compare(bench: CacheBench, arms: Sequence[str] = ARMS) -> dict[str, Any]:
    """Run all arms; give plain JSON data with units in the names."""
    num_all = len(bench.workload.requests)
    bench = bench.fitting()
    requests = bench.workload.requests
    if not requests:
        raise InvalidRequest(
            f"none of the workload's {num_all} requests fits into the pool", parameter="pool_tokens"
        )
    num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    infinite = infinite_pool_tokens(requests) / num_prompt_tokens
    belady = (
        belady_tokens(requests, num_pages=bench.num_pool_pages, page_size=bench.page_size) / num_prompt_tokens
    )
    measured = {}
    for arm in arms:
        simulation = prepare(bench, arm)
        with _no_older_garbage():
            started = time.process_time()
            outcome = simulation.run()
            cpu_s = time.process_time() - started
        measured[arm] = {
            **summary(outcome),
            "ratio_to_optimum": _ratio(outcome.hit_rate, infinite),
            "ratio_to_belady": _ratio(outcome.hit_rate, belady),
            "requests_per_cpu_s": len(requests) / max(cpu_s, 1e-9),
        }
    return {
        "workload": bench.workload.name,
        "num_requests": len(requests),
        "num_requests_too_long": num_all - len(requests),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": sum(len(request.output_ids) for request in requests),
        "machine": {
            "name": bench.machine.name,
            "text": bench.machine.text,
            "fixed_s": bench.machine.fixed_s,
            "per_token_s": bench.machine.per_token_s,
            "per_pair_s": bench.machine.per_pair_s,
        },
        "pool_tokens": bench.num_pool_pages * bench.page_size,
        "page_size": bench.page_size,
        "max_running": bench.sched.max_running,
        "max_step_tokens": bench.sched.max_step_tokens,
        "max_skips": bench.sched.max_skips,
        "optimum": {"infinite_pool_hit_rate": infinite, "belady_hit_rate": belady},
        "arms": measured,
    }


@contextmanager
def _no_older_garbage() -> Iterator[None]:
    """Keep the garbage collector off all that is there already: passes over imported modules are no part of an arm."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def summary(outcome: Replay) -> dict[str, Any]:
    """Give one arm's figures as plain JSON data. Pure."""
    ttfts = sorted(record.ttft_s for record in outcome.records)
    return {
        "hit_rate": outcome.hit_rate,
        "ttft_p50_s": quantile(ttfts, 0.5),
        "ttft_p99_s": quantile(ttfts, 0.99),
        "most_skips": outcome.most_skips,
        "longest_wait_s": max(record.wait_s for record in outcome.records),
        "makespan_s": outcome.makespan_s,
        "num_computed_tokens": outcome.num_computed_tokens,
        "num_evicted_pages": outcome.num_evicted_pages,
        "num_preemptions": outcome.num_preemptions,
        "num_steps": outcome.num_steps,
        "kv_waste": outcome.kv_waste,
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Give the smallest value that at least this share of the sorted values does not exceed. Pure."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def _ratio(hit_rate: float, best: float) -> float:
    return hit_rate / best if best else 1.0


def cache_report(measured: Mapping[str, Any]) -> str:
    """Give the comparison as a short text. Pure."""
    optimum, machine = measured["optimum"], measured["machine"]
    lines = [
        f"{measured['workload']}: {measured['num_requests']} requests, {measured['num_prompt_tokens']} prompt tokens, "
        f"{measured['num_output_tokens']} output tokens",
        f"pool of {measured['pool_tokens']} tokens in pages of {measured['page_size']}, at most "
        f"{measured['max_running']} running, max_skips {measured['max_skips']}",
        f"machine {machine['name']}: {machine['text']}",
        f"hit rate with an infinite pool {100 * optimum['infinite_pool_hit_rate']:.1f}%, with perfect eviction of "
        f"whole pages in order of arrival {100 * optimum['belady_hit_rate']:.1f}%",
        "",
        "arm             hit rate  of optimum  of Belady   TTFT p50   TTFT p99  skips  longest wait  computed",
    ]
    for name, arm in measured["arms"].items():
        lines.append(
            f"{name:15} {100 * arm['hit_rate']:7.1f}% {100 * arm['ratio_to_optimum']:10.1f}% "
            f"{100 * arm['ratio_to_belady']:9.1f}% {arm['ttft_p50_s']:8.3f} s {arm['ttft_p99_s']:8.3f} s "
            f"{arm['most_skips']:6} {arm['longest_wait_s']:11.3f} s {arm['num_computed_tokens']:9}"
        )
    if measured["num_requests_too_long"]:
        lines.append(f"{measured['num_requests_too_long']} requests left out: longer than the pool")
    return "\n".join(lines)
