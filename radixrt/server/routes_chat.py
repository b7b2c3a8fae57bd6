"""/v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixrt.explain import PrefixReport
from radixrt.server.answers import (
    answer_id,
    chat_logprob,
    details_json,
    dump,
    json_response,
    usage_json,
    usage_notes,
)
from radixrt.server.bodies_chat import ChatBody
from radixrt.server.chat import AnswerReader, ChatPlan, plan_chat
from radixrt.server.details import reports
from radixrt.server.documents import documented
from radixrt.server.gate import Visit
from radixrt.server.running import until_disconnect
from radixrt.server.service import Service, arrival
from radixrt.server.streaming import EventStream, event, stream_events
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import GenerationOutput, OutputChunk, Sample, Usage

router = APIRouter()


@router.post("/v1/chat/completions", **documented(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    service, visit = arrival(request)
    body = await service.body(request, ChatBody)
    return await until_disconnect(request.receive, _answer(service, visit, body))


async def _answer(service: Service, visit: Visit, body: ChatBody) -> Response:
    plan = await plan_chat(service, visit, body)
    found = await reports(service, body, [plan.request])
    batch = await service.start(visit, [plan.request], constraint=plan.constraint)
    if body.stream:
        writer = _ChunkWriter(service, body, plan, found)
        return EventStream(stream_events(batch, visit, writer), batch)
    [output] = await batch.outputs()
    visit.notes.update(usage_notes(output.usage))
    return json_response(_completion(service, plan, output, found))


def _completion(
    service: Service, plan: ChatPlan, output: GenerationOutput, found: list[PrefixReport]
) -> dict[str, Any]:
    answer = {
        "id": answer_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": service.model_name,
        "choices": [
            _choice(service.engine.tokenizer, plan, index, sample)
            for index, sample in enumerate(output.samples)
        ],
        "usage": usage_json(output.usage),
    }
    if found:
        answer["radixrt"] = _details(plan, output.usage, found)
    return answer


def _details(plan: ChatPlan, usage: Usage, found: list[PrefixReport]) -> dict[str, Any]:
    details = details_json(usage, found)
    if plan.tools is not None and plan.tools.loose_names:
        details["loose_tools"] = list(plan.tools.loose_names)
    return details


def _choice(tokenizer: Tokenizer, plan: ChatPlan, index: int, sample: Sample) -> dict[str, Any]:
    reader = plan.reader()
    reader.push(sample.text)
    reader.finish()
    logprobs = None
    if plan.request.sampling.logprobs is not None:
        content = [chat_logprob(tokenizer, entry) for entry in sample.logprobs]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": index,
        "message": reader.message(),
        "logprobs": logprobs,
        "finish_reason": reader.finish_name(sample.finish_reason),
    }


class _ChunkWriter:
    """Write a chat's chunks as events: the role once, usage on the last one only."""

    def __init__(self, service: Service, body: ChatBody, plan: ChatPlan, found: list[PrefixReport]) -> None:
        num_samples = plan.request.sampling.n
        self._tokenizer = service.engine.tokenizer
        self._found = found
        self._plan = plan
        self._has_logprobs = plan.request.sampling.logprobs is not None
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._readers: list[AnswerReader] = [plan.reader() for _ in range(num_samples)]
        head = {
            "id": answer_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._head = dump(head)[:-1]
        self._tail = ',"usage":null}' if self._has_usage else "}"

    def begin(self) -> list[bytes]:
        """Give each sample's first chunk."""
        first = {"role": "assistant", "content": ""}
        return [self._chunk(index, first, None, None) for index in range(len(self._readers))]

    def write(self, _request_index: int, chunk: OutputChunk) -> list[bytes]:
        """Give the events of one chunk of the engine."""
        index = chunk.sample_index
        reader = self._readers[index]
        deltas = reader.push(chunk.text)
        if chunk.finish_reason is not None:
            deltas += reader.finish()
        logprobs = None
        if self._has_logprobs and chunk.logprobs:
            content = [chat_logprob(self._tokenizer, entry) for entry in chunk.logprobs]
            logprobs = {"content": content, "refusal": None}
            deltas = deltas or [{"content": ""}]
        events = []
        for delta in deltas:
            events.append(self._chunk(index, delta, logprobs, None))
            logprobs = None  # told once
        if chunk.finish_reason is not None:
            events.append(self._chunk(index, {}, None, reader.finish_name(chunk.finish_reason)))
        return events

    def end(self, usage: Usage) -> list[bytes]:
        """Give the chunk after the last choice."""
        if not self._has_usage and not self._found:
            return []
        body: dict[str, Any] = {"choices": [], "usage": usage_json(usage) if self._has_usage else None}
        if self._found:
            body["radixrt"] = _details(self._plan, usage, self._found)
        return [event(f"{self._head},{dump(body)[1:]}")]

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> bytes:
        # Member by member: text is quoted at once, an object or a null takes an encoder of its own, which costs 2 to 4 us.
        members = ",".join([f"{dump(name)}:{dump(value)}" for name, value in delta.items()])
        told = "null" if logprobs is None else dump(logprobs)
        end = "null" if reason is None else dump(reason)
        choice = f'{{"index":{index},"delta":{{{members}}},"logprobs":{told},"finish_reason":{end}}}'
        return event(f'{self._head},"choices":[{choice}]{self._tail}')
