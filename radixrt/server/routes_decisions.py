"""/v1/decisions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixrt.server.answers import details_json, json_response, total, usage_notes
from radixrt.server.bodies import CallBody
from radixrt.server.bodies_decisions import DecisionBody
from radixrt.server.decisions import answer, asked, num_shared
from radixrt.server.details import reports
from radixrt.server.documents import documented
from radixrt.server.gate import Visit
from radixrt.server.running import until_disconnect
from radixrt.server.service import Service, arrival
from radixrt.types import SamplingParams, Usage

router = APIRouter()


@router.post("/v1/decisions", **documented(DecisionBody))
async def decisions(request: Request) -> Response:
    """Answer many questions about one input; the input is computed once."""
    service, visit = arrival(request)
    body = await service.body(request, DecisionBody)
    return await until_disconnect(request.receive, _answer(service, visit, body))


async def _answer(service: Service, visit: Visit, body: DecisionBody) -> Response:
    service.check_model(body.model)
    tokenizer = service.engine.tokenizer
    found = await service.in_thread(lambda: asked(tokenizer, body))
    call = CallBody(
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_options=body.prompt_cache_options,
        radixrt=body.radixrt,
    )
    terms = service.terms(visit, call, has_breakpoint=_has_breakpoint(body))
    requests = [
        terms.request(
            item.prompt_ids,
            # An end of sequence as the likeliest token would leave no row: it is taken for a token like others.
            SamplingParams(
                max_tokens=1, temperature=0, logprobs=0, logprob_token_ids=item.label_ids, ignore_eos=True
            ),
        )
        for item in found
    ]
    told = await reports(service, call, requests)
    batch = await service.start(visit, requests)
    outputs = await batch.outputs()
    usage = _counted([item.prompt_ids for item in found], [output.usage for output in outputs])
    visit.notes.update(usage_notes(usage))
    result: dict[str, Any] = {
        "object": "decision",
        "model": service.model_name,
        "answers": [
            answer(item.question, [logprob for _, logprob in output.logprobs[0].top])
            for item, output in zip(found, outputs, strict=True)
        ],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
            },
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        },
    }
    if told:
        result["radixrt"] = details_json(usage, told)
    return json_response(result)


def _counted(prompts: list[tuple[int, ...]], usages: list[Usage]) -> Usage:
    """Count what all questions share once; cached is what was there before the first of them ran."""
    added = total(usages)
    shared = num_shared(prompts)
    return Usage(
        prompt_tokens=added.prompt_tokens - (len(prompts) - 1) * shared,
        cached_tokens=min(usage.cached_tokens for usage in usages),
        computed_tokens=added.computed_tokens,
        forced_tokens=added.forced_tokens,
        output_tokens=added.output_tokens,
    )


def _has_breakpoint(body: DecisionBody) -> bool:
    messages = [] if isinstance(body.input, str) else body.input
    parts = [part for item in messages if not isinstance(item.content, str) for part in item.content]
    return any(part.type != "input_json" and part.prompt_cache_breakpoint is not None for part in parts)
