"""/v1/completions: prompts as text or token ids, batches, echo, logprobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixrt.asking import check_ids
from radixrt.errors import InvalidRequest
from radixrt.explain import PrefixReport
from radixrt.server.answers import (
    answer_id,
    details_json,
    dump,
    finish_name,
    json_response,
    token_name,
    total,
    usage_json,
    usage_notes,
)
from radixrt.server.bodies_completions import CompletionBody
from radixrt.server.constraints import Constraint, constraint_of
from radixrt.server.details import reports
from radixrt.server.documents import documented
from radixrt.server.gate import Visit
from radixrt.server.running import until_disconnect
from radixrt.server.sampling import sampling_of
from radixrt.server.service import Service, arrival
from radixrt.server.streaming import EventStream, event, stream_events
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import GenerateRequest, GenerationOutput, OutputChunk, Sample, TokenLogprob, Usage

router = APIRouter()
DEFAULT_MAX_TOKENS = 16  # as OpenAI's
MAX_SEQUENCES = 4096  # prompts times n
Logprobs = dict[str, list[Any]]


@router.post("/v1/completions", **documented(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue prompts."""
    service, visit = arrival(request)
    body = await service.body(request, CompletionBody)
    return await until_disconnect(request.receive, _answer(service, visit, body))


@dataclass(frozen=True, slots=True)
class _Plan:
    requests: list[GenerateRequest]
    constraint: Constraint | None
    has_echo: bool
    has_output: bool  # False: max_tokens was 0, the engine's one token is dropped
    num_logprobs: int | None


async def _answer(service: Service, visit: Visit, body: CompletionBody) -> Response:
    plan = await _plan(service, visit, body)
    found = await reports(service, body, plan.requests)
    batch = await service.start(visit, plan.requests, constraint=plan.constraint)
    if body.stream:
        return EventStream(stream_events(batch, visit, _ChunkWriter(service, body, plan, found)), batch)
    outputs = await batch.outputs()
    usage = _counted(plan, total(output.usage for output in outputs))
    visit.notes.update(usage_notes(usage))
    if plan.num_logprobs is None and not plan.has_echo:
        return _whole(service, plan, outputs, usage, found)
    # An entry for each token, or the prompt once more for each sample: that may be 100 MB.
    return await service.in_thread(lambda: _whole(service, plan, outputs, usage, found))


async def _plan(service: Service, visit: Visit, body: CompletionBody) -> _Plan:
    service.check_model(body.model)
    constraint = constraint_of(body)
    has_echo = bool(body.echo)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    has_output = not (has_echo and max_tokens == 0)
    if has_echo and body.stream:
        raise InvalidRequest("echo cannot be streamed", parameter="echo")
    sampling = sampling_of(
        body,
        max_tokens=max_tokens if has_output else 1,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if has_echo else None,
        grammar=None if constraint is None else constraint.spec,
    )
    prompts = await service.on_text(visit, lambda: _encoded(service, body))
    if len(prompts) * sampling.n > MAX_SEQUENCES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_SEQUENCES}", parameter="n")
    terms = service.terms(visit, body)
    return _Plan(
        [terms.request(prompt_ids, sampling) for prompt_ids in prompts],
        constraint,
        has_echo,
        has_output,
        body.logprobs,
    )


def _encoded(service: Service, body: CompletionBody) -> list[list[int]]:
    """Give the prompts as ids. Takes the texts' length of time."""
    tokenizer, num_ids = service.engine.tokenizer, service.engine.config.num_token_ids
    given = body.prompt
    prompts: list[Any] = (
        [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    )
    if not 1 <= len(prompts) <= service.config.max_prompts:
        raise InvalidRequest(
            f"prompt must hold 1 to {service.config.max_prompts} prompts, got {len(prompts)}",
            parameter="prompt",
        )
    encoded: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            check_ids("prompt", prompt, num_ids)
        if not prompt:
            raise InvalidRequest("a prompt must have at least one token", parameter="prompt")
        encoded.append(prompt)
    return encoded


def _counted(plan: _Plan, usage: Usage) -> Usage:
    """Give the usage without the one token that was not asked for."""
    if plan.has_output:
        return usage
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.forced_tokens, 0)


def _whole(
    service: Service,
    plan: _Plan,
    outputs: list[GenerationOutput],
    usage: Usage,
    found: list[PrefixReport],
) -> Response:
    """Give the answer that is not streamed. Takes its length of time."""
    answer = {
        "id": answer_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model_name,
        "choices": [
            choice
            for index, output in enumerate(outputs)
            for choice in _choices(service.engine.tokenizer, plan, index, output)
        ],
        "usage": usage_json(usage),
    }
    if found:
        answer["radixrt"] = details_json(usage, found)
    return json_response(answer)


def _choices(
    tokenizer: Tokenizer, plan: _Plan, index: int, output: GenerationOutput
) -> Iterator[dict[str, Any]]:
    echoed = tokenizer.decode(output.prompt_ids) if plan.has_echo else ""
    for sample_index, sample in enumerate(output.samples):
        yield {
            "index": index * len(output.samples) + sample_index,
            "text": echoed + (sample.text if plan.has_output else ""),
            "logprobs": None if plan.num_logprobs is None else _logprobs(tokenizer, plan, output, sample),
            "finish_reason": finish_name(sample.finish_reason) if plan.has_output else "length",
        }


def _logprobs(tokenizer: Tokenizer, plan: _Plan, output: GenerationOutput, sample: Sample) -> Logprobs:
    """Give the table of logprobs; the first token of an echoed prompt has none."""
    table: Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    offset = 0
    if plan.has_echo:
        first = output.prompt_ids[0]
        table["tokens"].append(token_name(tokenizer, first))
        table["token_logprobs"].append(None)
        table["top_logprobs"].append(None)
        table["text_offset"].append(0)
        offset = len(tokenizer.decode([first]))
        offset = _extend(table, tokenizer, output.prompt_logprobs, offset)
    if plan.has_output:
        _extend(table, tokenizer, sample.logprobs, offset)
    return table


def _extend(table: Logprobs, tokenizer: Tokenizer, entries: tuple[TokenLogprob, ...], offset: int) -> int:
    """Add rows to the table; give the offset after them. Tokens that are a part of a character have no width."""
    for entry in entries:
        table["tokens"].append(token_name(tokenizer, entry.token_id))
        table["token_logprobs"].append(entry.logprob)
        top = {token_name(tokenizer, token_id): value for token_id, value in reversed(entry.top)}
        top[token_name(tokenizer, entry.token_id)] = entry.logprob
        table["top_logprobs"].append(top)
        table["text_offset"].append(offset)
        raw = tokenizer.vocab_bytes[entry.token_id]
        offset += len(raw.decode("utf-8", "ignore"))
    return offset


class _ChunkWriter:
    """Write completions as events."""

    def __init__(
        self, service: Service, body: CompletionBody, plan: _Plan, found: list[PrefixReport]
    ) -> None:
        self._tokenizer = service.engine.tokenizer
        self._found = found
        self._plan = plan
        self._num_samples = plan.requests[0].sampling.n
        self._offsets: dict[int, int] = {}
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        head = {
            "id": answer_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._head = dump(head)[:-1]
        self._tail = ',"usage":null}' if self._has_usage else "}"

    def begin(self) -> list[bytes]:
        """Give nothing: completions begin with their text."""
        return []

    def write(self, request_index: int, chunk: OutputChunk) -> list[bytes]:
        """Give the event of one chunk, none if it says nothing."""
        place = request_index * self._num_samples + chunk.sample_index
        logprobs: Logprobs | None = None
        if self._plan.num_logprobs is not None:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            offset = self._offsets.get(place, 0)
            self._offsets[place] = _extend(logprobs, self._tokenizer, chunk.logprobs, offset)
        if not (chunk.text or chunk.finish_reason or (logprobs and logprobs["tokens"])):
            return []
        choice = {
            "index": place,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": None if chunk.finish_reason is None else finish_name(chunk.finish_reason),
        }
        return [event(f'{self._head},"choices":[{dump(choice)}]{self._tail}')]

    def end(self, usage: Usage) -> list[bytes]:
        """Give the chunk after the last choice."""
        if not self._has_usage and not self._found:
            return []
        body: dict[str, Any] = {"choices": [], "usage": usage_json(usage) if self._has_usage else None}
        if self._found:
            body["radixrt"] = details_json(usage, self._found)
        return [event(f"{self._head},{dump(body)[1:]}")]
