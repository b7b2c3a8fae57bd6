"""From a chat server's events to chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jsonschema

from frontend_lang.backends.chat_text import ChatText
from frontend_lang.backends.remote import RemoteError, error_of, told_by
from frontend_lang.backends.values import (
    FinishReason,
    GrammarSpec,
    OutputChunk,
    SamplingParams,
    TokenLogprob,
    Usage,
)

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


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

    def push(self, event: Mapping[str, Any]) -> Iterator[OutputChunk]:
        """Take an event and give its chunks.

        Raises:
            RemoteError: an error in mid-stream, a refusal, or an answer that breaks the protocol.
        """
        if event.get("error") is not None:
            told = told_by(event["error"])
            raise error_of(replace(told, message=f"the server broke off: {told.message}"))
        if (usage := event.get("usage")) is not None:
            self._usage = _usage(usage)
        for choice in event.get("choices") or ():
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

    def _chunk(self, choice: Mapping[str, Any]) -> Iterator[OutputChunk]:
        index, delta = choice.get("index", 0), choice.get("delta") or {}
        if not isinstance(index, int) or not 0 <= index < self._sampling.n:
            raise RemoteError(f"the server answered with sample {index!r} of {self._sampling.n}")
        if refusal := delta.get("refusal"):
            raise RemoteError(f"the model refused to answer: {refusal}")
        if (reason := choice.get("finish_reason")) is not None:
            if reason not in REASONS:
                raise RemoteError(f"the server ended sample {index} for the reason {reason!r}")
            self._reasons[index] = REASONS[reason]
        content = delta.get("content") or ""
        self._contents[index] += content
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._sampling.logprobs is not None:
            logprobs = tuple(self._logprobs(choice, is_needed=bool(content)))
            token_ids = tuple(entry.token_id for entry in logprobs)
        else:
            token_ids = tuple(map(ord, content))
        if content or token_ids:
            yield OutputChunk(index, content, token_ids, logprobs=logprobs)

    def _logprobs(self, choice: Mapping[str, Any], *, is_needed: bool) -> Iterator[TokenLogprob]:
        entries = (choice.get("logprobs") or {}).get("content")
        if entries is None:
            if is_needed:
                raise RemoteError("the server gave no logprobs, which the call asks for")
            return
        for entry in entries:
            top = tuple((self._token(other), float(other["logprob"])) for other in entry["top_logprobs"])
            yield TokenLogprob(self._token(entry), float(entry["logprob"]), top)

    def _token(self, entry: Mapping[str, Any]) -> int:
        token = entry.get("bytes")
        return self._text.token(entry["token"].encode() if token is None else bytes(token))


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


def _usage(usage: Mapping[str, Any]) -> Usage:
    """Give the server's counts; what it does not tell counts as 0. Pure."""
    num_prompt, num_output = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    num_cached = min(int(details.get("cached_tokens") or 0), num_prompt)
    return Usage(
        prompt_tokens=num_prompt,
        cached_tokens=num_cached,
        computed_tokens=num_prompt - num_cached + num_output,
        output_tokens=num_output,
    )
