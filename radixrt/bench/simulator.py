"""Replay a workload through the production scheduler and cache, with a step-time model in place of a device.

plan and commit are those of the engine; forward and sample are replaced by arithmetic: a step takes
fixed + per_token * tokens + per_pair * attention pairs seconds of a clock that nobody waits for, and the sampled
tokens are those of the workload.

A run of steps in which nothing but decoding can happen is planned as one step: every sequence gets its next k - 1
tokens at once, as if a grammar had forced them, and the step costs the seconds of k steps. k ends with the first
sequence that ends and before the next arrival, so first tokens and ends fall on the same instants as step by step.
So is a run of steps in which all others decode beside one long prefill, which takes what they leave of each step's
tokens: nobody can be admitted. It ends with the prefill at the latest.

Where pages are short, a merged step may now and then evict another leaf than its steps would: they would have published
the prefill's pages and counted uses in between.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, sub
from typing import NamedTuple, cast

from radixrt.bench.machines import Machine
from radixrt.bench.workloads import SimRequest
from radixrt.config import SchedConfig
from radixrt.errors import InvariantViolation
from radixrt.kv.cache import PrefixCache
from radixrt.kv.packed import TOKEN_BYTES
from radixrt.sched.budget import TOKEN_IDS
from radixrt.sched.latency import load_of, pairs_of
from radixrt.sched.plan import ChunkResult, StepPlan, StepResult, sampled
from radixrt.sched.scheduler import Scheduler
from radixrt.sched.sequence import Sequence as RunningSequence
from radixrt.types import GenerateRequest, SamplingParams

EOS = -1  # no workload's token
NOT_SAMPLED = ChunkResult()
MIN_MERGED_STEPS = 3
PARTS_PER_WASTE_SAMPLE = 16


class Part(NamedTuple):
    """A part of what a plan stands for: so many steps, and the tokens, the attention pairs and the time of all of them."""

    num_steps: int
    num_tokens: int
    num_pairs: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one request; times in seconds of the simulated clock.

    Attributes:
        admitted_s: begin of its first step.
        num_cached: prompt tokens taken from the cache at its first admission.
        num_skips: steps in which a later arrival was admitted before it.
    """

    arrived_s: float
    admitted_s: float
    first_token_s: float
    ended_s: float
    num_prompt_tokens: int
    num_cached: int
    num_skips: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def wait_s(self) -> float:
        return self.admitted_s - self.arrived_s


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of one run; `records[i]` belongs to request i.

    Attributes:
        num_computed_tokens: positions that went through the model, recomputation included.
        num_steps: steps of the machine; num_plans: plans of the scheduler (a merged one counts once).
        kv_waste: slots in used pages that hold nothing / slots in used pages, over the steps.
    """

    records: tuple[RequestRecord, ...]
    num_computed_tokens: int
    num_evicted_pages: int
    num_preemptions: int
    most_skips: int
    num_steps: int
    num_plans: int
    kv_waste: float

    @property
    def num_prompt_tokens(self) -> int:
        return sum(record.num_prompt_tokens for record in self.records)

    @property
    def num_cached_tokens(self) -> int:
        return sum(record.num_cached for record in self.records)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens from the cache / prompt tokens."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def makespan_s(self) -> float:
        return max((record.ended_s for record in self.records), default=0.0)


class _Progress:
    """One request on its way through the simulation."""

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "ended_s",
        "first_token_s",
        "index",
        "num_tokens_at_end",
        "output_ids",
        "sequence",
    )

    def __init__(
        self, index: int, sequence: RunningSequence, *, output_ids: Sequence[int], arrived_s: float
    ) -> None:
        self.index = index
        self.output_ids = output_ids
        self.sequence = sequence
        self.num_tokens_at_end = sequence.num_prompt_tokens + len(output_ids)
        self.arrived_s = arrived_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.ended_s: float | None = None

    def record(self) -> RequestRecord:
        if self.admitted_s is None or self.first_token_s is None or self.ended_s is None:
            raise InvariantViolation(f"request {self.index} did not end")
        return RequestRecord(
            arrived_s=self.arrived_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            ended_s=self.ended_s,
            num_prompt_tokens=self.sequence.num_prompt_tokens,
            num_cached=self.sequence.num_cached,
            num_skips=self.sequence.num_skips,
        )


NUM_TOKENS_AT_END = attrgetter("num_tokens_at_end")


class Simulation:
    """Own the clock, the requests that have not come yet and the progress of those that have.

    Invariants: now_s never goes back; every request that came is in the scheduler until it has ended.
    """

    def __init__(
        self,
        requests: Sequence[SimRequest],
        *,
        cache: PrefixCache,
        config: SchedConfig,
        machine: Machine,
        merges_steps: bool = True,
    ) -> None:
        self.scheduler = Scheduler(cache, config)
        self.now_s = 0.0
        self.busy_s = 0.0  # time spent in steps
        self._machine = machine
        self._merges_steps = merges_steps
        self._requests = requests
        self._children: dict[int, list[int]] = {}
        self._to_come: list[tuple[float, int]] = []  # heap of (arrival, index)
        self._progress: dict[RunningSequence, _Progress] = {}
        self._done: list[RequestRecord | None] = [None] * len(requests)
        self._num_computed_tokens = self._num_steps = self._num_plans = self._num_parts = 0
        self._num_slots = self._num_unused_slots = 0
        self._num_arrived = 0
        self._num_merged = 1  # steps of decodes alone that the next plan stands for
        self._parts: list[Part] = []  # or those beside a prefill; empty for all other plans
        for index, request in enumerate(requests):
            if not cache.fits_ever(request.num_max_total):
                raise InvariantViolation(f"request {index} never fits; leave it out with Workload.fitting")
            if request.parent is None:
                heapq.heappush(self._to_come, (request.arrival_s, index))
            else:
                self._children.setdefault(request.parent, []).append(index)

    def run(self) -> Replay:
        """Run until every request has ended.

        Raises:
            InvariantViolation: the scheduler plans nothing although requests wait, or it loses one.
        """
        while self.advance():
            pass
        return self._replay()

    def advance(self) -> bool:
        """Plan and carry out one step, or let time pass until the next arrival; False = all have ended."""
        self._take_arrivals()
        if self.scheduler.is_idle and not self._to_come:
            return False
        plan = StepPlan()
        if not self.scheduler.is_idle:
            plan = self.scheduler.plan(self.now_s, num_steps=len(self._parts) or 1)
        if plan.chunks or plan.preempted:
            parts = self._parts or [self._part(self._num_merged, *load_of(plan.chunks))]
            self._step(plan, parts)
            self._num_merged, self._parts = 1, []
            if self._merges_steps:
                self._num_merged = self._merge_decodes(plan)
                # Else no prefill had to stop.
                if parts[-1].num_tokens >= self.scheduler.config.max_step_tokens:
                    self._parts = self._merge_prefill()
        elif self._to_come:
            self.now_s = self._to_come[0][0]
        else:
            raise InvariantViolation(f"{len(self.scheduler.waiting)} requests wait for ever")
        return True

    def _take_arrivals(self) -> None:
        while self._to_come and self._to_come[0][0] <= self.now_s:
            arrived_s, index = heapq.heappop(self._to_come)
            request = self._requests[index]
            generate = GenerateRequest(
                # The scheduler takes its length and copies it: no need for a tuple of Python integers.
                cast("tuple[int, ...]", request.prompt_ids),
                _sampling(request.max_tokens),
                namespace=request.namespace,
                label=request.label,
            )
            sequence = RunningSequence(generate, arrival=self._num_arrived, seed=0, eos_ids=frozenset((EOS,)))
            self._num_arrived += 1
            self._progress[sequence] = _Progress(
                index, sequence, output_ids=request.output_ids, arrived_s=arrived_s
            )
            self.scheduler.add(sequence, arrived_s)

    def _step(self, plan: StepPlan, parts: list[Part]) -> None:
        """Carry out a plan: advance the clock, sample, commit, and take down who started and ended."""
        began_s = self.now_s
        for num_steps, num_tokens, _, seconds in parts:
            self.now_s += seconds
            self.busy_s += seconds
            self._num_steps += num_steps
            self._num_computed_tokens += num_tokens
        self._num_plans += 1
        self._num_parts += len(parts)
        results, progress_of = [], self._progress
        for sequence, _, _, wants_sample, _, is_first in plan.chunks:
            if is_first and progress_of[sequence].admitted_s is None:
                progress_of[sequence].admitted_s = began_s
            if not wants_sample:
                results.append(NOT_SAMPLED)
                continue
            output_ids = progress_of[sequence].output_ids
            place = len(sequence.token_ids) - sequence.num_prompt_tokens
            results.append(sampled(output_ids[place] if place < len(output_ids) else EOS))
            if place == 0:
                progress_of[sequence].first_token_s = self.now_s
        num_running = len(self.scheduler.running)
        self.scheduler.take_in(plan, StepResult(tuple(results)))
        self._count_waste(parts[-1].num_steps)
        for num_steps, num_tokens, num_pairs, seconds in parts:
            if num_steps == 1:
                self.scheduler.observe(num_tokens, num_pairs, seconds)
        if len(self.scheduler.running) < num_running:
            for chunk in plan.chunks:
                if chunk.sequence.finish_reason is not None:
                    self._end(progress_of.pop(chunk.sequence))

    def _part(self, num_steps: int, num_tokens: int, num_pairs: float) -> Part:
        seconds = self._machine.seconds(num_tokens, num_pairs, num_steps=num_steps)
        return Part(num_steps, num_tokens, num_pairs, seconds)

    def _end(self, progress: _Progress) -> None:
        progress.ended_s = self.now_s
        self._done[progress.index] = progress.record()
        for child in self._children.get(progress.index, ()):
            heapq.heappush(self._to_come, (self.now_s + self._requests[child].arrival_s, child))

    def _merge_decodes(self, plan: StepPlan) -> int:
        """Give the running sequences what they will decode in the next steps; give how many steps that is."""
        running, machine = self.scheduler.running, self._machine
        next_s = self._to_come[0][0] - self.now_s if self._to_come else math.inf
        if plan.preempted or len(plan.chunks) != len(running) or next_s < MIN_MERGED_STEPS * machine.fixed_s:
            return 1
        ready = []
        num_left, num_pairs = self.scheduler.config.max_step_tokens, 0
        for chunk in reversed(plan.chunks):  # a prefill, which ends this, stands last as a rule
            sequence = chunk.sequence
            if sequence.finish_reason is not None:
                return 1  # and so another one runs that had no chunk
            progress = self._progress[sequence]
            num_total, num_prompt = len(sequence.token_ids), sequence.num_prompt_tokens
            if chunk.start < num_prompt or sequence.num_computed != num_total - 1:
                return 1
            num_outputs_left = len(progress.output_ids) - (num_total - num_prompt)
            if num_outputs_left < num_left:
                if num_outputs_left < MIN_MERGED_STEPS - 1:
                    return 1
                num_left = num_outputs_left
            ready.append(progress)
            num_pairs += num_total
        num_steps = min(num_left + 1, self.scheduler.config.max_step_tokens // len(running))
        if self._to_come:  # rather too few steps before the next arrival than too many
            num_steps = min(num_steps, int(next_s / machine.seconds(len(ready), num_pairs + 64 * len(ready))))
        cache = self.scheduler.cache
        num_pages = sum(
            cache.num_pages_for(sequence.num_total + num_steps) - cache.num_pages_for(sequence.num_computed)
            for sequence in running
        )
        if num_steps < MIN_MERGED_STEPS or num_pages > cache.num_obtainable_pages:
            return 1
        _foretell(ready, num_steps - 1)
        return num_steps

    def _merge_prefill(self) -> list[Part]:
        """Give those who decode their next tokens while the oldest prefill goes on; give these steps, or none.

        A run also ends where waste is counted next. At most one that runs has more than a token to compute after a step,
        for nobody is admitted before it took all that the others left: so those who decode leave it one at least.
        """
        running, config, cache = self.scheduler.running, self.scheduler.config, self.scheduler.cache
        prefill = next((item for item in running if item.num_computed < item.num_prompt_tokens), None)
        has_target = config.tpot_ms is not None or config.ttft_ms is not None
        if prefill is None or has_target or config.prefill_mode != "mixed":
            return []
        decodes = [item for item in running if item.num_computed >= item.num_prompt_tokens]
        num_decodes, max_tokens, start = len(decodes), config.max_step_tokens, prefill.num_computed
        num_rest = max_tokens - num_decodes  # of each step, for the oldest prefill; younger ones get nothing
        num_steps = PARTS_PER_WASTE_SAMPLE - self._num_parts % PARTS_PER_WASTE_SAMPLE
        num_steps = min(num_steps, (prefill.num_prompt_tokens - start) // num_rest)
        if num_decodes * cache.num_pages_for(num_steps) > cache.num_obtainable_pages:
            return []
        ready = list(map(self._progress.__getitem__, decodes))
        num_totals = list(map(len, map(TOKEN_IDS, decodes)))
        num_pairs = sum(num_totals)
        num_steps = min([num_steps - 1, *map(sub, map(NUM_TOKENS_AT_END, ready), num_totals)]) + 1
        parts: list[Part] = []
        now_s, next_s = self.now_s, self._to_come[0][0] if self._to_come else math.inf
        while len(parts) < num_steps and now_s < next_s:
            part = self._part(1, max_tokens, num_pairs + pairs_of(start, num_rest))
            parts.append(part)
            now_s += part.seconds
            start += num_rest
            num_pairs += num_decodes
        if parts:
            _foretell(ready, len(parts) - 1)
        return parts

    def _count_waste(self, num_steps: int) -> None:
        if self._num_parts % PARTS_PER_WASTE_SAMPLE == 0:
            num_slots, num_unused = count_slots(self.scheduler.cache, self.scheduler.running)
            self._num_slots += num_slots * num_steps
            self._num_unused_slots += num_unused * num_steps

    def _replay(self) -> Replay:
        records = tuple(record for record in self._done if record is not None)
        if len(records) != len(self._requests) or self._progress:
            raise InvariantViolation(f"{len(self._requests) - len(records)} requests were lost")
        return Replay(
            records=records,
            num_computed_tokens=self._num_computed_tokens,
            num_evicted_pages=self.scheduler.cache.counters.num_evicted_pages.total(),
            num_preemptions=self.scheduler.num_preemptions,
            most_skips=self.scheduler.most_skips,
            num_steps=self._num_steps,
            num_plans=self._num_plans,
            kv_waste=self._num_unused_slots / max(self._num_slots, 1),
        )


def _foretell(decoding: list[_Progress], num_tokens: int) -> None:
    """Give sequences their next tokens."""
    for progress in decoding:
        place = progress.sequence.num_output_tokens
        progress.sequence.token_ids.extend(progress.output_ids[place : place + num_tokens])


@functools.cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def count_slots(cache: PrefixCache, running: Sequence[RunningSequence]) -> tuple[int, int]:
    """Give the slots of all pages that are in use, and those of them that hold no computed token. Changes: nothing.

    A page counts once, whoever holds it.
    Cost: O(nodes + pages of outputs).
    """
    page_size = cache.page_size
    page_bytes = page_size * TOKEN_BYTES
    num_pages = cache.pool.capacity - cache.pool.num_free
    unused: dict[int, int] = {}  # page -> slots without a token, only of pages that are not full
    full: set[int] = set()
    num_empty = 0  # pages behind the started one
    for node in cache.tree.leaves():  # all others end with a page
        if rest := -len(node.tokens) % page_bytes:
            unused[node.pages[-1]] = rest // TOKEN_BYTES
    for sequence in running:
        if sequence.lease is None:
            continue
        pages, num_computed = sequence.lease.pages, sequence.num_computed
        num_full, num_started = divmod(num_computed, page_size)
        if num_full < len(pages):
            rest = page_size - num_started
            unused[pages[num_full]] = min(rest, unused.get(pages[num_full], page_size))
            num_empty += len(pages) - num_full - 1  # nobody else holds what is not computed
        # What else it has filled was whole when it was published: the tree's started pages are ends of prompts.
        full.update(pages[sequence.num_prompt_tokens // page_size : num_full])
    num_unused = sum(rest for page, rest in unused.items() if page not in full)
    return num_pages * page_size, num_unused + num_empty * page_size
