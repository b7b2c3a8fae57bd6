"""A program's calls on an engine in this process. The only module that imports what runs in radixrt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from os import PathLike
from typing import Protocol

from frontend_lang.backends.gathering import scored
from frontend_lang.backends.local_text import LocalText, RuntimeTokenizer
from frontend_lang.backends.protocol import ScoredContinuation
from frontend_lang.backends.values import (
    GenerateRequest,
    GenerationOutput,
    OutputChunk,
    TextPiece,
    ToolForm,
)
from radixrt import Mailbox, stream_chunks, whole_output

Deliver = Callable[[OutputChunk | BaseException], None]


class RuntimeTicket(Protocol):
    """A submitted request."""

    def abort(self) -> None:
        """Give up the request; safe from any thread and after its end."""


class RuntimeScope(Protocol):
    """An open scope of an engine."""

    @property
    def scope_id(self) -> int: ...

    def close(self) -> None:
        """Let go of its prefixes; fine when it or the engine is closed."""


class RuntimeEngine(Protocol):
    """The part of radixrt's Engine that a program needs."""

    @property
    def tokenizer(self) -> RuntimeTokenizer: ...

    def submit(self, request: GenerateRequest, deliver: Deliver) -> RuntimeTicket:
        """Start a request; `deliver` gets its chunks, or the error that ends it, in the engine's thread."""

    def mailbox(self) -> Mailbox:
        """Give the running event loop's mailbox."""

    def scope(self) -> RuntimeScope:
        """Open a scope: the prefixes of its requests are evicted last."""


class EngineBackend:
    """Run a program's calls on an engine in this process. Owns the scopes that programs opened."""

    has_token_ids = True
    transient_errors: tuple[type[Exception], ...] = ()  # what fails here fails again: nothing is in between

    def __init__(self, engine: RuntimeEngine) -> None:
        if isinstance(engine, str | PathLike):
            raise TypeError(f"engine must be an open engine, e.g. radixrt.Engine({str(engine)!r})")
        self._engine = engine
        self._text = LocalText(engine.tokenizer)
        self._scopes: dict[int, RuntimeScope] = {}

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return self._text.bos_ids

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._text.eos_ids

    @property
    def tool_form(self) -> ToolForm | None:
        return self._text.tool_form

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool) -> list[int]:
        return self._text.encode(pieces, is_start=is_start)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._text.decode(token_ids)

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        return self._text.open_role(history, role)

    def open_scope(self) -> int | None:
        scope = self._engine.scope()
        self._scopes[scope.scope_id] = scope
        return scope.scope_id

    def close_scope(self, scope_id: int) -> None:
        self._scopes.pop(scope_id).close()

    async def settle_scopes(self) -> None:
        """Do nothing: the engine knows at once."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        return stream_chunks(self._engine.submit, request, mailbox=self._engine.mailbox())

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        return await whole_output(self._engine.submit, request, mailbox=self._engine.mailbox())

    async def score(
        self,
        prefix_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        label: str = "",
        scope_id: int | None = None,
    ) -> list[ScoredContinuation]:
        return await scored(prefix_ids, continuations, self.generate, label=label, scope_id=scope_id)
