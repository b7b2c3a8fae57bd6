"""Scheduler: plan(step) and commit(step) over one waiting and one running list.

There are no prefill and decode phases: running sequences first (decodes before prefill chunks), then admissions,
all in one token budget. plan and commit are the only places that change sequences and leases. No clock is read
here: plan is told the time, so that the same code runs in a simulator.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import replace

from radixrt.config import SchedConfig
from radixrt.errors import DeadlineExceeded, GrammarDeadEnd, InvariantViolation, RadixrtError
from radixrt.kv.cache import PageLease, PrefixCache
from radixrt.sched.budget import split_tokens
from radixrt.sched.constraint import Rewind
from radixrt.sched.in_flight import InFlight
from radixrt.sched.latency import StepTimeModel, load_of, pairs_of
from radixrt.sched.plan import (
    IS_FIRST,
    NUM_TOKENS,
    Chunk,
    ChunkResult,
    SequenceUpdate,
    StepPlan,
    StepResult,
    make_chunk,
)
from radixrt.sched.policy import POLICIES
from radixrt.sched.result import take_result, update_of
from radixrt.sched.room import UNBOUNDED, Room
from radixrt.sched.sequence import NO_POSITIONS, Sequence, SequenceStatus
from radixrt.sched.waiting import Candidate, WaitingList
from radixrt.types import FinishReason

MAX_PASSED = 16  # candidates that are looked at and not admitted in one step, while something runs


class Scheduler:
    """Own the waiting and the running sequences.

    Invariants: a sequence is in exactly one list while not FINISHED; running sequences hold live leases, oldest first;
    under a fair policy num_skips <= max_skips while a sequence waits.
    """

    def __init__(self, cache: PrefixCache, config: SchedConfig) -> None:
        self.cache = cache
        self.config = config
        self.policy = POLICIES[config.policy]
        self.step_times = StepTimeModel()
        self.waiting = WaitingList(cache, self.policy, max_skips=config.max_skips)
        cache.wanted = self.waiting
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.most_skips = 0
        self.room = Room(cache, self.running)
        self._in_flight = InFlight()
        self._deadlines: list[tuple[float, int, Sequence]] = []  # heap; finished ones go when they come up
        self._was_prefill = False  # the last step, under prefill_mode = separate

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Let a new sequence wait."""
        sequence.origin.submitted_at_s = now_s
        self.waiting.add(sequence)
        if sequence.request.scope_id is not None:
            self.cache.scopes.begin_use(sequence.request.scope_id, sequence.arrival)
        if sequence.request.timeout_s is not None:
            if len(self._deadlines) > 2 * (len(self.waiting) + len(self.running)):
                self._deadlines = [
                    row for row in self._deadlines if row[2].status is not SequenceStatus.FINISHED
                ]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (now_s + sequence.request.timeout_s, sequence.arrival, sequence))

    def expire(self, now_s: float) -> list[SequenceUpdate]:
        """End the sequences whose time is up."""
        updates = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.status is not SequenceStatus.FINISHED:
                self._end(sequence)
                error = DeadlineExceeded()
                updates.append(SequenceUpdate(sequence, (), error=error))
        return updates

    # -- plan -------------------------------------------------------------------------------------------

    def plan(self, now_s: float, *, num_steps: int = 1) -> StepPlan:
        """Decide one step; one more may be planned before it is committed. Changes: leases, statuses, skip counts.

        Args:
            num_steps: how many steps' tokens are shared out at once. More than one is for a simulator that knows that
                nothing but the same would happen in each.
        """
        self.cache.now_s = now_s
        self.cache.scopes.expire(now_s)
        self._rescue(now_s)
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        max_tokens = num_steps * self.config.max_step_tokens
        if self.config.prefill_mode == "mixed":
            self._plan_running(self.running, chunks, preempted, max_tokens=max_tokens)
            if not preempted:
                self._admit(chunks, max_tokens=max_tokens)
        else:
            self._plan_separately(chunks, preempted, max_tokens=max_tokens)
        self._in_flight.add(chunks)
        # A lease begins with its copy, in the step that admits its sequence.
        firsts = [chunk.sequence.lease for chunk in filter(IS_FIRST, chunks)]
        copies = [lease.pending_copy for lease in firsts if lease]
        return StepPlan(tuple(chunks), tuple(copy for copy in copies if copy), tuple(preempted))

    def _plan_separately(self, chunks: list[Chunk], preempted: list[Sequence], *, max_tokens: int) -> None:
        """Plan a step of prefills only or of decodes only, in turn where both have work."""
        is_prefilling = self._in_flight.is_prefilling
        decodes = [sequence for sequence in self.running if not is_prefilling(sequence)]
        if not (decodes and self._was_prefill):
            prefills = [sequence for sequence in self.running if is_prefilling(sequence)]
            self._plan_running(prefills, chunks, preempted, max_tokens=max_tokens)
            if not preempted:
                self._admit(chunks, max_tokens=max_tokens)
        self._was_prefill = bool(chunks)
        if not chunks:
            decodes = [item for item in decodes if item.lease]
            self._plan_running(decodes, chunks, preempted, max_tokens=max_tokens)

    def _plan_running(
        self, sequences: list[Sequence], chunks: list[Chunk], preempted: list[Sequence], *, max_tokens: int
    ) -> None:
        page_size = self.cache.page_size
        shares = split_tokens(sequences, max_tokens, self._in_flight)
        growing: list[tuple[Sequence, int]] = []
        for sequence, start, num_total, num_tokens in shares:
            lease = sequence.lease
            if not num_tokens or lease is None:
                continue
            if start < sequence.num_prompt_tokens:
                num_tokens = min(num_tokens, self._max_prefill_tokens(chunks, start))
            stop = start + num_tokens
            if stop > len(lease.pages) * page_size:
                growing.append((sequence, -(-stop // page_size) - len(lease.pages)))
            chunks.append(make_chunk(sequence, start, num_tokens, num_total=num_total))
        if growing:
            self._grow(growing, preempted)
        if preempted:
            chunks[:] = [chunk for chunk in chunks if chunk.sequence.lease is not None]

    def _max_prefill_tokens(self, chunks: list[Chunk], start: int) -> int:
        """Give how many prompt tokens fit beside the chunks and all decodes into the time target, if there is one."""
        target_ms = self.config.tpot_ms
        if target_ms is None or not self.step_times.is_ready:
            return UNBOUNDED
        planned, in_flight = {chunk.sequence for chunk in chunks}, self._in_flight
        decodes = [item for item in self.running if not in_flight.is_prefilling(item)]
        if not any(item.request.latency_class == "latency" for item in decodes):
            return UNBOUNDED
        num_tokens, num_pairs = load_of(chunks)
        for item in decodes:
            if item not in planned:
                pending = in_flight.pending(item)
                num_tokens += len(pending)
                num_pairs += pairs_of(pending.start, len(pending))
        return self.step_times.max_chunk_tokens(
            target_ms / 1000, num_tokens=num_tokens, num_pairs=num_pairs, start=start
        )

    def _grow(self, growing: list[tuple[Sequence, int]], preempted: list[Sequence]) -> None:
        """Lease so many pages for sequences, oldest first, preempting younger ones as needed, and in the end the one itself."""
        num_ahead = sum(num_pages for _, num_pages in growing)
        for sequence, num_pages in growing:
            num_ahead -= num_pages
            while sequence.lease is not None and not self.cache.grow(
                sequence.lease,
                num_pages,
                label=sequence.request.label,
                num_ahead=0 if preempted else num_ahead,  # those may be among the preempted
            ):
                victim = self._victim(sequence)
                self._preempt(victim)
                preempted.append(victim)

    def _victim(self, sequence: Sequence) -> Sequence:
        """Choose who gives up its pages: of those younger, the cheapest to bring back; the sequence itself if none.

        The cost of return is what must be computed again: the pages that nobody else keeps.
        """
        younger = [item for item in self.running if item.arrival > sequence.arrival]
        own_pages = [demand.num_own_pages for demand in self.room.demands_of(younger)]
        costs = [(num_own, -item.arrival, item) for num_own, item in zip(own_pages, younger, strict=True)]
        return min(costs, default=(0, 0, sequence))[2]

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages; what it computed stays in the tree, first to be evicted."""
        self._withdraw(sequence)
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _withdraw(self, sequence: Sequence) -> None:
        computed = sequence.token_ids[: sequence.num_computed]
        self._in_flight.drop(sequence)
        self._give_back(sequence)
        self.cache.demote(sequence.namespace, computed)
        self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.origin.num_lost += sequence.num_computed
        sequence.num_computed = 0

    def _rewind(self, sequence: Sequence, rewind: Rewind) -> None:
        """Let a sequence wait with fewer tokens: pages may be shared beyond them, so it begins with the cached ones."""
        self._withdraw(sequence)
        sequence.rewind(rewind)
        self.waiting.add(sequence)

    # -- admission --------------------------------------------------------------------------------------

    def _rescue(self, now_s: float) -> None:
        """Make those urgent that would miss their time to first token."""
        if self.config.ttft_ms is None:
            return
        target_s = self.config.ttft_ms / 1000
        for sequence in list(self.waiting):
            if sequence.request.latency_class == "latency" and not sequence.num_output_tokens:
                num_pending = sequence.num_pending
                expected_s = self.step_times.predict(num_pending, pairs_of(0, num_pending))
                if now_s + expected_s >= sequence.origin.submitted_at_s + target_s:
                    self.waiting.make_urgent(sequence)

    def _admit(self, chunks: list[Chunk], *, max_tokens: int) -> None:
        """Admit waiting sequences in policy order while tokens, rows and pages last."""
        if not self.waiting or len(self.running) >= self.config.max_running:
            return
        num_left = max_tokens - sum(map(NUM_TOKENS, chunks))
        if num_left <= 0:
            return
        last_allowed, youngest, num_passed = 1 << 62, -1, 0
        num_room = self.room.num_pages
        for candidate in self.waiting.in_order():
            sequence, lease = candidate.sequence, None
            if sequence.arrival <= last_allowed and (
                candidate.num_pages - candidate.num_cached_pages <= num_room  # refuses most of them
                or candidate.is_urgent
                or sequence.leader is not None
            ):
                lease = self._lease(candidate)
            if lease is None:
                num_passed += 1
                if num_passed >= MAX_PASSED and self.running:
                    break  # while nothing runs, the one that can be admitted must be found
                if candidate.is_urgent:
                    last_allowed = min(last_allowed, sequence.arrival)  # nothing younger may pass it any more
                continue
            self._start(sequence, lease)
            num_room = self.room.num_pages
            self.room.began(sequence)
            youngest = max(youngest, sequence.arrival)
            num_tokens = min(
                sequence.num_pending, num_left, self._max_prefill_tokens(chunks, sequence.num_computed)
            )
            start, num_total = sequence.num_computed, sequence.num_total
            chunks.append(make_chunk(sequence, start, num_tokens, num_total=num_total, is_first=True))
            num_left -= num_tokens
            if num_left <= 0 or len(self.running) >= self.config.max_running:
                break
        self.room.forget()
        if youngest >= 0:
            self.waiting.count_skips(youngest)

    def _lease(self, candidate: Candidate) -> PageLease | None:
        """Lease the pages of a waiting sequence; None = not now."""
        sequence = candidate.sequence
        num_tokens, label = sequence.num_total, sequence.request.label
        match = self.waiting.match(candidate)
        leader = sequence.leader
        if leader is not None and leader.status is not SequenceStatus.FINISHED:
            if leader.is_prefilling:
                return None
            num_shared = min(sequence.num_prompt_tokens - 1, sequence.max_cached_tokens)
            if leader.lease is not None and num_shared > match.num_tokens:
                shared = leader.lease.pages[: num_shared // self.cache.page_size]
                if not self.room.holds(sequence, shared):
                    return None
                return self.cache.fork(
                    leader.lease, num_shared_tokens=num_shared, num_tokens=num_tokens, label=label
                )
        if not self.room.holds(sequence, match.pages):
            return None
        return self.cache.admit(match, num_tokens=num_tokens, label=label)

    def _start(self, sequence: Sequence, lease: PageLease) -> None:
        self.cache.touch(sequence.namespace, sequence.token_ids)
        self.most_skips = max(self.most_skips, sequence.num_skips)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_arrival)
        if sequence.num_forwarded == 0:
            sequence.num_cached = min(lease.num_shared_tokens, sequence.num_prompt_tokens)
            sequence.origin.queued_s = self.cache.now_s - sequence.origin.submitted_at_s
        sequence.lease = lease
        sequence.num_computed = lease.num_shared_tokens
        sequence.origin.num_lost -= lease.num_shared_tokens
        sequence.status = SequenceStatus.RUNNING
        if sequence.is_prefilling:
            self.waiting.prefill_began(sequence)

    # -- commit -----------------------------------------------------------------------------------------

    def settle(self, plan: StepPlan) -> StepPlan:
        """Give what of a step counts that was planned before the one before it was committed, which is done now.

        A draw counts where it follows the last known token: not after an end or before a forced run. There, the row
        may be wanted for the logprob of the token that came instead. Chunk for chunk the plan that was given.
        """
        chunks = []
        for chunk in plan.chunks:
            sequence, settled = chunk.sequence, chunk
            if sequence.num_total != chunk.stop or sequence.is_complete:
                settled = make_chunk(
                    sequence,
                    chunk.start,
                    chunk.num_tokens,
                    num_total=sequence.num_total,
                    is_first=chunk.is_first,
                )
            if not self._in_flight.replace(chunk, settled):
                settled = chunk._replace(wants_sample=False, scored=NO_POSITIONS)
            chunks.append(settled)
        return replace(plan, chunks=tuple(chunks))

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Take a step's result into the sequences and publish what was computed. Steps are committed in order.

        Returns: one update per sequence that has something new for its reader.
        """
        counting, errors = self.take_in(plan, result)
        updates = [update_of(chunk.sequence, errors.get(chunk.sequence)) for chunk in counting]
        return [item for item in updates if item.token_ids or item.finish_reason or item.error]

    def take_in(self, plan: StepPlan, result: StepResult) -> tuple[Seq[Chunk], dict[Sequence, RadixrtError]]:
        """Commit a step whose sequences have no readers; give what of it counts, and what ended sequences badly."""
        counting, results = self._in_flight.take(plan.chunks, result.chunks)
        errors: dict[Sequence, RadixrtError] = {}
        for chunk, chunk_result in zip(counting, results, strict=True):
            sequence, start, num_tokens, _, _, is_first = chunk
            token_id, _, _, _, failure, _, removed_probability = chunk_result
            sequence.num_computed = start + num_tokens
            ends = sequence.plain_ends
            if (
                token_id is None
                or start < sequence.num_prompt_tokens
                or is_first
                or ends is None
                or failure is not None
                or removed_probability is not None
                or token_id in ends
            ):
                error = self._advance(chunk, chunk_result)
                if error is not None:
                    errors[sequence] = error
            else:  # nearly every chunk: the same in short
                token_ids = sequence.token_ids
                token_ids.append(token_id)
                if len(token_ids) >= sequence.num_max_total:
                    self.finish(sequence, FinishReason.LENGTH)
        return counting, errors

    def _advance(self, chunk: Chunk, result: ChunkResult) -> RadixrtError | None:
        """Take a chunk in, publish a prompt's pages, finish what is complete; give what ends it badly."""
        sequence = chunk.sequence
        assert sequence.lease is not None
        self.cache.copied(sequence.lease)
        error = result.error
        if error is None:
            try:
                reason = take_result(sequence, chunk, result)
                rewind = sequence.failed_answer() if reason is FinishReason.STOP else None
            except GrammarDeadEnd as dead_end:
                error = dead_end
        if error is not None:
            self._end(sequence)
            return error
        is_ahead = sequence in self._in_flight and result.token_id is not None
        if is_ahead and sequence.token_ids[chunk.stop : chunk.stop + 1].tolist() != [result.token_id]:
            self._in_flight.drop(sequence)  # what is under way goes on from a token that gave way to another
        if chunk.start < sequence.num_prompt_tokens:
            self._publish_prompt(sequence)
        if rewind is not None:
            self._rewind(sequence, rewind)
        elif reason is not None:
            self.finish(sequence, reason)
        return None

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence: publish what it computed and give back its pages. Also aborts (any status)."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        self._end(sequence)
        sequence.finish_reason = reason
        if reason is not FinishReason.ABORT:
            self.room.output_lengths.observe(sequence.request.label, sequence.num_output_tokens)

    def fail(self, plan: StepPlan, error: BaseException) -> list[SequenceUpdate]:
        """End all sequences of a step that failed; nothing of the step is published."""
        updates = []
        for chunk in plan.chunks:
            if self._in_flight.has(chunk):
                self._end(chunk.sequence)
                updates.append(SequenceUpdate(chunk.sequence, (), error=error))
        return updates

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """Learn from the time that a step with such a load took."""
        self.step_times.observe(num_tokens, num_pairs, seconds)
        self.waiting.set_prefill_time(self.step_times.prefill_s_per_token)

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._in_flight.drop(sequence)
            self._give_back(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        if sequence.request.scope_id is not None:
            self.cache.scopes.end_use(sequence.request.scope_id, sequence.arrival, now_s=self.cache.now_s)

    def _give_back(self, sequence: Sequence) -> None:
        """Publish a running sequence's computed tokens and release its lease."""
        assert sequence.lease is not None
        if sequence.lease.pending_copy is None:  # else its pages do not hold the shared tokens yet
            self._publish(sequence, sequence.num_computed)
            if sequence.request.scope_id is not None:
                computed = sequence.token_ids[: sequence.num_computed]
                self.cache.hold(sequence.request.scope_id, sequence.namespace, computed)
        self.cache.release(sequence.lease)
        sequence.lease = None
        self.waiting.prefill_ended(sequence)

    def _publish_prompt(self, sequence: Sequence) -> None:
        """Offer a prompt's computed pages at once: whole pages of a chunk, everything when it is done."""
        if sequence.is_prefilling:
            self._publish(sequence, sequence.num_computed // self.cache.page_size * self.cache.page_size)
        else:
            self._publish(sequence, sequence.num_computed)
            self.waiting.prefill_ended(sequence)

    def _publish(self, sequence: Sequence, num_tokens: int) -> None:
        assert sequence.lease is not None
        namespace, priority = sequence.namespace, sequence.request.priority
        offered = self.cache.publish(
            sequence.lease, namespace, sequence.token_ids, num_tokens=num_tokens, priority=priority
        )
        self.waiting.published(namespace, offered)

    # -- checking ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantViolation unless lists, sequences, leases and pages agree."""
        if len(set(self.waiting) | set(self.running)) != len(self.waiting) + len(self.running):
            raise InvariantViolation("a sequence is in two lists")
        if self.running != sorted(self.running, key=_arrival):
            raise InvariantViolation("running sequences are not in order of arrival")
        for sequence in self.waiting:
            if sequence.status is not SequenceStatus.WAITING:
                raise InvariantViolation(f"a {sequence.status} sequence is on the waiting list")
            if self.policy.is_fair and sequence.num_skips > self.config.max_skips:
                raise InvariantViolation(f"a sequence was passed over {sequence.num_skips} times")
        self.waiting.check()
        for sequence in self.running:
            if sequence.status is not SequenceStatus.RUNNING:
                raise InvariantViolation(f"a {sequence.status} sequence is on the running list")
            lease = sequence.lease
            if lease is None or len(lease.pages) * self.cache.page_size < sequence.num_computed:
                raise InvariantViolation("a running sequence computed more than its lease holds")
        for sequence in (*self.waiting, *self.running):
            sequence.check()
        self._in_flight.check()
        self.cache.check()


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
