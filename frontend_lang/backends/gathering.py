"""What several backends make of a stream: its whole output, and the scores of texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from frontend_lang.backends.protocol import ScoredContinuation
from frontend_lang.backends.values import (
    GenerateRequest,
    GenerationOutput,
    InvalidRequest,
    OutputChunk,
    OutputCollector,
    SamplingParams,
)
from frontend_lang.waiting import all_or_first_error

MAX_SCORED_TOGETHER = 64  # choices of one select that wait in the runtime at a time


async def collected(request: GenerateRequest, stream: AsyncGenerator[OutputChunk, None]) -> GenerationOutput:
    """Read a request's stream to its end and give the whole output."""
    collector = OutputCollector(request.prompt_ids, num_samples=request.sampling.n)
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            collector.add(chunk)
    return collector.output()


async def scored(
    prefix_ids: Sequence[int],
    continuations: Sequence[Sequence[int]],
    generate: Callable[[GenerateRequest], Awaitable[GenerationOutput]],
    *,
    label: str,
    scope_id: int | None,
) -> list[ScoredContinuation]:
    """Score continuations as prompts: one request each, which computes the prompt and draws one token."""
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    requests = [
        GenerateRequest(
            (*prefix_ids, *continuation),
            sampling,
            logprob_start=len(prefix_ids),
            label=label,
            scope_id=scope_id,
        )
        for continuation in continuations
    ]
    seats = asyncio.Semaphore(MAX_SCORED_TOGETHER)

    async def seated(request: GenerateRequest) -> GenerationOutput:
        async with seats:
            return await generate(request)

    outputs = await all_or_first_error([seated(request) for request in requests])
    for output, continuation in zip(outputs, continuations, strict=True):
        if len(output.prompt_logprobs) < len(continuation):
            raise InvalidRequest(
                "select needs a runtime that gives log-probabilities of the prompt",
                parameter="prompt_logprobs",
            )
    return [
        ScoredContinuation(
            tuple(entry.logprob for entry in output.prompt_logprobs[-len(continuation) :]), output.usage
        )
        for output, continuation in zip(outputs, continuations, strict=True)
    ]
