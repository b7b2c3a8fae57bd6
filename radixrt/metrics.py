"""Read-only observers of plans and results."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.kv.cache import PrefixCache
from radixrt.sched.plan import StepPlan
from radixrt.sched.scheduler import Scheduler
from radixrt.types import Usage


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's counters since its start, and its present load.

    prompt_tokens and the four after it count finished requests.
    """

    num_steps: int
    num_step_tokens: int
    num_running: int
    num_waiting: int
    num_finished_requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    forced_tokens: int
    output_tokens: int
    num_preemptions: int
    num_evicted_pages: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    page_size: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens served from the cache, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class EngineMetrics:
    """Count steps and finished requests. Observes; changes nothing but its own counters."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_step_tokens = 0
        self.num_finished_requests = 0
        self.total = Usage()

    def observe_step(self, plan: StepPlan) -> None:
        self.num_steps += 1
        self.num_step_tokens += plan.num_tokens

    def observe_finish(self, usage: Usage) -> None:
        self.num_finished_requests += 1
        self.total = Usage(
            prompt_tokens=self.total.prompt_tokens + usage.prompt_tokens,
            cached_tokens=self.total.cached_tokens + usage.cached_tokens,
            computed_tokens=self.total.computed_tokens + usage.computed_tokens,
            forced_tokens=self.total.forced_tokens + usage.forced_tokens,
            output_tokens=self.total.output_tokens + usage.output_tokens,
        )

    def stats(self, scheduler: Scheduler, cache: PrefixCache) -> EngineStats:
        """Give all counters at this moment."""
        return EngineStats(
            num_steps=self.num_steps,
            num_step_tokens=self.num_step_tokens,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_finished_requests=self.num_finished_requests,
            prompt_tokens=self.total.prompt_tokens,
            cached_tokens=self.total.cached_tokens,
            computed_tokens=self.total.computed_tokens,
            forced_tokens=self.total.forced_tokens,
            output_tokens=self.total.output_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_evicted_pages=cache.counters.num_evicted_pages.total(),
            num_pages=cache.pool.capacity,
            num_free_pages=cache.pool.num_free,
            num_cached_pages=cache.tree.num_pages,
            page_size=cache.page_size,
        )
