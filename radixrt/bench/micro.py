"""What the scheduler and the radix tree cost by themselves: CPU seconds of single operations, as medians."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from radixrt.bench.machines import MACHINES
from radixrt.bench.simulator import Simulation
from radixrt.bench.workloads import FreshTokens, Workload, no_sharing
from radixrt.config import SchedConfig
from radixrt.kv.cache import PrefixCache
from radixrt.kv.radix import PrefixMatch
from radixrt.sched.plan import ChunkResult, StepPlan, StepResult
from radixrt.sched.scheduler import Scheduler
from radixrt.sched.sequence import Sequence
from radixrt.types import DEFAULT_NAMESPACE, FinishReason, GenerateRequest, SamplingParams

PAGE_SIZE = 16
NUM_RUNNING = 64
NUM_PROMPT_TOKENS = 512
MAX_OUTPUT_TOKENS = 768  # outputs do not end while a measurement runs
CPU_MACHINE = MACHINES["epyc-smollm2"]
Clock = Callable[[], float]


def measure_micro(
    *,
    num_waiting: tuple[int, ...] = (1_000, 10_000),
    num_nodes: tuple[int, ...] = (1_000, 10_000, 100_000),
    num_repetitions: int = 100,
    num_requests: int = 200,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Run all measurements; give plain JSON data with units in the names."""
    return {
        "num_repetitions": num_repetitions,
        "plan_ms": {
            str(count): {
                kind: 1e3 * plan_seconds(count, kind, num_repetitions=num_repetitions, clock=clock)
                for kind in ("rows_full", "pages_full", "admitting")
            }
            for count in num_waiting
        },
        "lookup_2000_tokens_us": 1e6
        * lookup_seconds(2_000, num_repetitions=10 * num_repetitions, clock=clock),
        "evict_64_pages_us": {
            str(count): 1e6 * evict_seconds(count, 64, num_repetitions=num_repetitions, clock=clock)
            for count in num_nodes
        },
        "evict_us_per_page_at_most_nodes": {
            str(num_pages): 1e6
            * evict_seconds(num_nodes[-1], num_pages, num_repetitions=num_repetitions, clock=clock)
            / num_pages
            for num_pages in (1, 16, 256)
        },
        "cache_at_no_sharing": cache_cost(no_sharing(num_requests=num_requests)),
    }


def plan_seconds(num_waiting: int, kind: str, *, num_repetitions: int, clock: Clock) -> float:
    """Give the median seconds of planning one step with 64 sequences running.

    Args:
        kind: "rows_full": no sequence may be admitted; "pages_full": pages lack, so that candidates are looked at in
            vain; "admitting": one sequence ends and one is admitted per step.
    """
    scheduler = _loaded_scheduler(num_waiting, kind)
    seconds = []
    for _ in range(num_repetitions):
        if kind == "admitting":
            scheduler.finish(scheduler.running[0], FinishReason.LENGTH)
        started = clock()
        plan = scheduler.plan(0.0)
        seconds.append(clock() - started)
        _commit(scheduler, plan)
    return statistics.median(seconds)


def _loaded_scheduler(num_waiting: int, kind: str) -> Scheduler:
    """Give a scheduler with 64 decoding sequences and others waiting, half of these with a cached prefix."""
    num_prompt_pages = NUM_PROMPT_TOKENS // PAGE_SIZE
    spare = num_prompt_pages // 2 if kind == "pages_full" else 1 << 16
    cache = PrefixCache(NUM_RUNNING * (num_prompt_pages + 64) + spare, page_size=PAGE_SIZE)
    max_running = 2 * NUM_RUNNING if kind == "pages_full" else NUM_RUNNING
    scheduler = Scheduler(cache, SchedConfig(max_running=max_running, max_waiting=1 << 20))
    fresh = FreshTokens()
    for arrival in range(NUM_RUNNING):
        _add(scheduler, fresh.take(NUM_PROMPT_TOKENS), arrival)
    while len(scheduler.running) < NUM_RUNNING or any(item.is_prefilling for item in scheduler.running):
        _commit(scheduler, scheduler.plan(0.0))
    shared = scheduler.running[0].token_ids[: NUM_PROMPT_TOKENS // 2]
    for index in range(num_waiting):
        head = shared if index % 2 else fresh.take(NUM_PROMPT_TOKENS // 2)
        _add(scheduler, head + fresh.take(NUM_PROMPT_TOKENS // 2), NUM_RUNNING + index)
    return scheduler


def _add(scheduler: Scheduler, prompt_ids: array[int], arrival: int) -> None:
    request = GenerateRequest(tuple(prompt_ids), SamplingParams(max_tokens=MAX_OUTPUT_TOKENS))
    scheduler.add(Sequence(request, arrival=arrival, seed=0), 0.0)


def _commit(scheduler: Scheduler, plan: StepPlan) -> None:
    results = [ChunkResult(0 if chunk.wants_sample else None) for chunk in plan.chunks]
    scheduler.commit(plan, StepResult(tuple(results)))


def lookup_seconds(num_tokens: int, *, num_repetitions: int, clock: Clock) -> float:
    """Give the median seconds of one lookup that matches num_tokens over a path of several nodes."""
    cache = PrefixCache(1 << 14, page_size=PAGE_SIZE)
    fresh = FreshTokens()
    prompt = fresh.take(num_tokens + 1)
    for num_common in range(num_tokens // 8, num_tokens + 1, num_tokens // 8):
        _publish(cache, prompt[:num_common] + fresh.take(40))
    seconds = []
    for _ in range(num_repetitions):
        started = clock()
        match = cache.lookup(DEFAULT_NAMESPACE, prompt)
        seconds.append(clock() - started)
        assert match.num_tokens == num_tokens
    return statistics.median(seconds)


def evict_seconds(num_nodes: int, num_pages: int, *, num_repetitions: int, clock: Clock) -> float:
    """Give the median seconds of evicting pages, one per leaf, from a tree of that many nodes.

    What was evicted is published anew, unmeasured, before the next repetition.
    """
    cache = PrefixCache(num_nodes + num_pages + 2, page_size=PAGE_SIZE)
    fresh = FreshTokens()
    for _ in range(num_nodes):
        _publish(cache, fresh.take(PAGE_SIZE))
    seconds = []
    for _ in range(num_repetitions):
        num_before = cache.tree.num_pages
        started = clock()
        cache.tree.evict(num_pages)
        seconds.append(clock() - started)
        assert cache.tree.num_pages == num_before - num_pages
        for _ in range(num_pages):
            _publish(cache, fresh.take(PAGE_SIZE))
    return statistics.median(seconds)


def _publish(cache: PrefixCache, token_ids: array[int]) -> None:
    match = PrefixMatch(DEFAULT_NAMESPACE)
    lease = cache.admit(match, num_tokens=len(token_ids))
    assert lease is not None
    cache.publish(lease, DEFAULT_NAMESPACE, token_ids)
    cache.release(lease)


def cache_cost(workload: Workload, *, num_repetitions: int = 3) -> dict[str, float]:
    """Give what the prefix cache adds to a step's CPU time when nothing is shared, and to its whole time.

    The same requests are scheduled with the cache and without, in turn; the difference is all that the tree and the
    order of the waiting list cost. Step by step: no decode steps are merged.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    num_steps = step_s = 0.0
    for _ in range(num_repetitions):
        for is_enabled in (True, False):
            cache = PrefixCache(
                (workload.pool_tokens or CPU_MACHINE.pool_tokens) // PAGE_SIZE,
                page_size=PAGE_SIZE,
                is_enabled=is_enabled,
            )
            simulation = Simulation(
                workload.requests,
                cache=cache,
                config=SchedConfig(),
                machine=CPU_MACHINE,
                merges_steps=False,
            )
            started = time.process_time()
            outcome = simulation.run()
            seconds[is_enabled].append((time.process_time() - started) / outcome.num_steps)
            num_steps, step_s = outcome.num_steps, simulation.busy_s / outcome.num_steps
    added_s = statistics.median(seconds[True]) - statistics.median(seconds[False])
    return {
        "num_steps": num_steps,
        "cpu_us_per_step_with_cache": 1e6 * statistics.median(seconds[True]),
        "cpu_us_per_step_without": 1e6 * statistics.median(seconds[False]),
        "added_us_per_step": 1e6 * added_s,
        "step_ms": 1e3 * step_s,
        "share_of_step": added_s / step_s,
    }


def micro_report(measured: Mapping[str, Any]) -> str:
    """Give the measurements as a short text. Pure."""
    lines = [f"medians of {measured['num_repetitions']} repetitions, CPU time of this machine", ""]
    for count, kinds in measured["plan_ms"].items():
        text = ", ".join(f"{kind} {value:.3f} ms" for kind, value in kinds.items())
        lines.append(f"plan one step, {count} waiting, {NUM_RUNNING} running: {text}")
    lines.append(f"lookup of 2,000 tokens: {measured['lookup_2000_tokens_us']:.1f} us")
    for count, value in measured["evict_64_pages_us"].items():
        lines.append(f"evict 64 pages of {count} nodes: {value:.0f} us ({value / 64:.2f} us per page)")
    for count, value in measured["evict_us_per_page_at_most_nodes"].items():
        lines.append(f"evict {count} pages of the largest tree: {value:.2f} us per page")
    cost = measured["cache_at_no_sharing"]
    lines.append(
        f"cache at 0% sharing: {cost['added_us_per_step']:.0f} us of CPU per step of {cost['step_ms']:.0f} ms "
        f"({100 * cost['share_of_step']:.2f}%; {CPU_MACHINE.text})"
    )
    return "\n".join(lines)
