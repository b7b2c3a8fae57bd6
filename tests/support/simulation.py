"""A scheduler without a model: the KV of a slot is its token, and the next token depends on all of them.

Whatever goes wrong with pages, copies or positions changes the tokens that come out.
"""

from __future__ import annotations

import hashlib
from array import array

from radixrt.config import SchedConfig
from radixrt.errors import DeviceError
from radixrt.kv.cache import PrefixCache
from radixrt.sched.plan import ChunkResult, StepResult
from radixrt.sched.scheduler import Scheduler
from radixrt.sched.sequence import Sequence
from radixrt.types import GenerateRequest, SamplingParams, TokenLogprob

EOS = 2


def next_token(token_ids, *, seed=0, sample_index=0, num_ids=2, end_every=0):
    """Give a token that depends on every token before it."""
    text = f"{list(token_ids)}/{seed}/{sample_index}".encode()
    value = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    if end_every and value % end_every == 0:
        return EOS
    return (value >> 8) % num_ids


class Simulation:
    """A scheduler over a cache whose pages are a dict.

    With overlap, a step is planned and carried out before the one before it is committed.
    """

    def __init__(
        self,
        *,
        num_pages=64,
        page_size=4,
        prefix_cache=True,
        eviction="lru",
        end_every=0,
        overlap=False,
        **options,
    ):
        self.cache = PrefixCache(num_pages, page_size=page_size, is_enabled=prefix_cache, eviction=eviction)
        self.scheduler = Scheduler(self.cache, SchedConfig(**options))
        self.content = {}
        self.end_every = end_every
        self.overlap = overlap
        self.launched = None  # a plan and its draws, not committed yet
        self.num_surplus = 0
        self.num_computed_tokens = 0
        self.arrival = 0
        self.now_s = 0.0
        self.errors = {}
        self.plans = []

    def add(self, prompt, *, leader=None, sample_index=0, seed=0, request=None, **sampling):
        request = GenerateRequest(tuple(prompt), SamplingParams(**sampling), **(request or {}))
        sequence = Sequence(
            request,
            arrival=self.arrival,
            seed=seed,
            eos_ids=frozenset({EOS}),
            leader=leader,
            sample_index=sample_index,
        )
        self.arrival += 1
        self.scheduler.add(sequence, self.now_s)
        return sequence

    def expected(self, sequence):
        """Give the output of the undisturbed run."""
        token_ids = list(sequence.request.prompt_ids)
        while len(token_ids) < sequence.num_max_total:
            token_id = self.sampled(token_ids, sequence)
            if token_id == EOS:
                break
            token_ids.append(token_id)
        return token_ids[sequence.num_prompt_tokens :]

    def sampled(self, token_ids, sequence):
        return next_token(
            token_ids, seed=sequence.seed, sample_index=sequence.sample_index, end_every=self.end_every
        )

    def step(self, *, fails=False):
        """Run one step; give its updates."""
        before, self.launched = self.launched, None
        plan = self.scheduler.plan(self.now_s)
        self.plans.append(plan)
        updates = []
        if fails:
            updates += self.scheduler.fail(plan, DeviceError("injected"))
        elif plan.chunks:
            self.launched = (plan, self.run(plan, before))
        if before is not None:
            updates += self.commit(before)
            if self.launched is not None:
                settled = self.scheduler.settle(plan)
                self.num_surplus += sum(chunk.wants_sample for chunk in plan.chunks)
                self.num_surplus -= sum(chunk.wants_sample for chunk in settled.chunks)
                self.launched = (settled, self.launched[1])
        if not self.overlap and self.launched is not None:
            launched, self.launched = self.launched, None
            updates += self.commit(launched)
        return updates

    def commit(self, launched):
        """Commit a step that was carried out: of its draws, those that count."""
        plan, draws = launched
        results = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            token_id = draws[sequence] if chunk.wants_sample else None
            scored = tuple(TokenLogprob(sequence.token_ids[at], -float(at)) for at in chunk.scored)
            logprob = None
            if token_id is not None and sequence.sampling.logprobs is not None:
                logprob = TokenLogprob(token_id, -float(chunk.stop))
            results.append(ChunkResult(token_id, logprob, scored=scored))
        return self.scheduler.commit(plan, StepResult(tuple(results)))

    def run(self, plan, before):
        """Carry out a plan; give its draws. What the host has not seen of the step before is taken from its draws."""
        page_size = self.cache.page_size
        read = [
            [self.content.get((copy.source, offset)) for offset in range(page_size)]
            for copy in plan.page_copies
        ]
        for copy, values in zip(plan.page_copies, read, strict=True):
            for offset, value in enumerate(values):
                self.content[(copy.target, offset)] = value
        written = set()
        draws = {}
        for chunk in plan.chunks:
            sequence = chunk.sequence
            tokens = list(sequence.token_ids)
            if chunk.stop > len(tokens):
                tokens.append(before[1][sequence])
            assert chunk.stop <= len(tokens)
            for position in range(chunk.start, chunk.stop):
                slot = (sequence.lease.pages[position // page_size], position % page_size)
                assert slot not in written, "two tokens in one slot"
                written.add(slot)
                self.content[slot] = tokens[position]
            self.num_computed_tokens += chunk.num_tokens
            seen = [
                self.content[(sequence.lease.pages[position // page_size], position % page_size)]
                for position in range(chunk.stop)
            ]
            if chunk.wants_sample:
                draws[sequence] = self.sampled(seen, sequence)
        return draws

    def finish_all(self, *, max_steps=10_000):
        """Run until nothing is left; give how many steps it took."""
        for num_steps in range(max_steps):
            if self.scheduler.is_idle and self.launched is None:
                return num_steps
            self.step()
            self.scheduler.check()
        raise AssertionError("the scheduler does not come to an end")


def output_of(sequence):
    return array("i", sequence.token_ids[sequence.num_prompt_tokens :]).tolist()
