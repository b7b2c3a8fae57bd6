"""What a program needs of a runtime: encode, decode, chat messages, the ids at the ends, generate and score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from frontend_lang.backends.values import GenerateRequest, GenerationOutput, TextPiece, Usage


@dataclass(frozen=True, slots=True)
class ScoredContinuation:
    """The log-probabilities of one continuation's tokens, in order, and what they cost."""

    logprobs: tuple[float, ...]
    usage: Usage


class Backend(Protocol):
    """A runtime as a program sees it. Called on the program's event loop; must not block it."""

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """Give the ids in front of a transcript that starts with plain text."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Give the ids that end a sequence; a transcript never holds a generated one at the end of a call."""

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool) -> list[int]:
        """Encode pieces as one text; control tokens count in template pieces only.

        Args:
            is_start: nothing is before it; some tokenizers put a space before the first word of a text.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Give the text of token ids."""

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        """Give the template's text before and after the content of the next message.

        Args:
            history: the earlier messages, each with "role" and "content".
        """

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        """Run one request to its end. Cancelling the awaiting task aborts it."""

    async def score(
        self, prefix_ids: Sequence[int], continuations: Sequence[Sequence[int]], *, label: str = ""
    ) -> list[ScoredContinuation]:
        """Give the log-probabilities of each continuation after the prefix (one token or more)."""
