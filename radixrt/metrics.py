"""Read-only observers of plans, results and owners."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from radixrt.errors import GrammarDeadEnd
from radixrt.grammar.counters import CompileStats, GrammarStats
from radixrt.histogram import Histogram
from radixrt.kv.cache import PrefixCache
from radixrt.sched.plan import SequenceUpdate, StepPlan, StepResult
from radixrt.sched.scheduler import Scheduler
from radixrt.types import GenerateRequest, Usage

MAX_NAMES = 256  # labels and namespaces that are counted apart, the most recently used ones


@dataclass(frozen=True, slots=True)
class HitCount:
    """Prompt tokens of finished requests, and how many of them came from the cache."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def plus(self, usage: Usage) -> HitCount:
        """Give the count with one more request. Pure."""
        return HitCount(
            self.num_requests + 1,
            self.prompt_tokens + usage.prompt_tokens,
            self.cached_tokens + usage.cached_tokens,
        )

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens from the cache, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The prefix cache since its start, and its pages now.

    Attributes:
        num_lookup_tokens: prompt tokens of all admissions; the next three say where they were found: whole pages of
            the tree, a started page that was copied, another sample's pages.
        evicted_pages: by reason: "room" or "cleared".
        kv_waste: slots in allocated pages that hold nothing / all their slots, 0 to 1.
        reuse_distances: counts[b] = page uses at a distance of [2**(b-1), 2**b) distinct pages (sampled).
        num_first_uses: page uses that had no earlier one (sampled).
    """

    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int
    num_scopes: int
    num_broken_scopes: int
    page_size: int
    num_lookup_tokens: int
    num_shared_tokens: int
    num_copied_tokens: int
    num_forked_tokens: int
    evicted_pages: Mapping[str, int]
    kv_waste: float
    reuse_distances: tuple[int, ...]
    num_first_uses: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's counters since its start, and its present load.

    prompt_tokens and the four after it count finished requests.

    Attributes:
        by_label, by_namespace: hits of finished requests, by call site and by namespace.
        step_s, wait_s: times of steps, and from submission to admission.
        grammar: what constraints cost and did.
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
    most_skips: int
    by_label: Mapping[str, HitCount]
    by_namespace: Mapping[str, HitCount]
    step_s: Histogram
    wait_s: Histogram
    cache: CacheStats
    grammar: GrammarStats

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
        self.by_label: OrderedDict[str, HitCount] = OrderedDict()
        self.by_namespace: OrderedDict[str, HitCount] = OrderedDict()
        self.step_s = Histogram()
        self.wait_s = Histogram()
        self.grammar = GrammarStats()

    def observe_step(self, plan: StepPlan, *, started_s: float, seconds: float) -> None:
        """Take in one step: its work, its time, and how long those it admitted had waited."""
        self.num_steps += 1
        self.num_step_tokens += plan.num_tokens
        self.step_s = self.step_s.plus(seconds)
        for chunk in plan.chunks:
            if chunk.is_first:
                self.wait_s = self.wait_s.plus(started_s - chunk.sequence.origin.submitted_at_s)

    def observe_masks(self, result: StepResult) -> None:
        """Take in what masks did in one step."""
        now = self.grammar
        mask_s, num_masks = now.mask_s, now.num_masks
        removed, num_measured = now.removed_probability * now.num_measured, now.num_measured
        for chunk in result.chunks:
            if chunk.mask_s is not None:
                mask_s, num_masks = mask_s.plus(chunk.mask_s), num_masks + 1
            if chunk.removed_probability is not None:
                removed, num_measured = removed + chunk.removed_probability, num_measured + 1
        if num_masks > now.num_masks:
            self.grammar = replace(
                now,
                mask_s=mask_s,
                num_masks=num_masks,
                num_measured=num_measured,
                removed_probability=removed / max(num_measured, 1),
            )

    def observe_end(self, update: SequenceUpdate) -> None:
        """Take in a sequence's last update."""
        constraint = update.sequence.constraint
        if constraint is not None:
            self.grammar = replace(
                self.grammar,
                num_dead_ends=self.grammar.num_dead_ends + isinstance(update.error, GrammarDeadEnd),
                num_retries=self.grammar.num_retries + constraint.num_retries,
            )

    def observe_finish(self, request: GenerateRequest, usage: Usage) -> None:
        """Take in a finished request."""
        self.num_finished_requests += 1
        self.total = Usage(
            prompt_tokens=self.total.prompt_tokens + usage.prompt_tokens,
            cached_tokens=self.total.cached_tokens + usage.cached_tokens,
            computed_tokens=self.total.computed_tokens + usage.computed_tokens,
            forced_tokens=self.total.forced_tokens + usage.forced_tokens,
            output_tokens=self.total.output_tokens + usage.output_tokens,
        )
        namespace = request.namespace
        _count(self.by_label, request.label, usage)
        _count(self.by_namespace, f"{namespace.salt or ''}|{namespace.adapter or ''}", usage)

    def stats(self, scheduler: Scheduler, cache: PrefixCache, compilations: CompileStats) -> EngineStats:
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
            most_skips=scheduler.most_skips,
            by_label=dict(self.by_label),
            by_namespace=dict(self.by_namespace),
            step_s=self.step_s,
            wait_s=self.wait_s,
            cache=cache_stats(scheduler, cache),
            grammar=replace(self.grammar, compilations=compilations),
        )


def _count(counts: OrderedDict[str, HitCount], name: str, usage: Usage) -> None:
    counts[name] = counts.get(name, HitCount()).plus(usage)
    counts.move_to_end(name)
    if len(counts) > MAX_NAMES:
        counts.popitem(last=False)


def cache_stats(scheduler: Scheduler, cache: PrefixCache) -> CacheStats:
    """Give the prefix cache's counters at this moment. Cost: O(pages in use)."""
    counters = cache.counters
    return CacheStats(
        num_pages=cache.pool.capacity,
        num_free_pages=cache.pool.num_free,
        num_cached_pages=cache.tree.num_pages,
        num_held_pages=cache.scopes.num_held_pages,
        num_scopes=len(cache.scopes),
        num_broken_scopes=cache.scopes.num_broken,
        page_size=cache.page_size,
        num_lookup_tokens=counters.num_lookup_tokens,
        num_shared_tokens=counters.num_shared_tokens,
        num_copied_tokens=counters.num_copied_tokens,
        num_forked_tokens=counters.num_forked_tokens,
        evicted_pages=dict(counters.num_evicted_pages),
        kv_waste=kv_waste(scheduler, cache),
        reuse_distances=tuple(cache.reuse.counts),
        num_first_uses=cache.reuse.num_first,
    )


def kv_waste(scheduler: Scheduler, cache: PrefixCache) -> float:
    """Give the share of slots in allocated pages that hold nothing, 0 to 1. Cost: O(pages in use)."""
    num_allocated = cache.pool.capacity - cache.pool.num_free
    if num_allocated == 0:
        return 0.0
    filled: Counter[int] = Counter()
    runs = [(node.pages, node.num_tokens) for node in cache.tree.nodes()]
    runs += [(item.lease.pages, item.num_computed) for item in scheduler.running if item.lease is not None]
    for pages, num_tokens in runs:
        for index, page in enumerate(pages):
            num_here = min(max(num_tokens - index * cache.page_size, 0), cache.page_size)
            filled[page] = max(filled[page], num_here)
    return 1 - filled.total() / (num_allocated * cache.page_size)
