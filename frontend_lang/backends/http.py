"""A program's calls on a radixrt server, token for token: ids go out and ids come back.

Text becomes ids here, by the model's own tokenizer, because a program encodes without waiting. `HttpBackend.connect`
asks the server for it; one that is given must be the same, which is asked before the first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Protocol, Self

from pydantic import TypeAdapter, ValidationError

from frontend_lang.backends.gathering import collected, scored
from frontend_lang.backends.local_text import (
    FormChoice,
    LocalText,
    RuntimeTokenizer,
    tokenizer_of,
    tool_format_of,
)
from frontend_lang.backends.protocol import ScoredContinuation
from frontend_lang.backends.remote import (
    Remote,
    RemoteError,
    RemoteUnavailable,
    error_of,
    event_of,
    told_by,
    within,
)
from frontend_lang.backends.remote_scopes import TTL_S, RemoteScopes
from frontend_lang.backends.values import (
    GenerateRequest,
    GenerationOutput,
    GrammarSpec,
    InvalidRequest,
    OutputChunk,
    RadixrtError,
    SamplingParams,
    TextPiece,
    ToolForm,
)
from frontend_lang.waiting import block_on

_CHUNK = TypeAdapter(OutputChunk)
_DEFAULT = SamplingParams()
SETTLE_S = 2.0  # longest wait of a run's end for the server to close scopes


class NamedTokenizer(RuntimeTokenizer, Protocol):
    """A tokenizer that can be compared with another one."""

    @property
    def fingerprint(self) -> str:
        """Give a text that equal tokenizers share."""


class HttpBackend:
    """Run a program's calls on a radixrt server. `async with backend:` keeps connections between calls.

    Owns the scopes that programs opened there. They are closed with the run; of a process that dies they run out.

    Args:
        url: where the server is, without a path.
        tokenizer: of the model that runs there.
        api_key: sent as a bearer token.
        timeout_s, max_retries: see Remote.
        tool_format: the form of tool calls that the server was told to use; "auto" = what the model's template writes.
    """

    has_token_ids = True
    transient_errors: tuple[type[Exception], ...] = (RemoteUnavailable,)

    def __init__(
        self,
        url: str,
        tokenizer: NamedTokenizer,
        *,
        api_key: str | None = None,
        timeout_s: float | None = 600.0,
        max_retries: int = 2,
        remote: Remote | None = None,
        tool_format: FormChoice = "auto",
    ) -> None:
        self._remote = remote or Remote(url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries)
        self._text = LocalText(tokenizer, tool_format=tool_format)
        self._fingerprint = tokenizer.fingerprint
        self._is_checked = False
        self._scopes = RemoteScopes()

    @classmethod
    def connect(
        cls, url: str, *, api_key: str | None = None, timeout_s: float | None = 600.0, max_retries: int = 2
    ) -> HttpBackend:
        """Ask a server for its model's tokenizer and give a backend with it. Waits for the server.

        Raises:
            RemoteError, RemoteUnavailable: there is none, or no radixrt server.
        """
        remote = Remote(url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries)
        told = block_on(lambda: remote.get("/tokenizer"))
        try:
            tokenizer, tool_format = tokenizer_of(told), tool_format_of(told)
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteError(
                f"{remote.url}/tokenizer is not what a radixrt server tells: {error!r}"
            ) from error
        return cls(url, tokenizer, remote=remote, tool_format=tool_format)

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return self._text.bos_ids

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._text.eos_ids

    async def __aenter__(self) -> Self:
        await self._remote.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._remote.__aexit__(kind, error, trace)

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
        return self._scopes.open()

    def close_scope(self, scope_id: int) -> None:
        self._scopes.close(scope_id)

    async def settle_scopes(self) -> None:
        while names := self._scopes.take_closed():
            try:
                async with asyncio.timeout(SETTLE_S):
                    await self._remote.post("/scopes/close", {"scopes": names})
            except (RadixrtError, TimeoutError):  # it is gone or too busy: they run out there by themselves
                return

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        await self._check()
        is_whole = False
        body = body_of(request, self._scopes)
        async with aclosing(self._remote.events("/generate", body)) as events:
            async for data in within(request.timeout_s, events):
                if data.strip() == "[DONE]":
                    break
                if (chunk := _chunk(event_of(data))) is not None:
                    is_whole = chunk.usage is not None
                    yield chunk
        if not is_whole:
            raise RemoteUnavailable("the server ended the answer before it was whole")

    async def generate(self, request: GenerateRequest) -> GenerationOutput:
        return await collected(request, self.stream(request))

    async def score(
        self,
        prefix_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        label: str = "",
        scope_id: int | None = None,
    ) -> list[ScoredContinuation]:
        return await scored(prefix_ids, continuations, self.generate, label=label, scope_id=scope_id)

    async def _check(self) -> None:
        """Make sure, once, that ids mean the same on both sides.

        Raises:
            InvalidRequest: they do not.
        """
        if self._is_checked:
            return
        info = await self._remote.get("/tokenizer_info")
        theirs = info.get("fingerprint") if isinstance(info, Mapping) else None
        if theirs is None:
            raise RemoteError(
                f"{self._remote.url} does not tell its tokenizer's fingerprint: no radixrt server"
            )
        if theirs != self._fingerprint:
            raise InvalidRequest(
                f"the model at {self._remote.url} has another tokenizer than the one given here",
                parameter="tokenizer",
                value=theirs,
            )
        self._is_checked = True


def body_of(request: GenerateRequest, scopes: RemoteScopes) -> dict[str, Any]:
    """Give the JSON body of a request; what is not in it has SamplingParams' default there too.

    Changes: the scopes that are told in it are known to the server.
    Raises:
        InvalidRequest: the request names an adapter or a salt, which a server gives out by itself.
    """
    if request.namespace != GenerateRequest((0,)).namespace:
        raise InvalidRequest(
            "a server chooses the namespace of its cache itself",
            parameter="namespace",
            value=request.namespace,
        )
    sampling = request.sampling
    given = _changed(sampling, _DEFAULT)
    if sampling.logit_bias:
        given["logit_bias"] = {str(token_id): float(bias) for token_id, bias in sampling.logit_bias.items()}
    if sampling.grammar is not None:
        kind, text = sampling.grammar.kind, sampling.grammar.text
        changed = _changed(sampling.grammar, GrammarSpec(kind, text))
        given["grammar"] = {"kind": kind.value, "text": text, **changed}
    own: dict[str, Any] = {"latency_class": request.latency_class}
    if request.label:
        own["label"] = request.label[:512]
    if request.timeout_s is not None:
        own["timeout_s"] = float(request.timeout_s)
    if request.scope_id is not None:
        given |= {"scope": scopes.name(request.scope_id), "scope_ttl_s": TTL_S}
    if closed := scopes.take_closed():
        given["closed_scopes"] = closed
    return {
        **given,
        "prompt_ids": list(request.prompt_ids),
        "logprob_start": request.logprob_start,
        "stream": True,
        "radixrt": own,
        **({"priority": request.priority} if request.priority else {}),
    }


def _changed(options: SamplingParams | GrammarSpec, default: SamplingParams | GrammarSpec) -> dict[str, Any]:
    """Give the fields that are not as in the default, so that a server need not know the others. Pure."""
    names = [item.name for item in fields(options)]
    return {
        name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)
    }


def _chunk(event: Mapping[str, Any]) -> OutputChunk | None:
    """Give an event's chunk; None for the first event, which names the answer."""
    if event.get("error") is not None:
        told = told_by(event["error"])
        raise error_of(replace(told, message=f"the server broke off: {told.message}"))
    if "sample_index" not in event:
        return None
    try:
        return _CHUNK.validate_python(event)
    except ValidationError as error:
        raise RemoteError(f"the server sent a chunk that is none: {error.errors()[0]['msg']}") from error
