"""Scheduler: plan(step) and commit(step) over one waiting and one running list.

There are no prefill and decode phases: running sequences first (decodes before prefill chunks), then admissions,
all in one token budget. plan and commit are the only places that change sequences and leases.
"""

from __future__ import annotations

from radixrt.config import SchedConfig
from radixrt.errors import GrammarDeadEnd, InvariantViolation
from radixrt.kv.cache import PageLease, PrefixCache
from radixrt.kv.radix import PrefixMatch, num_common_tokens
from radixrt.sched import policy
from radixrt.sched.budget import leaves_headroom, split_tokens
from radixrt.sched.plan import Chunk, ChunkResult, SequenceUpdate, StepPlan, StepResult
from radixrt.sched.sequence import Sequence, SequenceStatus
from radixrt.types import FinishReason, TokenLogprob


class Scheduler:
    """Own the waiting and the running list.

    Invariants: a sequence is in exactly one list while not FINISHED; running sequences hold live leases;
    num_skips <= max_skips while a sequence waits.
    """

    def __init__(self, cache: PrefixCache, config: SchedConfig) -> None:
        self.cache = cache
        self.config = config
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._matches: dict[
            Sequence, tuple[int, PrefixMatch]
        ] = {}  # by cache version, so that a lookup is not repeated

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence on the waiting list."""
        self.waiting.append(sequence)

    # -- plan -------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decide one step. Changes: leases, statuses and skip counts."""
        shares = split_tokens(self.running, self.config.max_step_tokens)
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        # Oldest first, and the youngest is preempted: what is already planned is never taken back.
        for sequence in sorted(self.running, key=lambda item: item.arrival):
            num_tokens = shares[sequence]
            if num_tokens and sequence.lease and self._grow(sequence, num_tokens, preempted):
                chunks.append(_chunk(sequence, num_tokens))
        if not preempted:
            num_left = self.config.max_step_tokens - sum(shares.values())
            chunks += self._admit(num_left)
        copies = [chunk.sequence.lease.pending_copy for chunk in chunks if chunk.sequence.lease]
        return StepPlan(tuple(chunks), tuple(copy for copy in copies if copy), tuple(preempted))

    def _grow(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Lease the pages for a chunk, preempting the youngest as needed; False when it was preempted itself."""
        assert sequence.lease is not None
        while not self.cache.grow(sequence.lease, num_tokens=sequence.num_computed + num_tokens):
            victim = max(self.running, key=lambda item: item.arrival)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages; what it computed stays in the tree until the room is needed."""
        self._give_back(sequence)
        self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed = 0
        self.waiting.append(sequence)
        self.num_preemptions += 1

    def _admit(self, num_left: int) -> list[Chunk]:
        """Admit waiting sequences in policy order while tokens, rows and pages last."""
        chunks: list[Chunk] = []
        last_allowed = max((item.arrival for item in self.waiting), default=0)
        for candidate in self._candidates():
            if num_left <= 0 or len(self.running) >= self.config.max_running:
                break
            sequence = candidate.sequence
            if sequence.arrival > last_allowed:
                continue
            lease = self._lease(candidate)
            if lease is None:
                if policy.is_urgent(sequence, self.config.max_skips):
                    last_allowed = sequence.arrival  # nothing younger may pass it any more
                continue
            self._start(sequence, lease)
            chunks.append(_chunk(sequence, min(sequence.num_pending, num_left)))
            num_left -= chunks[-1].num_tokens
        self._count_skips(chunks)
        return chunks

    def _candidates(self) -> list[policy.Candidate]:
        candidates = [policy.Candidate(sequence, self._match(sequence)) for sequence in self.waiting]
        return policy.order(candidates, self.config.policy, max_skips=self.config.max_skips)

    def _match(self, sequence: Sequence) -> PrefixMatch:
        version, match = self._matches.get(sequence, (-1, None))
        if match is None or version != self.cache.version:
            match = self.cache.lookup(
                sequence.namespace, sequence.token_ids, max_tokens=sequence.max_cached_tokens
            )
            self._matches[sequence] = (self.cache.version, match)
        return match

    def _lease(self, candidate: policy.Candidate) -> PageLease | None:
        """Lease the pages of a waiting sequence; None = not now."""
        sequence = candidate.sequence
        num_tokens = sequence.num_total
        leader = sequence.leader
        if leader is not None and leader.status is not SequenceStatus.FINISHED:
            if leader.is_prefilling:
                return None
            num_shared = min(sequence.num_prompt_tokens - 1, sequence.max_cached_tokens)
            if leader.lease is not None and num_shared > candidate.match.num_tokens:
                return self.cache.fork(leader.lease, num_shared_tokens=num_shared, num_tokens=num_tokens)
        # Earlier admissions of this step may have evicted what was matched: look again.
        match = self._match(sequence)
        is_urgent = policy.is_urgent(sequence, self.config.max_skips)
        if not is_urgent and self._is_being_computed(sequence, match):
            return None
        has_room = leaves_headroom(
            num_needed_pages=self.cache.num_pages_for(num_tokens) - len(match.pages),
            num_obtainable_pages=self.cache.num_obtainable_pages,
            num_running=len(self.running),
        )
        return self.cache.admit(match, num_tokens=num_tokens) if has_room else None

    def _is_being_computed(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Tell whether a running prefill will soon offer at least a page more than is cached now."""
        if not self.cache.is_enabled:
            return False
        wanted = match.num_tokens + self.cache.page_size
        tokens = b""
        for other in self.running:
            if not other.is_prefilling or other.namespace != sequence.namespace:
                continue
            tokens = tokens or sequence.token_ids[: sequence.max_cached_tokens].tobytes()
            prompt = other.token_ids[: other.num_prompt_tokens].tobytes()
            if num_common_tokens(tokens, prompt) >= max(wanted, other.num_computed + 1):
                return True
        return False

    def _start(self, sequence: Sequence, lease: PageLease) -> None:
        self.cache.touch(sequence.namespace, sequence.token_ids)
        self._matches.pop(sequence, None)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if sequence.num_forwarded == 0:
            sequence.num_cached = min(lease.num_shared_tokens, sequence.num_prompt_tokens)
        sequence.lease = lease
        sequence.num_computed = lease.num_shared_tokens
        sequence.status = SequenceStatus.RUNNING

    def _count_skips(self, admitted: list[Chunk]) -> None:
        youngest = max((chunk.sequence.arrival for chunk in admitted), default=-1)
        for sequence in self.waiting:
            if sequence.arrival < youngest:
                sequence.num_skips += 1

    # -- commit -----------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Take a step's result into the sequences and publish what was computed.

        Returns: one update per sequence that has something new for its reader.
        """
        updates = []
        for chunk, chunk_result in zip(plan.chunks, result.chunks, strict=True):
            sequence = chunk.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # aborted while the step ran
            assert sequence.lease is not None
            self.cache.copied(sequence.lease)
            was_prefilling = sequence.is_prefilling
            sequence.num_computed = chunk.stop
            sequence.num_forwarded += chunk.num_tokens
            error = chunk_result.error
            if error is None:
                error = self._advance(chunk, chunk_result, was_prefilling=was_prefilling)
            if error is not None:
                self._end(sequence)
            update = _update(sequence, error)
            if update.token_ids or update.finish_reason or update.error:
                updates.append(update)
        return updates

    def _advance(self, chunk: Chunk, result: ChunkResult, *, was_prefilling: bool) -> GrammarDeadEnd | None:
        """Take a good chunk in, publish a prompt's pages, finish what is complete; give what ends it badly."""
        sequence = chunk.sequence
        try:
            reason = _take(sequence, chunk, result)
        except GrammarDeadEnd as error:
            return error
        if was_prefilling:
            self._publish(sequence)
        if reason is not None:
            self.finish(sequence, reason)
        return None

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence: publish what it computed and give back its pages. Also aborts (any status)."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        self._end(sequence)
        sequence.finish_reason = reason

    def fail(self, plan: StepPlan, error: BaseException) -> list[SequenceUpdate]:
        """End all sequences of a step that failed; nothing of the step is published."""
        updates = []
        for chunk in plan.chunks:
            if chunk.sequence.status is SequenceStatus.RUNNING:
                self._end(chunk.sequence)
                updates.append(SequenceUpdate(chunk.sequence, (), error=error))
        return updates

    def _end(self, sequence: Sequence) -> None:
        self._matches.pop(sequence, None)
        if sequence.status is SequenceStatus.RUNNING:
            self._give_back(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _give_back(self, sequence: Sequence) -> None:
        """Publish a running sequence's computed tokens and release its lease."""
        assert sequence.lease is not None
        if sequence.lease.pending_copy is None:  # else its pages do not hold the shared tokens yet
            computed = sequence.token_ids[: sequence.num_computed]
            self.cache.publish(
                sequence.lease, sequence.namespace, computed, priority=sequence.request.priority
            )
        self.cache.release(sequence.lease)
        sequence.lease = None

    def _publish(self, sequence: Sequence) -> None:
        """Offer a prompt's computed pages at once: whole pages of a chunk, everything when it is done."""
        assert sequence.lease is not None
        num_tokens = sequence.num_computed
        if sequence.is_prefilling:
            num_tokens -= num_tokens % self.cache.page_size
        self.cache.publish(
            sequence.lease,
            sequence.namespace,
            sequence.token_ids[:num_tokens],
            priority=sequence.request.priority,
        )

    # -- checking ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantViolation unless lists, sequences, leases and pages agree."""
        if len(set(self.waiting) | set(self.running)) != len(self.waiting) + len(self.running):
            raise InvariantViolation("a sequence is in two lists")
        for sequence in self.waiting:
            if sequence.status is not SequenceStatus.WAITING:
                raise InvariantViolation(f"a {sequence.status} sequence is on the waiting list")
            if sequence.num_skips > self.config.max_skips:
                raise InvariantViolation(f"a sequence was passed over {sequence.num_skips} times")
        for sequence in self.running:
            if sequence.status is not SequenceStatus.RUNNING:
                raise InvariantViolation(f"a {sequence.status} sequence is on the running list")
            lease = sequence.lease
            if lease is None or len(lease.pages) * self.cache.page_size < sequence.num_computed:
                raise InvariantViolation("a running sequence computed more than its lease holds")
        for sequence in (*self.waiting, *self.running):
            sequence.check()
        self.cache.check()


def _chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    start = sequence.num_computed
    stop = start + num_tokens
    # The row of position p - 1 scores the token at p.
    wanted = sequence.wanted_logprobs
    first = max(start + 1, wanted.start)
    return Chunk(
        sequence,
        start,
        num_tokens,
        wants_sample=stop == sequence.num_total and not sequence.is_complete,
        scored=range(first, max(first, min(stop + 1, wanted.stop))),
    )


def _take(sequence: Sequence, chunk: Chunk, result: ChunkResult) -> FinishReason | None:
    """Move a chunk's result into its sequence; give why the sequence ends, or None."""
    sequence.token_logprobs.update(zip(chunk.scored, result.scored, strict=True))
    if result.token_id is not None and not sequence.append_sampled(result.token_id, result.logprob):
        return FinishReason.STOP
    if not sequence.is_complete or sequence.num_settled < sequence.num_total:
        return None
    matcher = sequence.matcher
    return FinishReason.STOP if matcher is not None and matcher.is_terminated else FinishReason.LENGTH


def _update(sequence: Sequence, error: BaseException | None) -> SequenceUpdate:
    """Give what the reader has not seen; with logprobs, tokens wait until theirs is known."""
    first = sequence.num_prompt_tokens + sequence.num_delivered
    stop = max(sequence.num_settled, first)
    sequence.num_delivered += stop - first
    logprobs: tuple[TokenLogprob, ...] = ()
    if sequence.sampling.logprobs is not None:
        logprobs = tuple(sequence.token_logprobs[position] for position in range(first, stop))
    return SequenceUpdate(
        sequence, tuple(sequence.token_ids[first:stop]), logprobs, sequence.finish_reason, error
    )
