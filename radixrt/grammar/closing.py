"""A short way to the end of a constrained text, where the engine does not tell its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
from numpy.typing import NDArray

_NUM_TRIES = 5
_VARIED_TRIES = (1, 4)  # in these, a token and all that begin like it get worse with every choice of it
_WEAR = 6.0  # by so much
_MAX_ALIKE = 96  # choices of one class in a row after which a try is given up: it goes round in circles
_MAX_CHOICES = 4096  # tokens that are not forced, of all tries together: each takes a mask
_MAX_QUICK_CHOICES = 160
_ZERO, _DIGITS = 3.0, 6.0
_ORDINARY = 50.0  # tokens that close nothing; the longer come first, so that least lengths are reached soon
_LAST = 100.0  # escapes and pieces of characters
_ELSEWHERE = {
    **{b",": 1.5, b"null": 2, b"0": _ZERO, b"true": 4, b"false": 4, b'""': 4},
    **{b"[]": 5, b"{}": 5, b'"': 7, b"[": 8, b"{": 9},
}
_QUOTE = b'"'
_PLAIN_LETTER = b"q"  # begins no JSON value


@dataclass(frozen=True, slots=True)
class ClosingRanks:
    """How much each token helps to end a JSON text: lower is better.

    Attributes:
        in_string, elsewhere: [V] float64.
        letter_id: a token that is allowed inside free strings only; -1 if there is none.
        classes: [V] int16, tokens of one class begin alike: letters, digits, spaces, or one sign.
        quote_id: the token of one quotation mark; -1 if there is none.
    """

    in_string: NDArray[np.float64]
    elsewhere: NDArray[np.float64]
    classes: NDArray[np.int16]
    letter_id: int
    quote_id: int

    @classmethod
    def build(cls, vocab_bytes: Sequence[bytes]) -> ClosingRanks:
        """Rank a vocabulary. Cost: linear."""
        letter_id, quote_id = (
            next((index for index, token in enumerate(vocab_bytes) if token == wanted), -1)
            for wanted in (_PLAIN_LETTER, _QUOTE)
        )
        return cls(
            np.array([_rank_in_string(token) for token in vocab_bytes]),
            np.array([_rank_elsewhere(token) for token in vocab_bytes]),
            np.array([_class_of(token) for token in vocab_bytes], dtype=np.int16),
            letter_id,
            quote_id,
        )

    def choose(
        self,
        allowed: NDArray[np.int64],
        generator: np.random.Generator | None,
        *,
        wear: NDArray[np.float64] | None = None,
    ) -> int:
        """Give the allowed token of the lowest rank; a generator disturbs the order of digits and ordinary tokens.

        Args:
            wear: [V], added to the ranks.
        """
        ranks = (self.in_string if self.letter_id in allowed else self.elsewhere)[allowed]
        if wear is not None:
            ranks = ranks + wear[allowed]
        if generator is not None:
            noise = generator.random(len(ranks))
            ranks = np.where(ranks < _ORDINARY - 25, ranks, _ORDINARY + 10 * noise)
            ranks = np.where((ranks >= _ZERO) & (ranks <= _DIGITS), _ZERO + 3 * noise, ranks)
        return int(allowed[int(np.argmin(ranks))])


def _class_of(token: bytes) -> int:
    first = token[:1]
    if first.isdigit():
        return 1
    if first.isalpha() or first >= b"\x80":
        return 2
    return 3 if first.isspace() else 4 + first[0] if first else 0


def _rank_in_string(token: bytes) -> float:
    if token.startswith(b'"') and not token.strip(b'"}]'):
        return 1 - len(token) / 100
    return _rank_ordinary(token)


def _rank_elsewhere(token: bytes) -> float:
    if token and not token.strip(b"}])"):
        return 1 - len(token) / 100
    if token in _ELSEWHERE:
        return _ELSEWHERE[token]
    return _DIGITS if token.isdigit() else _rank_ordinary(token)


def _rank_ordinary(token: bytes) -> float:
    is_plain = not token.startswith((b'"', b"\\")) and token.isascii()
    return _ORDINARY - min(len(token), 20) if is_plain else _LAST


@dataclass(frozen=True, slots=True)
class Shortcuts:
    """Runs of tokens that bring a text nearer to its end.

    Attributes:
        openers: each begins a tag; taken in free text, where `probe` may stand before it.
        probe: a token that only free text allows: a line feed. () if the vocabulary has none.
        num_openers: how many of them one text may need.
        enders: each ends a tag or a rule from somewhere inside it.
    """

    openers: tuple[tuple[int, ...], ...] = ()
    probe: tuple[int, ...] = ()
    num_openers: int = 0
    enders: tuple[tuple[int, ...], ...] = ()

    def find(self, cursor: llguidance.LLMatcher, uses: Counter[tuple[int, ...]]) -> list[int]:
        """Give a run that the cursor takes, one that was used least; [] if there is none.

        Changes: counts the use.
        """
        found: tuple[int, ...] = ()
        if sum(uses[opener] for opener in self.openers) < self.num_openers:
            found = next((item for item in self.openers if _takes(cursor, (*self.probe, *item))), ())
        if not found:  # after the openers: free text would take an end, too
            fitting = [item for item in self.enders if _takes(cursor, item)]
            found = next((item for item in fitting if _completes(cursor, item)), ())
            found = found or min(fitting, key=lambda item: uses[item], default=())
        uses[found] += 1
        return list(found)


def _takes(cursor: llguidance.LLMatcher, run: tuple[int, ...]) -> bool:
    return bool(cursor.validate_tokens(list(run)) == len(run))


def _take(cursor: llguidance.LLMatcher, run: Sequence[int]) -> list[int]:
    """Consume a run up to where the grammar forces another token, as masks hold no other there; give what was."""
    taken: list[int] = []
    for token_id in run:
        forced = cursor.compute_ff_tokens() if taken else ()
        if (forced and forced[0] != token_id) or cursor.try_consume_tokens([token_id]) != 1:
            break
        taken.append(token_id)
    return taken


def _completes(cursor: llguidance.LLMatcher, run: Sequence[int]) -> bool:
    num_taken = cursor.try_consume_tokens(list(run))
    is_complete = num_taken == len(run) and cursor.is_accepting()
    cursor.rollback(num_taken)
    return bool(is_complete)


def _rest_after(run: Sequence[int], token_id: int) -> Sequence[int]:
    """Give what follows a token in a run, where it stands first; () if it does not. Pure."""
    return run[run.index(token_id) + 1 :] if token_id in run else ()


@dataclass(frozen=True, slots=True)
class Closer:
    """Searches for ways to the end of one constraint.

    Attributes:
        text_flags: [V] uint8, 1 for tokens with text.
        hints: token ids of texts that may satisfy a pattern from the middle of a string on, tried in order.
        shortcuts: other runs of tokens worth a try.
    """

    ranks: ClosingRanks
    text_flags: NDArray[np.uint8]
    hints: tuple[tuple[int, ...], ...] = ()
    shortcuts: Shortcuts = Shortcuts()

    def run(
        self,
        cursor: llguidance.LLMatcher,
        max_tokens: int,
        *,
        is_quick: bool = False,
        known: Sequence[int] = (),
    ) -> list[int] | None:
        """Search greedily for a run of at most `max_tokens` tokens to an accepting state.

        Each step takes the forced tokens, else a hint that lets the string end, else the allowed token that
        closes most. JSON closes in the first try but for patterns and recursions that go round in circles: of the
        other tries some tire of tokens that begin alike, and some take digits and ordinary tokens at random (from
        fixed seeds).
        Cost: a mask for each token that is not forced, no more than _MAX_CHOICES of them (quick:
        _MAX_QUICK_CHOICES); the hints once per string.

        Args:
            known: a run that would have ended the text some tokens earlier. After each step it is tried from behind
                the token that the step ended with: mostly one value is another now, and the rest is as it was.
        """
        num_left = _MAX_QUICK_CHOICES if is_quick else _MAX_CHOICES
        for attempt in range(_NUM_TRIES):
            generator = np.random.default_rng(attempt) if attempt > 1 else None
            found, num_choices = self._attempt(
                cursor.deep_copy(),
                max_tokens,
                generator,
                max_choices=num_left // 2,  # the later tries must have something left
                is_varied=attempt in _VARIED_TRIES,
                known=known,
            )
            if found is not None:
                return found
            num_left -= num_choices
        return None

    def _attempt(
        self,
        cursor: llguidance.LLMatcher,
        limit: int,
        generator: np.random.Generator | None,
        *,
        max_choices: int,
        is_varied: bool,
        known: Sequence[int],
    ) -> tuple[list[int] | None, int]:
        """Give at most `limit` tokens that end the text, None if it did not end; and how many were chosen."""
        run: list[int] = []
        num_choices = 0
        has_tried_hints, uses = False, Counter[tuple[int, ...]]()
        last_class, num_alike = -1, 0
        wear = np.zeros(len(self.ranks.classes)) if is_varied else None
        while not cursor.is_accepting():
            if cursor.is_stopped() or len(run) >= limit or num_alike > _MAX_ALIKE:
                return None, num_choices
            tokens = list(cursor.compute_ff_tokens())
            if not tokens:
                if num_choices >= max_choices:
                    return None, num_choices
                num_choices += 1
                tokens = self.shortcuts.find(cursor, uses)
            if not tokens:
                allowed = self._allowed(cursor)
                if not allowed.size:
                    return None, num_choices
                is_stuck = self.ranks.letter_id in allowed and self.ranks.quote_id not in allowed
                if is_stuck and not has_tried_hints:
                    tokens = self._hint(cursor)
                has_tried_hints = is_stuck
                tokens = tokens or [self.ranks.choose(allowed, generator, wear=wear)]
                chosen_class = int(self.ranks.classes[tokens[0]])
                if wear is not None:
                    wear[self.ranks.classes == chosen_class] += _WEAR
                    wear[tokens[0]] += _WEAR
                num_alike = num_alike + 1 if chosen_class == last_class else 1
                last_class = chosen_class
            taken = _take(cursor, tokens)
            if not taken or len(run) + len(taken) > limit:
                return None, num_choices
            run += taken
            rest = _rest_after(known, taken[-1])
            if rest and len(run) + len(rest) <= limit and _completes(cursor, rest):
                return run + list(rest), num_choices
        return run, num_choices

    def _allowed(self, cursor: llguidance.LLMatcher) -> NDArray[np.int64]:
        mask = np.frombuffer(cursor.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(mask, bitorder="little", count=len(self.text_flags))
        return np.flatnonzero((bits & self.text_flags).view(np.bool_))

    def _hint(self, cursor: llguidance.LLMatcher) -> list[int]:
        """Give the first hint after which the string can end, [] if there is none."""
        for hint in self.hints:
            wanted = [*hint, self.ranks.quote_id]
            if cursor.validate_tokens(wanted) == len(wanted):
                return list(hint)
        return []
