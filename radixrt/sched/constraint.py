"""Constraint: a grammar's cursor together with a known way to end in time."""

from __future__ import annotations

from radixrt.errors import GrammarDeadEnd, InvalidRequest
from radixrt.grammar.matcher import GrammarMatcher

MAX_CLOSING_TOKENS = 1 << 16


class Constraint:
    """Own the matcher of one sequence.

    Invariant: `closing` is a run of tokens after which the text satisfies the constraint, and it fits into what
    is left of max_tokens; so the text can always be completed. `room` below is what is left, in tokens.
    Where the grammar room's search finds no way to the end at all, `closing` is None and nothing is promised: the
    answer may be cut off by max_tokens, with the finish reason "length".

    Attributes:
        is_closed: the closing run was taken, the text is complete.
    """

    __slots__ = ("closing", "is_closed", "matcher")

    def __init__(self, matcher: GrammarMatcher, closing: list[int] | None) -> None:
        self.matcher = matcher
        self.closing = closing
        self.is_closed = False

    @classmethod
    def begin(cls, matcher: GrammarMatcher, *, room: int) -> Constraint:
        """Find a first way to the end.

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
        return cls(matcher, closing)

    def fork(self) -> Constraint:
        """Give an independent constraint in the same state."""
        fork = Constraint(self.matcher.fork(), None if self.closing is None else list(self.closing))
        fork.is_closed = self.is_closed
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

    def forced(self, *, room: int) -> list[int]:
        """Take and give the tokens that the grammar leaves no choice about, as far as they fit."""
        taken: list[int] = []
        for token_id in self.matcher.forced_tokens():
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
        for run in (known, known[1:]):
            if len(run) <= room and self._closes(run):
                return run
        return self.matcher.closing_run(room)

    def _closes(self, run: list[int]) -> bool:
        num_taken = 0
        for token_id in run:
            if not self.matcher.accept(token_id):
                break
            num_taken += 1
        closes = num_taken == len(run) and self.matcher.is_accepting
        self.matcher.rollback(num_taken)
        return closes

    def _close(self) -> list[int]:
        """Take the closing run."""
        run = self.closing or []
        for token_id in run:
            if not self.matcher.accept(token_id):
                raise GrammarDeadEnd(f"the closing run's token {token_id} was refused")
        self.closing, self.is_closed = [], True
        return run
