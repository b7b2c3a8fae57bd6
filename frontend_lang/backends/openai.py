"""A program's calls on any server that speaks the OpenAI chat protocol. What it cannot do is refused, never dropped.

| of a program | becomes |
|---|---|
| system, user, assistant, role | messages; `gen` must be alone in an assistant message, with text before it in others |
| gen | POST /chat/completions, streamed |
| schema, json | response_format; the answer is checked again here |
| regex, choices, grammar (Lark) | structured_outputs, with `extensions` only |
| top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos | the same, with `extensions` only |
| stop, n, seed, logprobs, penalties, logit_bias, temperature, top_p, max_tokens | the same |
| select, token ids, control text, text outside of messages | refused |

What stands for token ids in the records of its calls are private numbers (chat_text.py); usage counts are the server's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from types import TracebackType
from typing import Any, Literal, Self

from frontend_lang.backends.chat_answer import ChatAnswer
from frontend_lang.backends.chat_text import SUFFIX, ChatText, Message, prefix
from frontend_lang.backends.gathering import collected
from frontend_lang.backends.protocol import ScoredContinuation
from frontend_lang.backends.remote import Remote, RemoteUnavailable, event_of, within
from frontend_lang.backends.values import (
    GenerateRequest,
    GenerationOutput,
    GrammarSpec,
    InvalidRequest,
    OutputChunk,
    SamplingParams,
    TextPiece,
    ToolForm,
)

# Sampling options that have a place in the protocol.
PLAIN = (
    "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "n", "seed", "stop", "logit_bias",
    "logprobs", "grammar",
)  # fmt: skip
# Sampling options that servers of this kind know beyond the protocol, under the same names.
EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")
STRUCTURED = {"regex": "regex", "choice": "choice", "lark": "grammar"}
# Of a request: what has a meaning here, or none for anybody's answer.
UNDERSTOOD = ("prompt_ids", "sampling", "label", "scope_id", "timeout_s")


class OpenAIBackend:
    """Run a program's calls on a chat server. `async with backend:` keeps connections between calls.

    Args:
        url: up to and with /v1.
        model: its name there.
        api_key: sent as a bearer token.
        extensions: the server takes the fields of EXTENSIONS, `structured_outputs` and `continue_final_message`, as
            vLLM and radixrt do; without it a call that needs one is refused.
        token_limit: the field that max_tokens goes into; some models of OpenAI know the second only.
        timeout_s, max_retries: see Remote; after 408, 409, 425, 429 and 5xx, as the server's retry-after asks.
    """

    has_token_ids = False
    transient_errors: tuple[type[Exception], ...] = (RemoteUnavailable,)

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        extensions: bool = False,
        token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        timeout_s: float | None = 600.0,
        max_retries: int = 2,
        remote: Remote | None = None,
    ) -> None:
        if token_limit not in ("max_tokens", "max_completion_tokens"):
            raise InvalidRequest(
                f'token_limit must be "max_tokens" or "max_completion_tokens", got {token_limit!r}',
                parameter="token_limit",
                value=token_limit,
            )
        self._remote = remote or Remote(url, api_key=api_key, timeout_s=timeout_s, max_retries=max_retries)
        self._model = model
        self._extensions = extensions
        self._token_limit = token_limit
        self._text = ChatText()

    @property
    def bos_ids(self) -> tuple[int, ...]:
        return ()

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset()

    async def __aenter__(self) -> Self:
        await self._remote.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._remote.__aexit__(kind, error, trace)

    @property
    def tool_form(self) -> ToolForm | None:
        return None

    def encode(self, pieces: Sequence[TextPiece], *, is_start: bool) -> list[int]:
        return self._text.encode(pieces)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._text.decode(token_ids)

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]:
        return prefix(role), SUFFIX

    def open_scope(self) -> int | None:
        return None

    def close_scope(self, scope_id: int) -> None:
        """Do nothing: there are no scopes here."""

    async def settle_scopes(self) -> None:
        """Do nothing: there are no scopes here."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        body = self.body(request)
        answer = ChatAnswer(request.sampling, self._text)
        async with aclosing(self._remote.events("/chat/completions", body)) as events:
            async for data in within(request.timeout_s, events):
                if data.strip() == "[DONE]":
                    break
                for chunk in answer.push(event_of(data)):
                    yield chunk
            else:
                raise RemoteUnavailable("the server ended the answer before it was whole")
        for chunk in answer.finish():
            yield chunk

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
        raise InvalidRequest(
            "a chat server does not tell how likely a given text is, which select and decide need; "
            "gen(choices=...) is the nearest it can do (with extensions=True)",
            parameter="select",
        )

    def body(self, request: GenerateRequest) -> dict[str, Any]:
        """Give the JSON body of a request. Pure.

        Raises:
            InvalidRequest: something in the request has no place there.
        """
        for item in fields(request):
            if item.name not in UNDERSTOOD and getattr(request, item.name) != item.default:
                raise self._refused(item.name, getattr(request, item.name))
        messages, further = self._messages(request.prompt_ids)
        return {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **further,
            **self._sampling(request.sampling),
            **({} if request.sampling.grammar is None else self._constraint(request.sampling.grammar)),
        }

    def _messages(self, token_ids: Sequence[int]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        messages = self._text.messages(token_ids)
        last = messages[-1] if messages else Message("", "")
        if not (last.is_open and last.role == "assistant"):
            raise InvalidRequest(
                "a chat server writes assistant messages only: put the gen into assistant(...)",
                parameter="prompt",
                value=last.role,
            )
        further: dict[str, Any] = {}
        if last.content:
            if not self._extensions:
                raise InvalidRequest(
                    f"a chat server cannot go on after text in an open assistant message ({last.content[-40:]!r}): "
                    "put the text into the user message, or give extensions=True if the server takes "
                    "continue_final_message",
                    parameter="prompt",
                    value=last.content,
                )
            further = {"continue_final_message": True, "add_generation_prompt": False}
        else:
            messages.pop()
        if not messages:
            raise InvalidRequest(
                "a chat server needs a message before the assistant's", parameter="prompt", value=""
            )
        return [{"role": message.role, "content": message.content} for message in messages], further

    def _sampling(self, sampling: SamplingParams) -> dict[str, Any]:
        default = SamplingParams()
        body: dict[str, Any] = {
            self._token_limit: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        for name in ("presence_penalty", "frequency_penalty", "n", "seed"):
            if getattr(sampling, name) != getattr(default, name):
                body[name] = getattr(sampling, name)
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
        if sampling.logprobs is not None:
            body.update(logprobs=True, top_logprobs=sampling.logprobs)
        for item in fields(sampling):  # also those that come to be known later
            name = item.name
            if name not in PLAIN and (value := getattr(sampling, name)) != getattr(default, name):
                if name not in EXTENSIONS or not self._extensions:
                    raise self._refused(name, value)
                body[name] = list(value) if isinstance(value, tuple) else value
        return body

    def _constraint(self, grammar: GrammarSpec) -> dict[str, Any]:
        match grammar.kind:
            case "json_schema":
                schema = {"name": "value", "schema": json.loads(grammar.text), "strict": True}
                return {"response_format": {"type": "json_schema", "json_schema": schema}}
            case "json_object":
                return {"response_format": {"type": "json_object"}}
        if not self._extensions or grammar.kind not in STRUCTURED:
            raise self._refused(grammar.kind.value, grammar.text)
        value = json.loads(grammar.text) if grammar.kind == "choice" else grammar.text
        return {"structured_outputs": {STRUCTURED[grammar.kind]: value}}

    def _refused(self, name: str, value: object) -> InvalidRequest:
        known = name in EXTENSIONS or name in STRUCTURED
        hint = "; give extensions=True if this server takes it" if known else ""
        if name == "logprob_token_ids":
            hint = ", and decide needs it"
        return InvalidRequest(f"{name} is not part of the chat protocol{hint}", parameter=name, value=value)
