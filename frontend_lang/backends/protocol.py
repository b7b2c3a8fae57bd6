"""What a program needs of a runtime: encode, decode, chat messages, the ids at the ends, generate and score."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from frontend_lang.backends.values import (
    GenerateRequest,
    GenerationOutput,
    OutputChunk,
    TextPiece,
    ToolForm,
    Usage,
)

# Where the calling program stands: "program:branch#call of that branch". Two calls that ask the same are told apart
# by it when they are recorded and replayed.
call_site: ContextVar[str] = ContextVar("call_site", default="")


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

    @property
    def transient_errors(self) -> tuple[type[Exception], ...]:
        """Give the errors after which the same call may be sent again.

        () means that no call is: a program that asks such a runtime for retries is refused.
        """

    @property
    def has_token_ids(self) -> bool:
        """Tell whether ids are the model's; else they are the backend's own numbers, and a program may not read them."""

    @property
    def tool_form(self) -> ToolForm | None:
        """Give the form in which the model writes calls of tools; None where it is not known."""

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

    def open_scope(self) -> int | None:
        """Begin a scope: prefixes of requests that name it (`scope_id`) are evicted last while it is open.

        None: the runtime keeps no prefixes, or lets nobody say which.
        """

    def close_scope(self, scope_id: int) -> None:
        """End a scope; fine when the runtime is gone."""

    async def settle_scopes(self) -> None:
        """Wait until the runtime knows of the scopes that were closed; soon over, and fine when the runtime is gone."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        """Run one request and give its chunks as they come, the last one with `usage`.

        Closing the generator or cancelling the task that reads it aborts the request.
        """

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        """Run one request to its end: `stream`, collected. Cancelling the awaiting task aborts it."""

    async def score(
        self,
        prefix_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        label: str = "",
        scope_id: int | None = None,
    ) -> list[ScoredContinuation]:
        """Give the log-probabilities of each continuation (one token or more) after the prefix (the same)."""
