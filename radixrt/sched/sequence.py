"""Sequence: one running generation and its status machine.

    token_ids:  [0 ............ num_prompt) prompt | [num_prompt ...... total) output
    computed:   [0, cached) taken from pages | [cached, computed) went through the model | to compute

Computed tokens chase total tokens: a prefill is a chunk of many, a decode a chunk of one, a run forced by the
grammar a chunk of several.
"""

from __future__ import annotations

import random
from array import array
from enum import Enum

from radixrt.errors import InvariantViolation
from radixrt.kv.cache import PageLease
from radixrt.sched.constraint import Constraint, Rewind
from radixrt.sched.origin import OriginLog
from radixrt.types import FinishReason, GenerateRequest, Namespace, SamplingParams, TokenLogprob

NO_POSITIONS = range(0)


class SequenceStatus(Enum):
    """WAITING -> RUNNING -> FINISHED; back to WAITING only by preemption."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Own the tokens and the progress of one sample.

    Invariants: 0 <= cached <= computed <= total; a lease exists <=> RUNNING; computed <= lease capacity.

    Attributes:
        request_id: given by the engine's loop when it takes the request.
        arrival: order of submission; the samples of a request follow one another.
        seed: keys all randomness of the sample together with sample_index and position; another one after an
            answer was taken back.
        leader: the first sample of the same request, whose prompt pages this one forks; None for itself.
        eos_ids: ids that end the sequence (empty under ignore_eos).
        plain_ends: these and its stop tokens, if of its steps nothing but tokens is wanted: neither a grammar nor
            logprobs; else None.
        num_skips: steps in which a later arrival was admitted while this one waited.
        num_prompt_tokens: length of the prompt.
        num_max_total: the longest this sequence can become.
        num_cached: prompt tokens found in pages at the first admission.
        constraint: the grammar's cursor, owned by this sequence; None without a grammar.
        num_delivered: output tokens already handed out.
        origin: how the output tokens came about.
    """

    __slots__ = (
        "arrival",
        "constraint",
        "eos_ids",
        "finish_reason",
        "leader",
        "lease",
        "num_cached",
        "num_computed",
        "num_delivered",
        "num_max_total",
        "num_prompt_tokens",
        "num_skips",
        "origin",
        "plain_ends",
        "request",
        "request_id",
        "sample_index",
        "seed",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        arrival: int,
        seed: int,
        eos_ids: frozenset[int] = frozenset(),
        sample_index: int = 0,
        leader: Sequence | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.request = request
        self.request_id = -1
        self.sample_index = sample_index
        self.arrival = arrival
        self.seed = seed
        self.leader = leader
        self.constraint = constraint
        self.eos_ids = frozenset() if request.sampling.ignore_eos else eos_ids
        sampling, self.plain_ends = request.sampling, None
        if constraint is None and sampling.logprobs is None and sampling.prompt_logprobs is None:
            self.plain_ends = self.eos_ids.union(sampling.stop_token_ids)
        self.token_ids = array("i", request.prompt_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_max_total = self.num_prompt_tokens + request.sampling.max_tokens
        self.status = SequenceStatus.WAITING
        self.lease: PageLease | None = None
        self.finish_reason: FinishReason | None = None
        self.num_computed = 0
        self.num_cached = 0
        self.num_delivered = 0
        self.num_skips = 0
        self.origin = OriginLog()
        if constraint is not None:
            self._append_forced(constraint.forced(room=request.sampling.max_tokens))

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def namespace(self) -> Namespace:
        return self.request.namespace

    @property
    def num_total(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_forwarded(self) -> int:
        """Positions that went through the model, recomputation after preemption included."""
        return self.origin.num_lost + self.num_computed

    @property
    def num_forced(self) -> int:
        """Output tokens that were appended without sampling."""
        return self.origin.num_forced

    @property
    def num_pending(self) -> int:
        """Tokens still to compute."""
        return len(self.token_ids) - self.num_computed

    @property
    def token_logprobs(self) -> dict[int, TokenLogprob]:
        """Logprobs of known tokens by position, where asked for."""
        return self.origin.logprobs

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """Tell whether nothing may follow the tokens that are there."""
        if len(self.token_ids) >= self.num_max_total:
            return True
        return self.constraint is not None and self.constraint.is_complete

    @property
    def allows_end(self) -> bool:
        """Tell whether the sequence may end before its next token."""
        if self.num_output_tokens < self.sampling.min_tokens:
            return False
        return self.constraint is None or self.constraint.is_accepting

    @property
    def wanted_logprobs(self) -> range:
        """Positions whose token's logprob is wanted, as far as the tokens are known."""
        sampling = self.request.sampling
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            return NO_POSITIONS
        start = max(self.request.logprob_start, 1)
        if sampling.prompt_logprobs is None:
            start = self.num_prompt_tokens
        stop = self.num_prompt_tokens if sampling.logprobs is None else self.num_total
        return range(start, max(start, stop))

    @property
    def num_settled(self) -> int:
        """Leading tokens that lack nothing: all of them, or up to the first missing logprob."""
        sampling = self.request.sampling
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            return len(self.token_ids)
        wanted = self.wanted_logprobs
        return self.num_total if len(self.token_logprobs) >= len(wanted) else wanted[len(self.token_logprobs)]

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that may come from the cache: one is always computed, and so is what must be scored."""
        return self.num_settled - 1

    def append_sampled(
        self, token_id: int, logprob: TokenLogprob | None, closing_logprob: TokenLogprob | None = None
    ) -> bool:
        """Append a sampled token, or note that it ends the sequence; give whether the sequence goes on.

        Under a constraint, what the token forces follows it, and a token that leaves no way to a complete text
        within max_tokens gives way to one that does.
        """
        constraint = self.constraint
        if constraint is not None:
            constraint.decide(self.num_output_tokens)
        if (token_id in self.eos_ids or token_id in self.request.sampling.stop_token_ids) and self.allows_end:
            return False
        if constraint is None:
            if logprob is not None:
                self.token_logprobs[self.num_total] = logprob
            self.token_ids.append(token_id)
            return True
        tokens = constraint.take(token_id, room=self.sampling.max_tokens - self.num_output_tokens)
        is_taken = bool(tokens) and tokens[0] == token_id
        known = logprob if is_taken else closing_logprob  # both from the row that was sampled
        if tokens and known is not None:
            self.token_logprobs[self.num_total] = known
        if is_taken:
            self.token_ids.append(token_id)
        self._append_forced(tokens[1:] if is_taken else tokens)
        return True

    @property
    def is_judged(self) -> bool:
        """Tell whether the answer counts only once it was found valid: its reader gets nothing before."""
        return self.constraint is not None and self.constraint.judge is not None

    def failed_answer(self) -> Rewind | None:
        """Give what becomes of a finished answer that is not valid; None if it is.

        Raises:
            GrammarDeadEnd: it cannot be told, or no valid answer was found.
        """
        if self.constraint is None or self.constraint.judge is None:
            return None
        output_ids = self.token_ids[self.num_prompt_tokens :].tolist()
        if self.constraint.judge(output_ids):
            return None
        return self.constraint.retry(output_ids, max_tokens=self.sampling.max_tokens)

    def rewind(self, rewind: Rewind) -> None:
        """Take back output tokens, and with them the randomness that led there."""
        num_total = self.num_prompt_tokens + rewind.num_kept
        del self.token_ids[num_total:]
        self.num_computed = min(self.num_computed, num_total)
        self.origin.cut(rewind.num_kept)
        self.origin.logprobs = {at: known for at, known in self.token_logprobs.items() if at < num_total}
        self.seed = random.Random(f"{self.seed} again").getrandbits(64)
        self._append_forced(list(rewind.closing))

    def _append_forced(self, token_ids: list[int]) -> None:
        self.origin.add_run(self.num_output_tokens, len(token_ids))
        self.token_ids.extend(array("i", token_ids))

    def check(self) -> None:
        """Raise InvariantViolation unless the invariants hold."""
        if not 0 <= self.num_cached <= max(self.num_computed, self.num_prompt_tokens):
            raise InvariantViolation(f"cached {self.num_cached}, computed {self.num_computed}")
        if not 0 <= self.num_computed <= self.num_total <= self.num_max_total:
            raise InvariantViolation(f"computed {self.num_computed}, total {self.num_total}")
        if (self.lease is not None) != (self.status is SequenceStatus.RUNNING):
            raise InvariantViolation(f"{self.status} with lease {self.lease is not None}")
        if (self.finish_reason is not None) and self.status is not SequenceStatus.FINISHED:
            raise InvariantViolation(f"{self.status} with reason {self.finish_reason}")
        self.origin.check(self.num_output_tokens)
