"""Everything that a program and its runtime said to each other, as data that can be saved and answered from again.

A recording holds two things: the tables of what was plain computation (texts encoded and decoded, the template around
messages), and the calls in order of their start, each with its request and its answer or error. `ReplayBackend`
(replay.py) answers from it without a model.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from frontend_lang.backends.protocol import Backend, ScoredContinuation, call_site
from frontend_lang.backends.unicode import escaped
from frontend_lang.backends.values import (
    GenerateRequest,
    GenerationOutput,
    InvalidRequest,
    OutputChunk,
    RequestError,
    TextPiece,
    ToolForm,
)

FORMAT: Literal["radixrt-run"] = "radixrt-run"
VERSION: Literal[2] = 2  # 1 told no origins, and nothing of the runs inside a run


@dataclass(frozen=True, slots=True)
class RecordedError:
    """What ended a call.

    Attributes:
        kind: name of the exception's class.
        parameter: of a RequestError.
        is_transient: the runtime allowed the same call to be sent again.
    """

    kind: str
    message: str
    parameter: str | None = None
    is_transient: bool = False


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One request to a runtime and what came of it.

    Attributes:
        site: where in the program it was made (protocol.call_site).
        request: what was asked; of a scoring, its prefix and label.
        continuations: of a scoring: the texts whose log-probabilities were asked for. Else empty.
        chunks, chunk_s: what came, and when: seconds after the start of the call.
        scores: of a scoring: one per continuation.
        started_s, seconds: when it began, after the recording's start, and how long it took.
        first_token_s: seconds from the start to the first token, where somebody looked.
        error: why there is no whole answer; a call that was cancelled has a CancelledError.
    """

    site: str
    request: GenerateRequest
    continuations: tuple[tuple[int, ...], ...] = ()
    chunks: tuple[OutputChunk, ...] = ()
    chunk_s: tuple[float, ...] = ()
    scores: tuple[ScoredContinuation, ...] = ()
    started_s: float = 0.0
    seconds: float = 0.0
    first_token_s: float | None = None
    error: RecordedError | None = None

    @property
    def what(self) -> GenerateRequest:
        """Give the request without what does not bear on the answer: scope, deadline, place in the queue."""
        return replace(self.request, scope_id=None, timeout_s=None, priority=0, latency_class="latency")


Encoded = tuple[bool, tuple[TextPiece, ...], tuple[int, ...]]  # is_start, pieces -> ids
Opened = tuple[tuple[tuple[str, str], ...], str, str, str]  # history, role -> prefix, suffix


@dataclass(frozen=True, slots=True)
class Recording:
    """What a runtime was asked and what it answered.

    Attributes:
        encoded: (is_start, pieces, ids) of every text that was encoded.
        decoded: (ids, text) of every run of ids that was decoded.
        opened: (history, role, prefix, suffix) of every chat message that was begun.
        calls: in order of start.
        has_token_ids: the ids are the model's (see Backend).
        tool_form: in which the model writes calls, where the run asked for it.
    """

    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    encoded: tuple[Encoded, ...] = ()
    decoded: tuple[tuple[tuple[int, ...], str], ...] = ()
    opened: tuple[Opened, ...] = ()
    calls: tuple[RecordedCall, ...] = ()
    has_token_ids: bool = True
    tool_form: ToolForm | None = None

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        RunFile(recording=self).save(path)

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read what `save` wrote, here or in a trace.

        Raises:
            InvalidRequest: not such a file, or of another version.
        """
        return RunFile.load(path).recording


class RunFile(BaseModel):
    """A saved run: a recording, and beside it what other writers add (a trace). JSON, no pickle."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    format: Literal["radixrt-run"] = FORMAT
    version: Literal[1, 2] = VERSION
    recording: Recording

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file; raises like `Recording.load`."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = "/".join(str(part) for part in first["loc"])
            raise InvalidRequest(
                f"{path} is not a run saved by this version (format {FORMAT}, version 1 to {VERSION}): "
                f"{where or 'file'}: {first['msg']}",
                parameter="path",
                value=str(path),
            ) from error


@dataclass(slots=True)
class _Heard:
    """Hold one call as it was heard; it becomes a RecordedCall when somebody asks."""

    site: str
    request: GenerateRequest
    began: float
    continuations: tuple[tuple[int, ...], ...] = ()
    ended: float | None = None
    chunks: Sequence[OutputChunk] = ()
    chunk_s: Sequence[float] = ()
    output: GenerationOutput | None = None
    scores: Sequence[ScoredContinuation] = ()
    failure: RecordedError | None = None


class RecordingBackend:
    """Pass every call on to another backend and keep what was said. Owns the recording.

    Its answers are the other's own; a streamed call is recorded as far as it was read. Listening costs little: what
    was heard becomes a `Recording` only when it is asked for.
    """

    def __init__(self, backend: Backend, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._backend = backend
        self._clock = clock
        self._started = clock()
        self._encoded: list[tuple[bool, tuple[TextPiece, ...], list[int]]] = []
        self._decoded: list[tuple[tuple[int, ...], str]] = []
        self._opened: list[tuple[tuple[tuple[str, str], ...], str, tuple[str, str]]] = []
        self._calls: list[_Heard] = []
        self._tool_form: ToolForm | None = None

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return self._backend.bos_ids

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._backend.eos_ids

    @property
    def transient_errors(self) -> tuple[type[Exception], ...]:
        return self._backend.transient_errors

    @property
    def has_token_ids(self) -> bool:
        return self._backend.has_token_ids

    @property
    def recording(self) -> Recording:
        """Give what was recorded so far; calls that still run are left out."""
        encoded = {(is_start, pieces): tuple(ids) for is_start, pieces, ids in self._encoded}
        opened = {(history, role): texts for history, role, texts in self._opened}
        return Recording(
            bos_ids=self.bos_ids,
            eos_ids=tuple(sorted(self.eos_ids)),
            encoded=tuple((is_start, pieces, ids) for (is_start, pieces), ids in encoded.items()),
            decoded=tuple(dict(self._decoded).items()),
            opened=tuple((history, role, *texts) for (history, role), texts in opened.items()),
            has_token_ids=self.has_token_ids,
            tool_form=self._tool_form,
            calls=tuple(self._recorded(call) for call in self._calls if call.ended is not None),
        )

    @property
    def tool_form(self) -> ToolForm | None:
        self._tool_form = self._backend.tool_form
        return self._tool_form

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool) -> list[int]:
        token_ids = self._backend.encode(pieces, is_start=is_start)
        self._encoded.append((is_start, tuple(pieces), list(token_ids)))
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._backend.decode(token_ids)
        self._decoded.append((tuple(token_ids), text))
        return text

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        texts = self._backend.open_role(history, role)
        self._opened.append((history_key(history), role, texts))
        return texts

    def open_scope(self) -> int | None:
        return self._backend.open_scope()

    def close_scope(self, scope_id: int) -> None:
        self._backend.close_scope(scope_id)

    async def settle_scopes(self) -> None:
        await self._backend.settle_scopes()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        call = self._heard(request)
        call.chunks, call.chunk_s = chunks, chunk_s = [], []
        try:
            async with aclosing(self._backend.stream(request)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    chunk_s.append(self._clock() - call.began)
                    yield chunk
        except BaseException as error:
            self._fail(call, error)
            raise
        finally:
            call.ended = self._clock()

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        call = self._heard(request)
        try:
            call.output = await self._backend.generate(request)
            return call.output
        except BaseException as error:
            self._fail(call, error)
            raise
        finally:
            call.ended = self._clock()

    async def score(
        self,
        prefix_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        label: str = "",
        scope_id: int | None = None,
    ) -> list[ScoredContinuation]:
        call = self._heard(GenerateRequest(tuple(prefix_ids), label=label))
        call.continuations = tuple(tuple(ids) for ids in continuations)
        try:
            scores = await self._backend.score(prefix_ids, continuations, label=label, scope_id=scope_id)
            call.scores = scores
            return scores
        except BaseException as error:
            self._fail(call, error)
            raise
        finally:
            call.ended = self._clock()

    def _heard(self, request: GenerateRequest) -> _Heard:
        call = _Heard(call_site.get(), request, self._clock())
        self._calls.append(call)
        return call

    def _fail(self, call: _Heard, error: BaseException) -> None:
        call.failure = recorded_error(error, self.transient_errors)

    def _recorded(self, call: _Heard) -> RecordedCall:
        assert call.ended is not None
        chunks, chunk_s = tuple(call.chunks), tuple(call.chunk_s)
        first_token_s = next((at for chunk, at in zip(chunks, chunk_s, strict=True) if chunk.token_ids), None)
        if call.output is not None:
            chunks, chunk_s = _chunks(call.output, call.ended - call.began)
            first_token_s = call.output.first_token_s
        return RecordedCall(
            site=call.site,
            request=call.request,
            continuations=call.continuations,
            chunks=chunks,
            chunk_s=chunk_s,
            scores=tuple(call.scores),
            started_s=call.began - self._started,
            seconds=call.ended - call.began,
            first_token_s=first_token_s,
            error=call.failure,
        )


def _chunks(output: GenerationOutput, seconds: float) -> tuple[tuple[OutputChunk, ...], tuple[float, ...]]:
    """Give an output that came as a whole as one chunk per sample. Pure."""
    last = len(output.samples) - 1
    chunks = tuple(
        OutputChunk(
            index,
            sample.text,
            sample.token_ids,
            sample.finish_reason,
            sample.logprobs,
            prompt_logprobs=output.prompt_logprobs if index == 0 else (),
            usage=output.usage if index == last else None,
            origin=sample.origin,
            queued_s=output.queued_s if index == last else None,
        )
        for index, sample in enumerate(output.samples)
    )
    return chunks, (seconds,) * len(chunks)


def recorded_error(error: BaseException, transient: tuple[type[Exception], ...]) -> RecordedError:
    """Describe an error as data. Pure."""
    kind = "CancelledError" if isinstance(error, GeneratorExit) else type(error).__name__
    parameter = error.parameter if isinstance(error, RequestError) else None
    return RecordedError(kind, escaped(str(error)), parameter, isinstance(error, transient))


def history_key(history: Sequence[Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    """Give a chat's messages as something that can be looked up. Pure."""
    return tuple((message["role"], message["content"]) for message in history)
