"""What a compiled constraint and its cursor can do, whatever the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from radixrt.constraints import GrammarSpec

MaskRow = NDArray[np.int32]
Enforcement = Literal["mask", "checked", "annotation", "annotation (unknown)"]


@dataclass(frozen=True, slots=True)
class EnforcementReport:
    """What became of each keyword of a constraint.

    Attributes:
        keywords: JSON Pointer -> "mask" (every answer obeys it), "checked" (the finished value is validated: only
            with on_unsupported="check"), "annotation" (no constraint by its definition: titles, unknown formats) or
            "annotation (unknown)": a word that no draft knows, which the standard takes for an annotation, too,
            though it may be a misspelt constraint. Any other keyword is refused at compilation, so it is never
            here. The pointer "" stands for a constraint that is not a schema.
        engine: which engine computes the masks.
    """

    keywords: Mapping[str, Enforcement] = field(default_factory=lambda: MappingProxyType({"": "mask"}))
    engine: str = ""

    @property
    def checked(self) -> list[str]:
        """Give the keywords that masks do not enforce."""
        return [place for place, how in self.keywords.items() if how == "checked"]

    @property
    def unknown(self) -> list[str]:
        """Give the keywords that no draft knows."""
        return [place for place, how in self.keywords.items() if how == "annotation (unknown)"]


@dataclass(frozen=True, slots=True)
class MaskExplanation:
    """Why a mask holds a token or not.

    Attributes:
        token_id, token_bytes: the token; no bytes for one without text.
        is_allowed: whether its bit is set.
        num_fitting_bytes: how many of its bytes could come next.
        reason: one sentence.
        num_allowed: how many tokens the mask holds.
        allowed_bytes: the bytes of some of them, the shortest first, at most 16.
    """

    token_id: int
    token_bytes: bytes
    is_allowed: bool
    num_fitting_bytes: int
    reason: str
    num_allowed: int
    allowed_bytes: tuple[bytes, ...]


class GrammarMatcher(Protocol):
    """The grammar cursor of one sequence; owned by that sequence, not for two threads at once.

    Invariant: a bit is set by `fill_mask` <=> `accept` of that token succeeds. End-of-sequence tokens are counted
    outside: their bits are never set and they are never accepted.
    """

    @property
    def is_accepting(self) -> bool:
        """Tell whether the text so far satisfies the constraint."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Tell whether the text satisfies the constraint and no token may follow."""
        ...

    def fill_mask(self, row: MaskRow) -> None:
        """Write the mask of the next token.

        Args:
            row: [ceil(V / 32)] int32, contiguous; bit t % 32 of word t // 32 belongs to token t.
        Raises:
            ValueError: the row has another shape or type.
            GrammarDeadEnd: the engine gave up (a limit was hit).
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Take a token; False and unchanged if it is not allowed."""
        ...

    def accept_run(self, token_ids: Sequence[int]) -> int:
        """Take tokens in order, up to the first that the constraint refuses; give how many were taken.

        Where a run is forced, masks and `accept` hold its canonical tokens only; here any spelling of it will do.
        """
        ...

    def validate(self, token_ids: Sequence[int]) -> int:
        """Count how many of the tokens would be accepted, in order. The matcher is unchanged afterwards."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens.

        Raises:
            ValueError: fewer tokens were accepted.
        """
        ...

    def fork(self) -> GrammarMatcher:
        """Give an independent matcher in the same state."""
        ...

    def forced_tokens(self) -> list[int]:
        """Give the run of tokens that must come next, in canonical tokenization; [] if there is a choice.

        The matcher does not advance. A token that could merge with what follows the run is left out.
        """
        ...

    def explain_mask(self, token_id: int) -> MaskExplanation:
        """Tell why the next token may or may not be this one. The matcher does not advance."""
        ...

    def closing_run(
        self, max_tokens: int, *, is_quick: bool = False, known: Sequence[int] = ()
    ) -> list[int] | None:
        """Give at most `max_tokens` tokens after which the text satisfies the constraint.

        [] if it does already; None if no such run was found. The matcher does not advance. With an automaton the
        run is a shortest one; with llguidance it is found greedily, so that a longer budget may find one.
        A quick search gives up after a tenth of the work, some 50 ms: while others wait. `known` would have ended
        the text some tokens earlier: its rest may end it now, which shortens a greedy search.
        To end every answer within its budget: while r tokens are left, keep the invariant that a run of at most
        r tokens is known; a sampled token after which there is none of r - 1 gives way to that run.
        """
        ...

    def rests_of(self, run: Sequence[int], token_id: int) -> Iterable[list[int]]:
        """Guess what may end the text after a token, from a run that ended it before; cheap, to be tried out. Pure."""
        ...


class CompiledGrammar(Protocol):
    """A constraint ready to run with one vocabulary; immutable to its users and shared between threads."""

    @property
    def spec(self) -> GrammarSpec:
        """Give what was compiled."""
        ...

    @property
    def report(self) -> EnforcementReport:
        """Tell what became of each keyword."""
        ...

    @property
    def num_bytes(self) -> int:
        """Estimate the memory it holds now, cached masks included."""
        ...

    def start(self) -> GrammarMatcher:
        """Give a new matcher at the beginning."""
        ...

    def check(self, text: str) -> bool:
        """Tell whether a finished text satisfies the constraint.

        Raises:
            GrammarDeadEnd: it cannot be told within the limits of time; only where `report.checked` is not empty.
        """
        ...


def check_row(row: MaskRow, vocab_size: int) -> None:
    """Raise ValueError unless the row can hold one mask. Pure."""
    wanted = ((vocab_size + 31) // 32,)
    if row.shape != wanted or row.dtype != np.int32 or not row.flags.c_contiguous:
        raise ValueError(f"row must be contiguous int32 of shape {wanted}, got {row.dtype} {row.shape}")
