"""From a chat server's events to chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import jsonschema
from pydantic import BaseModel, Field, NonNegativeInt, StrictInt, ValidationError

from frontend_lang.backends.chat_text import ChatText
from frontend_lang.backends.remote import RemoteError, error_of, told_by
from frontend_lang.backends.unicode import is_unicode
from frontend_lang.backends.values import (
    FinishReason,
    GrammarSpec,
    OutputChunk,
    SamplingParams,
    TokenLogprob,
    Usage,
)

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class _Delta(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Token(BaseModel):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None = None


class _RankedToken(_Token):
    top_logprobs: list[_Token] = []


class _Logprobs(BaseModel):
    content: list[_RankedToken] | None = None


class _Choice(BaseModel):
    index: StrictInt = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _CachedTokens(BaseModel):
    cached_tokens: NonNegativeInt | None = None


class _Usage(BaseModel):
    prompt_tokens: NonNegativeInt | None = None
    completion_tokens: NonNegativeInt | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Event(BaseModel):
    """What of a chat completion's event is read; everything else may be there."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None


class ChatAnswer:
    """Turn the events of one streamed completion into chunks. Owns what is known of each sample so far.

    A sample's last chunk waits until all have come: the usage, which the last of all must carry, is told after it.
    """

    def __init__(self, sampling: SamplingParams, text: ChatText) -> None:
        self._sampling = sampling
        self._text = text
        self._contents = [""] * sampling.n
        self._reasons: list[FinishReason | None] = [None] * sampling.n
        self._usage = Usage()

    def push(self, told: Mapping[str, Any]) -> Iterator[OutputChunk]:
        """Take an event and give its chunks.

        Raises:
            RemoteError: an error in mid-stream, a refusal, or an answer that breaks the protocol.
        """
        if told.get("error") is not None:
            error = told_by(told["error"])
            raise error_of(replace(error, message=f"the server broke off: {error.message}"))
        try:
            event = _Event.model_validate(told)
        except ValidationError as error:
            first = error.errors()[0]
            where = "/".join(str(part) for part in first["loc"])
            raise RemoteError(
                f"the server sent an event that is no part of a chat completion: {where}: {first['msg']}"
            ) from error
        if event.usage is not None:
            self._usage = _usage(event.usage)
        for choice in event.choices or ():
            yield from self._chunk(choice)

    def finish(self) -> Iterator[OutputChunk]:
        """Give each sample's last chunk, the last of all with the usage.

        Raises:
            RemoteError: a sample has no end, or breaks its constraint.
        """
        for index, reason in enumerate(self._reasons):
            if reason is None:
                raise RemoteError(f"the server gave no end of sample {index}")
            if reason is FinishReason.STOP and self._sampling.grammar is not None:
                check_constraint(self._sampling.grammar, self._contents[index])
            is_last = index == len(self._reasons) - 1
            yield OutputChunk(index, "", (), reason, usage=self._usage if is_last else None)

    def _chunk(self, choice: _Choice) -> Iterator[OutputChunk]:
        index, delta = choice.index, choice.delta or _Delta()
        if not 0 <= index < self._sampling.n:
            raise RemoteError(f"the server answered with sample {index!r} of {self._sampling.n}")
        if delta.refusal:
            raise RemoteError(f"the model refused to answer: {delta.refusal}")
        content = delta.content or ""
        if not is_unicode(content):
            raise RemoteError(f"the server sent text that is no Unicode: {content[:40]!r}")
        if content and self._reasons[index] is not None:
            raise RemoteError(f"the server sent more text of sample {index} after its end")
        if (reason := choice.finish_reason) is not None:
            if reason not in REASONS:
                raise RemoteError(f"the server ended sample {index} for the reason {reason!r}")
            if self._reasons[index] not in (None, REASONS[reason]):
                raise RemoteError(f"the server ended sample {index} for two reasons")
            self._reasons[index] = REASONS[reason]
        self._contents[index] += content
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._sampling.logprobs is not None:
            logprobs = tuple(self._logprobs(choice, is_needed=bool(content)))
            token_ids = tuple(entry.token_id for entry in logprobs)
        else:
            token_ids = tuple(map(ord, content))
        if content or token_ids:
            yield OutputChunk(index, content, token_ids, logprobs=logprobs)

    def _logprobs(self, choice: _Choice, *, is_needed: bool) -> Iterator[TokenLogprob]:
        entries = None if choice.logprobs is None else choice.logprobs.content
        if entries is None:
            if is_needed:
                raise RemoteError("the server gave no logprobs, which the call asks for")
            return
        for entry in entries:
            top = tuple((self._token(other), other.logprob) for other in entry.top_logprobs)
            yield TokenLogprob(self._token(entry), entry.logprob, top)

    def _token(self, entry: _Token) -> int:
        return self._text.token(entry.token.encode() if entry.bytes is None else bytes(entry.bytes))


def check_constraint(grammar: GrammarSpec, text: str) -> None:
    """Raise RemoteError when a finished text breaks a constraint that a server was asked to keep.

    JSON and choices are checked; for a regex or a Lark grammar the server's word is taken.
    """
    if grammar.kind == "choice" and text not in json.loads(grammar.text):
        raise RemoteError(f"the server did not keep to the choices: {text[:80]!r}")
    if grammar.kind in ("json_schema", "json_object"):
        try:
            value = json.loads(text)
            if grammar.kind == "json_schema":
                jsonschema.validate(value, json.loads(grammar.text))
        except (ValueError, jsonschema.ValidationError) as error:
            why = error.message if isinstance(error, jsonschema.ValidationError) else error
            raise RemoteError(f"the server did not keep to the schema: {why}") from error


def _usage(told: _Usage) -> Usage:
    """Give the server's counts; what it does not tell counts as 0. Pure."""
    num_prompt, num_output = told.prompt_tokens or 0, told.completion_tokens or 0
    num_cached = 0 if told.prompt_tokens_details is None else told.prompt_tokens_details.cached_tokens or 0
    num_cached = min(num_cached, num_prompt)
    return Usage(
        prompt_tokens=num_prompt,
        cached_tokens=num_cached,
        computed_tokens=num_prompt - num_cached + num_output,
        output_tokens=num_output,
    )
