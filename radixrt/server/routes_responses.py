"""/v1/responses, without memory."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixrt.errors import RequestError
from radixrt.explain import PrefixReport
from radixrt.server.answers import chat_logprob, details_json, dump, finish_name, json_response, usage_notes
from radixrt.server.bodies_responses import ResponsesBody
from radixrt.server.chat import ChatPlan, plan_chat
from radixrt.server.details import reports
from radixrt.server.documents import documented
from radixrt.server.gate import Visit, note_failure
from radixrt.server.responses import (
    Event,
    ItemBuilder,
    chat_body,
    check_stateless,
    renamed,
    response_head,
    response_usage,
)
from radixrt.server.running import Batch, until_disconnect
from radixrt.server.service import Service, arrival
from radixrt.server.streaming import EventStream, event
from radixrt.types import FinishReason, OutputChunk, Usage

router = APIRouter()


@router.post("/v1/responses", **documented(ResponsesBody))
async def responses(request: Request) -> Response:
    """Answer an input."""
    service, visit = arrival(request)
    body = await service.body(request, ResponsesBody)
    return await until_disconnect(request.receive, _answer(service, visit, body))


async def _answer(service: Service, visit: Visit, body: ResponsesBody) -> Response:
    check_stateless(body)
    chat, origins = chat_body(body)
    try:
        plan = await plan_chat(service, visit, chat)
        found = await reports(service, chat, [plan.request])
        batch = await service.start(visit, [plan.request], constraint=plan.constraint)
    except RequestError as error:
        raise renamed(error, origins) from None
    writer = _Writer(service, body, plan, found)
    if body.stream:
        return EventStream(_events(batch, visit, writer), batch)
    [output] = await batch.outputs()
    [sample] = output.samples
    visit.notes.update(usage_notes(output.usage))
    writer.take(OutputChunk(0, sample.text, sample.token_ids, sample.finish_reason, sample.logprobs))
    return json_response(writer.response(output.usage))


class _Writer:
    """Follow one response from its chunks; numbers its events."""

    def __init__(
        self, service: Service, body: ResponsesBody, plan: ChatPlan, found: list[PrefixReport]
    ) -> None:
        self._tokenizer = service.engine.tokenizer
        self._found = found
        self._plan = plan
        self._reader = plan.reader()
        self._builder = ItemBuilder()
        self._head = response_head(service, body)
        self._reason: FinishReason | None = None
        self._number = 0

    def begin(self) -> bytes:
        """Give the first events."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._numbered({"type": kind, "response": self._head}) for kind in kinds)

    def write(self, chunk: OutputChunk) -> bytes:
        """Give the events of one chunk."""
        return b"".join(map(self._numbered, self.take(chunk)))

    def take(self, chunk: OutputChunk) -> list[Event]:
        """Take one chunk."""
        deltas = self._reader.push(chunk.text)
        if chunk.finish_reason is not None:
            finish_name(chunk.finish_reason)  # raises if it is no end of an answer
            self._reason = chunk.finish_reason
            deltas += self._reader.finish()
        logprobs = [chat_logprob(self._tokenizer, entry) for entry in chunk.logprobs]
        events: list[Event] = []
        for delta in deltas or [{}]:
            events += self._builder.add(delta, logprobs)
            logprobs = []  # told once
        if chunk.finish_reason is not None:
            events += self._builder.end(is_complete=chunk.finish_reason == FinishReason.STOP)
        return events

    def end(self, usage: Usage) -> bytes:
        """Give the last event."""
        response = self.response(usage)
        return self._numbered({"type": f"response.{response['status']}", "response": response})

    def fail(self, failure: dict[str, Any]) -> bytes:
        """Give the event of a failure, with the error at its top so that clients raise it."""
        error = failure["error"]
        told = {name: error[name] for name in ("code", "message", "param")}
        return self._numbered({"type": "error", **told, "error": error})

    def response(self, usage: Usage) -> dict[str, Any]:
        """Give the whole response."""
        is_complete = self._reason == FinishReason.STOP
        whole = {
            **self._head,
            "status": "completed" if is_complete else "incomplete",
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "completed_at": int(time.time()) if is_complete else None,
            "output": self._builder.items,
            "usage": response_usage(usage),
        }
        if self._found:
            whole["radixrt"] = details_json(usage, self._found)
            if self._plan.tools is not None and self._plan.tools.loose_names:
                whole["radixrt"]["loose_tools"] = list(self._plan.tools.loose_names)
        return whole

    def _numbered(self, item: Event) -> bytes:
        number, self._number = self._number, self._number + 1
        return event(dump({**item, "sequence_number": number}), name=item["type"])


async def _events(batch: Batch, visit: Visit, writer: _Writer) -> AsyncGenerator[bytes, None]:
    usage = Usage()
    try:
        yield writer.begin()
        async for chunks in batch:
            if events := b"".join(writer.write(chunk) for _, chunk, _ in chunks):
                yield events
            usage = chunks[-1][1].usage or usage
        visit.notes.update(usage_notes(usage))
        yield writer.end(usage)
    except Exception as error:  # noqa: BLE001 - told to the reader, and to the log
        yield writer.fail(note_failure(visit, error).body())
    finally:
        batch.close()
