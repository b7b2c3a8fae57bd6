"""WaitingList: who waits, in order of admission, without matching everybody again in every step.

Four views of the same sequences:
- by policy key, sorted; a key that became too good (its prefix was evicted) is corrected when it comes up;
- by token ids, sorted, per namespace: those who share a prefix stand side by side, so that publishing a prefix
  touches its neighbours only;
- by arrival, to count who is passed over;
- the urgent ones, passed over max_skips times, in order of arrival.

A sequence whose prefix is being computed by a running one waits for it outside that order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from radixrt.errors import InvariantViolation
from radixrt.kv.cache import PrefixCache
from radixrt.kv.packed import TOKEN_BYTES, num_common_tokens, pack_first
from radixrt.kv.radix import PrefixMatch
from radixrt.sched.latency import FASTEST_S_PER_TOKEN
from radixrt.sched.policy import Cached, OrderKey, Policy
from radixrt.sched.prompts import MAX_KEY_TOKENS, Gap, SortedPrompts
from radixrt.sched.sequence import Sequence
from radixrt.types import Namespace

MAX_DRIFT = 1.25  # of the learned seconds per token, before everybody gets a new key
MAX_SINGLE_MOVES = 64  # more candidates than that are sorted together


class Candidate:
    """A waiting sequence with what is known of its cached prefix.

    Attributes:
        tokens: packed leading tokens, at most MAX_KEY_TOKENS.
        num_cached_pages: whole cached pages; may be too high after an eviction, never too low for long.
        computed_by: the running sequence that is computing more of this one's prefix, or None.
        is_urgent: it stands before everything that arrived later: nothing of that may pass it any more.
        match, matched_at: the last lookup, and the tree's version when it was last known to hold.
        queued_key: the key under which it stands in the order, or None.
        num_pages: that hold its tokens, cached or not.
    """

    __slots__ = (
        "computed_by",
        "is_urgent",
        "match",
        "matched_at",
        "num_cached_pages",
        "num_pages",
        "queued_key",
        "sequence",
        "tokens",
    )

    def __init__(self, sequence: Sequence, *, num_pages: int) -> None:
        self.sequence = sequence
        self.num_pages = num_pages
        self.tokens = pack_first(sequence.token_ids, min(sequence.max_cached_tokens, MAX_KEY_TOKENS))
        self.num_cached_pages = 0
        self.match: PrefixMatch | None = None
        self.matched_at = -1
        self.computed_by: Sequence | None = None
        self.is_urgent = False
        self.queued_key: OrderKey | None = None


class WaitingList:
    """Own the waiting sequences and their order.

    Invariants: every waiting sequence is in each of its views exactly once; a candidate is in the order unless it is
    urgent or waits for another's prefix.
    """

    def __init__(self, cache: PrefixCache, policy: Policy, *, max_skips: int) -> None:
        self._cache = cache
        self._prefill_s_per_token = FASTEST_S_PER_TOKEN
        self._policy = policy
        self._max_skips = max_skips
        self._candidates: dict[Sequence, Candidate] = {}
        self._by_arrival: list[tuple[int, Candidate]] = []
        self._order: list[tuple[OrderKey, Candidate]] = []  # no two have the same key
        self._sorted: SortedPrompts[Candidate] = SortedPrompts()
        self._urgent: list[tuple[int, Candidate]] = []  # no two have the same arrival
        self._waiters: dict[Sequence, list[Candidate]] = {}  # running prefill -> who waits for it

    def __len__(self) -> int:
        return len(self._candidates)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._candidates)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._candidates

    # -- coming and going -------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait. Cost: one lookup, O(log n), one comparison per running prefill."""
        candidate = Candidate(sequence, num_pages=self._cache.num_pages_for(len(sequence.token_ids)))
        self._candidates[sequence] = candidate
        insort(self._by_arrival, (sequence.arrival, candidate))
        self._sorted.add(sequence.namespace, candidate.tokens, sequence.arrival, candidate)
        candidate.num_cached_pages = len(self.match(candidate).pages)
        if sequence.num_skips >= self._max_skips and self._policy.is_fair:
            self._make_urgent(candidate)
            return
        for other in self._waiters:
            if other.namespace == sequence.namespace:
                num_common = num_common_tokens(candidate.tokens, _prompt(other))
                if self._shall_wait(candidate, other, num_common):
                    self._wait_for(candidate, other)
                    return
        self._enqueue(candidate)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence wait no longer. Cost: O(log n) and one move of pointers."""
        candidate = self._candidates.pop(sequence)
        del self._by_arrival[bisect_left(self._by_arrival, (sequence.arrival,))]
        self._sorted.remove(sequence.namespace, candidate.tokens, sequence.arrival)
        self._unqueue(candidate)
        if candidate.computed_by is not None:
            self._waiters[candidate.computed_by].remove(candidate)
        if candidate.is_urgent:
            del self._urgent[bisect_left(self._urgent, (sequence.arrival,))]

    def in_order(self) -> Iterator[Candidate]:
        """Give candidates in order of admission; those that are still here afterwards keep their place.

        Of those that are not urgent num_cached_pages is true.
        """
        for _, candidate in list(self._urgent):
            yield candidate
        order, place, tree = self._order, 0, self._cache.tree
        while place < len(order):
            row = order[place]
            key, candidate = row
            match = candidate.match
            if match is None or candidate.matched_at != tree.version:
                match = self.match(candidate)
            num_pages = len(match.pages)
            if num_pages != candidate.num_cached_pages:
                candidate.num_cached_pages = num_pages
                self._enqueue(candidate)
                if candidate.queued_key is not None and candidate.queued_key > key:
                    continue  # another one may stand here now
            yield candidate
            if place < len(order) and order[place] is row:
                place += 1
            else:  # it was admitted, or others left that stood before it
                place = bisect_left(order, (key,)) + (candidate.queued_key == key)

    def match(self, candidate: Candidate) -> PrefixMatch:
        """Find a candidate's cached prefix now."""
        match, tree = candidate.match, self._cache.tree
        if match is not None and candidate.matched_at == tree.version:
            return match
        if match is None or (match := tree.renewed(match)) is None:
            sequence = candidate.sequence
            match = self._cache.lookup(
                sequence.namespace, sequence.token_ids, max_tokens=sequence.max_cached_tokens
            )
        candidate.match, candidate.matched_at = match, tree.version
        return match

    def gap(self, namespace: Namespace, tokens: bytes) -> Gap:
        """Give where a cached path stands among those who wait, and so how much of it they want."""
        return self._sorted.gap(namespace, tokens)

    def make_urgent(self, sequence: Sequence) -> None:
        """Let a sequence stand before all that arrived later (it would miss its target)."""
        candidate = self._candidates[sequence]
        if not candidate.is_urgent:
            self._make_urgent(candidate)

    def count_skips(self, youngest_admitted: int) -> None:
        """Note that a sequence of this arrival was admitted: everybody older was passed over."""
        num_passed = bisect_left(self._by_arrival, (youngest_admitted,))
        num_late = self._max_skips if self._policy.is_fair else 1 << 62
        for _, candidate in self._by_arrival[:num_passed]:
            sequence = candidate.sequence
            num_skips = sequence.num_skips = sequence.num_skips + 1
            if num_skips >= num_late and not candidate.is_urgent:
                self._make_urgent(candidate)

    def _make_urgent(self, candidate: Candidate) -> None:
        candidate.is_urgent = True
        self._unqueue(candidate)
        if candidate.computed_by is not None:
            self._waiters[candidate.computed_by].remove(candidate)
            candidate.computed_by = None
        insort(self._urgent, (candidate.sequence.arrival, candidate))

    def _enqueue(self, candidate: Candidate) -> None:
        self._queue(candidate, self._key(candidate))

    def _queue(self, candidate: Candidate, key: OrderKey) -> None:
        if key != candidate.queued_key:
            self._unqueue(candidate)
            candidate.queued_key = key
            insort(self._order, (key, candidate))

    def _unqueue(self, candidate: Candidate) -> None:
        if candidate.queued_key is not None:
            del self._order[bisect_left(self._order, (candidate.queued_key,))]
            candidate.queued_key = None

    def _enqueue_all(self, candidates: list[Candidate]) -> None:
        """Give candidates the places that they deserve now. Cost: O(log n) and a move of pointers each, or O(n log n)."""
        if len(candidates) <= MAX_SINGLE_MOVES:
            for candidate in candidates:
                self._enqueue(candidate)
        else:
            for candidate in candidates:
                candidate.queued_key = self._key(candidate)
            self._sort()

    def _key(self, candidate: Candidate) -> OrderKey:
        num_pages = candidate.num_cached_pages
        cached = Cached(num_pages, num_pages * self._cache.page_size * self._prefill_s_per_token)
        return self._policy.key(candidate.sequence, cached, candidate.tokens)

    def _sort(self) -> None:
        """Put everybody in the order of the keys that they have now."""
        self._order[:] = sorted(
            (item.queued_key, item) for item in self._candidates.values() if item.queued_key is not None
        )

    def set_prefill_time(self, s_per_token: float) -> None:
        """Take over what a prompt token costs, if it is another figure than before. Cost: O(n) then."""
        if not _is_near(s_per_token, self._prefill_s_per_token):
            self._prefill_s_per_token = s_per_token
            for candidate in self._candidates.values():
                if candidate.queued_key is not None:
                    candidate.queued_key = self._key(candidate)
            self._sort()

    # -- prefixes ---------------------------------------------------------------------------------------

    def published(self, namespace: Namespace, tokens: bytes) -> None:
        """Raise the matches of those who share a prefix that is cached now.

        Cost: O(log n + those raised). Walking away from the prefix's place, common prefixes only get shorter:
        the first neighbour that has as much cached already ends the walk, since what it has cached covers
        all that those behind it share with the new prefix.
        """
        if not tokens:
            return
        raised: list[Candidate] = []
        for candidate, num_common in self._neighbours(namespace, tokens):
            num_pages = num_common // self._cache.page_size
            if num_pages > candidate.num_cached_pages:
                candidate.num_cached_pages = num_pages
                if candidate.queued_key is not None:
                    raised.append(candidate)
        self._enqueue_all(raised)

    def prefill_began(self, sequence: Sequence) -> None:
        """Let those wait who share an uncached prefix, by a page or more, with a sequence that computes it now.

        Cost: as `published`.
        """
        if not self._cache.is_enabled:
            return
        self._waiters.setdefault(sequence, [])
        for candidate, num_common in self._neighbours(sequence.namespace, _prompt(sequence)):
            is_free = candidate.computed_by is None and not candidate.is_urgent
            if is_free and self._shall_wait(candidate, sequence, num_common):
                self._wait_for(candidate, sequence)

    def prefill_ended(self, sequence: Sequence) -> None:
        """Release those who waited for a sequence's prefix (it is published, or it will never be)."""
        released = self._waiters.pop(sequence, [])
        for candidate in released:
            candidate.computed_by = None
        self._enqueue_all(released)

    def _shall_wait(self, candidate: Candidate, other: Sequence, num_common: int) -> bool:
        """Tell whether a running prefill will offer at least a page more than is cached now."""
        num_gained = num_common - candidate.num_cached_pages * self._cache.page_size
        is_coming = num_gained >= self._cache.page_size and num_common > other.num_computed
        return is_coming and self._cache.is_enabled

    def _wait_for(self, candidate: Candidate, other: Sequence) -> None:
        candidate.computed_by = other
        self._unqueue(candidate)
        self._waiters[other].append(candidate)

    def _neighbours(self, namespace: Namespace, tokens: bytes) -> Iterator[tuple[Candidate, int]]:
        """Give those who share a page or more with `tokens` and have less of it cached, nearest first, each side."""
        page_bytes = self._cache.page_size * TOKEN_BYTES
        rows, place = self._sorted.place(namespace, tokens)
        for places in (range(place - 1, -1, -1), range(place, len(rows))):
            for at in places:
                prompt, _, candidate = rows[at]
                # Nearly every walk ends with the first one: that is told without the length of what they share.
                num_needed = (candidate.num_cached_pages + 1) * page_bytes
                more = tokens[:num_needed]
                if len(more) < num_needed or not prompt.startswith(more):
                    break
                yield candidate, num_common_tokens(prompt, tokens)

    # -- checking ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantViolation unless all views agree. Cost: O(n)."""
        rows = list(self._sorted)
        if len(rows) != len(self._candidates) or {id(row) for row in rows} != {
            id(item) for item in self._candidates.values()
        }:
            raise InvariantViolation("waiting sequences and their sorted view differ")
        keys = [key for key, _ in self._order]
        if keys != sorted(keys) or keys != [candidate.queued_key for _, candidate in self._order]:
            raise InvariantViolation("waiting sequences are not in the order of their keys")
        queued = {id(candidate) for _, candidate in self._order}
        if self._by_arrival != sorted((item.sequence.arrival, item) for item in self._candidates.values()):
            raise InvariantViolation("waiting sequences and their order of arrival differ")
        urgent = {id(candidate) for _, candidate in self._urgent}
        waiting = {id(candidate) for waiters in self._waiters.values() for candidate in waiters}
        for candidate in self._candidates.values():
            views = [id(candidate) in view for view in (queued, urgent, waiting)]
            if sum(views) != 1:
                raise InvariantViolation(
                    f"a waiting sequence stands in {sum(views)} of order, urgent, waiters"
                )


def _is_near(one: float, other: float) -> bool:
    return one <= other * MAX_DRIFT and other <= one * MAX_DRIFT


def _prompt(sequence: Sequence) -> bytes:
    return pack_first(sequence.token_ids, min(sequence.num_prompt_tokens, MAX_KEY_TOKENS))
