"""/generate, /explain and /scopes: the engine in its own terms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixrt.errors import InvalidRequest
from radixrt.explain import PrefixReport
from radixrt.server.answers import answer_id, details_json, dump, finish_name, json_response, usage_notes
from radixrt.server.bodies_native import CloseScopesBody, ExplainBody, GenerateBody, ScopeBody
from radixrt.server.constraints import Constraint
from radixrt.server.details import reports
from radixrt.server.documents import documented
from radixrt.server.errors import refused
from radixrt.server.gate import Visit, note_failure, visit_of
from radixrt.server.native import encode_segments
from radixrt.server.prompts import chat_pieces
from radixrt.server.resuming import Recording
from radixrt.server.running import Batch, until_disconnect
from radixrt.server.sampling import sampling_of
from radixrt.server.service import Service, arrival, service_of
from radixrt.server.streaming import DONE, EventStream, event
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import GenerateRequest, OutputChunk, SamplingParams, TokenLogprob

router = APIRouter()


@router.post("/generate", **documented(GenerateBody))
async def generate(request: Request) -> Response:
    """Run one request: text, segments or ids in; text and ids out."""
    service, visit = arrival(request)
    body = await service.body(request, GenerateBody)
    return await until_disconnect(request.receive, _answer(service, visit, body))


@router.get("/generate/{name}")
async def resume(request: Request, name: str) -> Response:
    """Read a resumable stream on, from the event `position` (or the one after the header Last-Event-ID)."""
    service, visit = arrival(request)
    position = _position(request)
    recording = service.shelf(visit.tenant).get(name)
    if recording is None:
        raise refused(404, "there is no such stream, or it is no longer kept", code="stream_not_found")
    if position < recording.first or position > recording.stop:
        raise refused(
            410,
            f"positions {recording.first} to {recording.stop} are kept, got {position}",
            code="position_gone",
            param="position",
        )
    return EventStream(recording.read(position))


@router.delete("/generate/{name}")
async def stop(request: Request, name: str) -> Response:
    """Abort a resumable stream and forget it."""
    service, visit = arrival(request)
    shelf = service.shelf(visit.tenant)
    recording = shelf.get(name)
    if recording is not None:
        shelf.remove(recording)
    return json_response({"id": name, "was_there": recording is not None})


@router.post("/explain", **documented(ExplainBody))
async def explain(request: Request) -> Response:
    """Say how much of a prompt is cached, what differs where it stops, and what was evicted."""
    service, visit = arrival(request)
    body = await service.body(request, ExplainBody)
    service.check_model(body.model)
    tokenizer = service.engine.tokenizer
    namespace = service.rule.namespace(visit.tenant, label=body.prompt_cache_key)

    def report() -> PrefixReport:
        prompt_ids = _explained_ids(tokenizer, body)
        return service.engine.explain(prompt_ids, namespace=namespace)

    found = service.shown(await service.in_thread(report))
    return json_response({**asdict(found), "text": str(found)})


@router.post("/scopes", **documented(ScopeBody))
async def open_scope(request: Request) -> Response:
    """Open a scope: prefixes of requests that name it are kept until it is closed."""
    service, visit = arrival(request)
    body = await service.body(request, ScopeBody)
    longest = service.config.max_retention_s
    if body.ttl_s > longest:
        raise InvalidRequest(f"ttl_s must be at most {longest}, got {body.ttl_s:g}", parameter="ttl_s")
    return json_response({"scope": service.scopes.open(visit.tenant.name, ttl_s=body.ttl_s)})


@router.delete("/scopes/{name}")
async def close_scope(request: Request, name: str) -> Response:
    """Close a scope at once; closing twice is fine."""
    num_closed = service_of(request).scopes.close(visit_of(request.scope).tenant.name, [name])
    return json_response({"scope": name, "was_open": num_closed == 1})


@router.post("/scopes/close", **documented(CloseScopesBody))
async def close_scopes(request: Request) -> Response:
    """Close several scopes at once; those that are not open are passed over."""
    service, visit = arrival(request)
    body = await service.body(request, CloseScopesBody)
    return json_response({"num_closed": service.scopes.close(visit.tenant.name, body.scopes)})


def _position(request: Request) -> int:
    last = request.headers.get("last-event-id")
    text = request.query_params.get("position") or ("0" if last is None else last)
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise InvalidRequest(
            "position must be a whole number from 0 on", parameter="position", value=text[:40]
        )
    return int(text) + (last is not None and "position" not in request.query_params)


def _explained_ids(tokenizer: Tokenizer, body: ExplainBody) -> list[int]:
    if body.messages is None:
        return prompt_ids_of(tokenizer, body, "prompt, segments, prompt_ids or messages")
    if any(given is not None for given in (body.prompt, body.segments, body.prompt_ids)):
        raise InvalidRequest("give one of prompt, segments, prompt_ids or messages", parameter="messages")
    return tokenizer.encode_pieces(chat_pieces(tokenizer, body.messages))


def prompt_ids_of(tokenizer: Tokenizer, body: GenerateBody | ExplainBody, names: str) -> list[int]:
    """Encode the one prompt of a body. Takes a text's length of time."""
    given = [item for item in (body.prompt, body.segments, body.prompt_ids) if item is not None]
    if len(given) != 1:
        raise InvalidRequest(f"give exactly one of {names}", parameter="prompt")
    if body.prompt_ids is not None:
        return body.prompt_ids
    if body.segments is not None:
        return encode_segments(tokenizer, body.segments, is_start=body.is_start)
    return tokenizer.encode(body.prompt or "")


async def _answer(service: Service, visit: Visit, body: GenerateBody) -> Response:
    request, constraint = await _plan(service, visit, body)
    found = await reports(service, body, [request])
    if body.is_resumable and not body.stream:
        raise InvalidRequest("is_resumable needs stream: true", parameter="is_resumable")
    batch = await service.start(visit, [request], constraint=constraint)
    name = answer_id("gen")
    if not body.stream:
        [output] = await batch.outputs()
        visit.notes.update(usage_notes(output.usage))
        answer: dict[str, Any] = {
            "id": name,
            "model": service.model_name,
            "samples": [
                {
                    "text": sample.text,
                    "token_ids": sample.token_ids,
                    "finish_reason": finish_name(sample.finish_reason),
                    "logprobs": _logprobs(sample.logprobs),
                    "origin": None if sample.origin is None else asdict(sample.origin),
                }
                for sample in output.samples
            ],
            "prompt_logprobs": _logprobs(output.prompt_logprobs),
            "usage": asdict(output.usage),
            "seconds": output.seconds,
            "first_token_s": output.first_token_s,
            "queued_s": output.queued_s,
        }
        if found:
            answer["radixrt"] = details_json(output.usage, found)
        return json_response(answer)
    events = _events(batch, visit, name=name, model=service.model_name, found=found)
    if not body.is_resumable:
        return EventStream(events, batch)
    try:
        recording = service.shelf(visit.tenant).open(name)
    except BaseException:
        batch.close()
        raise
    recording.task = asyncio.create_task(_record(events, recording, batch))
    recording.start_timer()
    return EventStream(recording.read(0))


async def _plan(
    service: Service, visit: Visit, body: GenerateBody
) -> tuple[GenerateRequest, Constraint | None]:
    service.scopes.close(visit.tenant.name, body.closed_scopes or ())  # also when the request is refused
    service.check_model(body.model)
    constraint = None if body.grammar is None else Constraint(body.grammar.spec(), "grammar")
    sampling = sampling_of(
        body,
        max_tokens=SamplingParams().max_tokens if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        grammar=None if constraint is None else constraint.spec,
    )
    if body.logprob_token_ids:
        sampling = replace(sampling, logprob_token_ids=tuple(body.logprob_token_ids))
    if body.shown_token_ids:
        sampling = replace(sampling, shown_token_ids=tuple(body.shown_token_ids))
    tokenizer = service.engine.tokenizer
    prompt_ids = await service.on_text(
        visit, lambda: prompt_ids_of(tokenizer, body, "prompt, segments or prompt_ids")
    )
    terms = service.terms(visit, body)
    if (scope_id := _scope_id(service, visit, body)) is not None:
        terms = replace(terms, scope_id=scope_id)
    return terms.request(prompt_ids, sampling, logprob_start=body.logprob_start), constraint


def _scope_id(service: Service, visit: Visit, body: GenerateBody) -> int | None:
    """Give the scope that a body names, opened where it may be; None when it names none."""
    ttl_s = body.scope_ttl_s
    if body.scope is None:
        if ttl_s is not None:
            raise InvalidRequest("scope_ttl_s needs scope", parameter="scope_ttl_s", value=ttl_s)
        return None
    if ttl_s is not None:
        ttl_s = min(ttl_s, service.config.max_retention_s)
    return service.scopes.scope_id(visit.tenant.name, body.scope, ttl_s=ttl_s)


def _logprobs(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [{"token_id": item.token_id, "logprob": item.logprob, "top": item.top} for item in entries]


def _chunk_json(chunk: OutputChunk) -> dict[str, Any]:
    made: dict[str, Any] = {
        "sample_index": chunk.sample_index,
        "text": chunk.text,
        "token_ids": chunk.token_ids,
        "finish_reason": None if chunk.finish_reason is None else finish_name(chunk.finish_reason),
    }
    if chunk.logprobs:
        made["logprobs"] = _logprobs(chunk.logprobs)
    if chunk.prompt_logprobs:
        made["prompt_logprobs"] = _logprobs(chunk.prompt_logprobs)
    if chunk.origin is not None:
        made["origin"] = asdict(chunk.origin)
    if chunk.usage is not None:
        made |= {"usage": asdict(chunk.usage), "queued_s": chunk.queued_s}
    return made


async def _events(
    batch: Batch, visit: Visit, *, name: str, model: str, found: list[PrefixReport]
) -> AsyncGenerator[bytes, None]:
    """Give the stream's events: its id, the chunks, [DONE]. An event's id is its position."""
    position = 1
    try:
        yield event(dump({"id": name, "model": model}), event_id="0")
        async for chunks in batch:
            for _, chunk, _ in chunks:
                made = _chunk_json(chunk)
                if chunk.usage is not None:
                    visit.notes.update(usage_notes(chunk.usage))
                    if found:
                        made["radixrt"] = details_json(chunk.usage, found)
                yield event(dump(made), event_id=str(position))
                position += 1
        yield DONE
    except Exception as error:  # noqa: BLE001 - told to the reader, and to the log
        yield event(dump(note_failure(visit, error).body()))
    finally:
        batch.close()


async def _record(events: AsyncGenerator[bytes, None], recording: Recording, batch: Batch) -> None:
    """Move a stream's events into its recording until it ends or is given up."""
    try:
        async for item in events:
            await recording.add(item)
    finally:
        batch.close()
        await events.aclose()
        await recording.finish()
