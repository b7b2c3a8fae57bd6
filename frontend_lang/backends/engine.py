"""A program's calls on an engine in this process. The only module that imports what runs in radixrt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from frontend_lang.backends.protocol import ScoredContinuation
from frontend_lang.backends.values import (
    GenerateRequest,
    GenerationOutput,
    InvalidRequest,
    OutputChunk,
    OutputCollector,
    SamplingParams,
    TextPiece,
)
from frontend_lang.waiting import all_or_first_error
from radixrt import stream_chunks

Deliver = Callable[[OutputChunk | BaseException], None]

MAX_SCORED_TOGETHER = 64  # choices of one select that wait in the engine at a time


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


class RuntimeChat(Protocol):
    """A chat template."""

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]: ...


class RuntimeTokenizer(Protocol):
    """The part of an engine's tokenizer that a program needs."""

    @property
    def eos_ids(self) -> Sequence[int]: ...

    @property
    def chat(self) -> RuntimeChat | None: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_pieces(self, pieces: Sequence[TextPiece]) -> list[int]: ...

    def encode_continuation(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class RuntimeEngine(Protocol):
    """The part of radixrt's Engine that a program needs."""

    @property
    def tokenizer(self) -> RuntimeTokenizer: ...

    def submit(self, request: GenerateRequest, deliver: Deliver) -> RuntimeTicket:
        """Start a request; `deliver` gets its chunks, or the error that ends it, in the engine's thread."""

    def scope(self) -> RuntimeScope:
        """Open a scope: the prefixes of its requests are evicted last."""


class EngineBackend:
    """Run a program's calls on an engine in this process. Owns the scopes that programs opened."""

    transient_errors: tuple[type[Exception], ...] = ()  # what fails here fails again: nothing is in between

    def __init__(self, engine: RuntimeEngine) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer
        self._scopes: dict[int, RuntimeScope] = {}
        self._bos_ids = tuple(engine.tokenizer.encode(""))
        self._eos_ids = frozenset(engine.tokenizer.eos_ids)

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return self._bos_ids

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool) -> list[int]:
        if is_start or any(piece.is_template for piece in pieces):
            return self._tokenizer.encode_pieces(pieces)
        return self._tokenizer.encode_continuation("".join(piece.text for piece in pieces))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        if self._tokenizer.chat is None:
            raise InvalidRequest(
                "the model has no chat template, so a program cannot use roles with it",
                parameter="role",
                value=role,
            )
        return self._tokenizer.chat.open_role(history, role)

    def open_scope(self) -> int | None:
        scope = self._engine.scope()
        self._scopes[scope.scope_id] = scope
        return scope.scope_id

    def close_scope(self, scope_id: int) -> None:
        self._scopes.pop(scope_id).close()

    def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        return stream_chunks(self._engine.submit, request)

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        collector = OutputCollector(request.prompt_ids, num_samples=request.sampling.n)
        async with aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                collector.add(chunk)
        return collector.output()

    async def score(
        self,
        prefix_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        label: str = "",
        scope_id: int | None = None,
    ) -> list[ScoredContinuation]:
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        requests = [
            GenerateRequest(
                (*prefix_ids, *continuation),
                sampling,
                logprob_start=len(prefix_ids),
                label=label,
                scope_id=scope_id,
            )
            for continuation in continuations
        ]
        seats = asyncio.Semaphore(MAX_SCORED_TOGETHER)

        async def scored(request: GenerateRequest) -> GenerationOutput:
            async with seats:
                return await self.generate(request)

        outputs = await all_or_first_error([scored(request) for request in requests])
        return [
            ScoredContinuation(
                tuple(entry.logprob for entry in output.prompt_logprobs[-len(continuation) :]), output.usage
            )
            for output, continuation in zip(outputs, continuations, strict=True)
        ]
