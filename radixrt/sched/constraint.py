"""Constraint: a grammar's cursor together with a known way to end in time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

from radixrt.errors import GrammarDeadEnd, InvalidRequest
from radixrt.grammar.matcher import GrammarMatcher

MAX_CLOSING_TOKENS = 1 << 16
MAX_RETRIES = 8
_MAX_PROBES = 10

Judge = Callable[[Seq[int]], bool]


@dataclass(frozen=True, slots=True)
class Rewind:
    """What becomes of an answer that is not valid.

    Attributes:
        num_kept: leading output tokens that stay.
        closing: tokens that complete the answer at once: a valid one that was found on the way; () to sample anew.
    """

    num_kept: int
    closing: tuple[int, ...] = ()


class Constraint:
    """Own the matcher of one sequence.

    Invariant: `closing` is a run of tokens after which the text satisfies the constraint, and it fits into what
    is left of max_tokens; so the text can always be completed. `room` below is what is left, in tokens.
    Where the grammar room's search finds no way to the end at all, `closing` is None and nothing is promised: the
    answer may be cut off by max_tokens, with the finish reason "length".

    Where the masks do not enforce all of the constraint, the finished answer is judged. One that is not valid is
    taken back to the last token from which a valid one is known to be in reach, and sampled anew from there.

    Attributes:
        is_closed: the closing run was taken, the text is complete.
        judge: tells whether a finished answer (token ids) is valid; None where the masks see to it.
        num_retries: how often an answer was taken back.
        banned: number of output tokens -> tokens that led to an answer that is not valid, after the present ones.
    """

    __slots__ = ("_decisions", "_forces", "banned", "closing", "is_closed", "judge", "matcher", "num_retries")

    def __init__(
        self,
        matcher: GrammarMatcher,
        closing: list[int] | None,
        *,
        judge: Judge | None = None,
        forces: bool = True,
    ) -> None:
        self.matcher = matcher
        self.closing = closing
        self.is_closed = False
        self.judge = judge
        self._forces = forces
        self.num_retries = 0
        self.banned: dict[int, frozenset[int]] = {}
        self._decisions: list[int] = []  # output tokens at each sample

    @classmethod
    def begin(
        cls, matcher: GrammarMatcher, *, room: int, judge: Judge | None = None, forces: bool = True
    ) -> Constraint:
        """Find a first way to the end.

        Args:
            room: max_tokens.
            forces: append what the grammar forces, instead of sampling it.
        Raises:
            InvalidRequest: no complete text fits into max_tokens (says how many tokens would do).
        """
        closing = matcher.closing_run(room)
        shortest = closing if closing is not None else matcher.closing_run(MAX_CLOSING_TOKENS)
        if closing is None and shortest is not None:
            raise InvalidRequest(
                f"max_tokens must be at least {len(shortest)} for a complete answer under this constraint, "
                f"got {room}",
                parameter="max_tokens",
                value=room,
            )
        return cls(matcher, closing, judge=judge, forces=forces)

    def fork(self) -> Constraint:
        """Give an independent constraint in the same state."""
        closing = None if self.closing is None else list(self.closing)
        fork = Constraint(self.matcher.fork(), closing, judge=self.judge, forces=self._forces)
        fork.is_closed = self.is_closed
        fork.num_retries = self.num_retries
        fork.banned = dict(self.banned)
        fork._decisions = list(self._decisions)
        return fork

    @property
    def is_complete(self) -> bool:
        """Tell whether nothing may follow."""
        return self.is_closed or self.matcher.is_terminated

    @property
    def is_accepting(self) -> bool:
        """Tell whether the text so far satisfies the constraint."""
        return self.matcher.is_accepting

    def take(self, token_id: int, *, room: int) -> list[int]:
        """Take a sampled token (its mask allowed it); give the tokens to append: it and what it forces.

        A token after which the text could not be completed in time gives way to the closing run.
        """
        if not self._accept(token_id, room=room):
            return self._close()
        return [token_id, *self.forced(room=room - 1)]

    def decide(self, num_output: int) -> None:
        """Note that a token is sampled after so many."""
        if self.judge is not None:
            self._decisions.append(num_output)

    def retry(self, output_ids: Seq[int], *, max_tokens: int) -> Rewind:
        """Take a finished answer back that is not valid. Changes: the matcher stands after the tokens kept.

        Of the last samples, the latest is looked for before which a completion is known that is valid.

        Raises:
            GrammarDeadEnd: the retries are used up, and no valid completion is known.
        """
        assert self.judge is not None
        found = self._last_good(output_ids, max_tokens)
        if not self._decisions or (self.num_retries == MAX_RETRIES and found is None):
            raise GrammarDeadEnd(
                f"no valid answer was found: {self.num_retries + 1} failed the keywords that masks do not enforce"
            )
        num_kept, completion = found or (self._decisions[0], None)
        self.is_closed = False
        self.matcher.rollback(len(output_ids) - num_kept)
        self._decisions = [at for at in self._decisions if at < num_kept]
        self.banned = {at: ids for at, ids in self.banned.items() if at <= num_kept}
        if completion is None:
            completion = self.matcher.closing_run(max_tokens - num_kept, is_quick=True)
        self.closing = completion
        if self.num_retries == MAX_RETRIES:
            return Rewind(num_kept, tuple(self._close()))
        self.num_retries += 1
        if num_kept < len(output_ids):
            self.banned[num_kept] = self.banned.get(num_kept, frozenset()) | {output_ids[num_kept]}
        return Rewind(num_kept)

    def _last_good(self, output_ids: Seq[int], max_tokens: int) -> tuple[int, list[int]] | None:
        """Give the latest sample before which a valid completion is known, and that completion."""
        assert self.judge is not None
        for index in _probes(len(self._decisions)):
            num_kept = self._decisions[index]
            cursor = self.matcher.fork()
            cursor.rollback(len(output_ids) - num_kept)
            completion = cursor.closing_run(max_tokens - num_kept, is_quick=True)
            if completion is not None and self.judge([*output_ids[:num_kept], *completion]):
                return num_kept, completion
        return None

    def forced(self, *, room: int) -> list[int]:
        """Take and give the tokens that the grammar leaves no choice about, as far as they fit."""
        taken: list[int] = []
        for token_id in self.matcher.forced_tokens() if self._forces else ():
            if room - len(taken) < 1 or not self._accept(token_id, room=room - len(taken)):
                break
            taken.append(token_id)
        return taken

    def _accept(self, token_id: int, *, room: int) -> bool:
        """Advance if the text can still be completed afterwards, else stay."""
        if not self.matcher.accept(token_id):
            raise GrammarDeadEnd(f"the grammar allowed token {token_id} and its accept refused it")
        if self.closing is None:
            return True
        closing = self._closing_after(self.closing, token_id, room=room - 1)
        if closing is None:
            self.matcher.rollback(1)
            return False
        self.closing = closing
        return True

    def _closing_after(self, known: list[int], token_id: int, *, room: int) -> list[int] | None:
        """Find a run that ends the text now; what was known before the token is tried before a search."""
        if known and known[0] == token_id:
            return known[1:]
        if self.matcher.is_accepting:
            return []
        # The token may have been one more (inside a string) or one in place of the first (a digit of many).
        for run in chain(self.matcher.rests_of(known, token_id), (known, known[1:])):
            if len(run) <= room and self._closes(run):
                return run
        return self.matcher.closing_run(room, is_quick=True, known=known)

    def _closes(self, run: list[int]) -> bool:
        num_taken = self.matcher.accept_run(run)
        closes = num_taken == len(run) and self.matcher.is_accepting
        self.matcher.rollback(num_taken)
        return closes

    def _close(self) -> list[int]:
        """Take the closing run."""
        run = self.closing or []
        if (num_taken := self.matcher.accept_run(run)) < len(run):
            raise GrammarDeadEnd(f"the closing run's token {run[num_taken]} was refused")
        self.closing, self.is_closed = [], True
        return run


def _probes(num_decisions: int) -> list[int]:
    """Give which samples to look at: the latest ones, then in growing steps back to the first. Pure."""
    found, step = list[int](), 1
    position = num_decisions - 1
    while position > 0 and len(found) < _MAX_PROBES:
        found.append(position)
        if len(found) >= _MAX_PROBES // 2:
            step *= 2
        position -= step
    return [*found, 0] if num_decisions else []
