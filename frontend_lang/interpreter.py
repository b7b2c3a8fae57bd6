"""What each node does, one function per kind, and the task that executes a branch's nodes in order."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from frontend_lang.backends import (
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    RequestAborted,
    SamplingParams,
    TextPiece,
)
from frontend_lang.branch import Branch, Reply
from frontend_lang.nodes import Call, Fork, Gen, Node, RoleBegin, RoleEnd, Select, Text
from frontend_lang.outcome import summary
from frontend_lang.trace import CallRecord, total_usage


def start(branch: Branch) -> bool:
    """Execute what is queued in a task; tell whether a new one had to be started."""
    if branch.failure is not None or (branch.task is not None and not branch.task.done()):
        return False
    branch.task = branch.run.loop.create_task(drain(branch), name=f"{branch.run.program}:{branch.path}")
    return True


async def settle(branch: Branch) -> None:
    """Wait until everything queued has been executed or the branch failed."""
    while not branch.is_idle and not branch.run.is_closed:
        start(branch)
        if branch.task is not None:
            await asyncio.wait([branch.task])


async def drain(branch: Branch) -> None:
    """Execute the queue in order until it is empty; an error becomes the branch's failure."""
    if branch.ready is not None:
        await branch.ready
    while branch.queue:
        node, variable = branch.queue[0]
        try:
            reply = await execute(node, branch)
        except asyncio.CancelledError:
            fail(branch, node, RequestAborted(f"{node.label} was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - kept for the readers of the branch, raised there
            fail(branch, node, error)
            return
        branch.queue.popleft()
        if variable is not None and reply is not None:
            variable.set_result(reply)


def fail(branch: Branch, node: Node | Fork, error: Exception) -> None:
    """End a branch by an error at a node; it is untold until someone reads it."""
    failure = branch.failure_at(node, error)
    branch.run.untold.append(failure)
    branch.fail(failure)


async def execute(node: Node | Fork, branch: Branch) -> Reply | None:
    """Execute one node; a call gives its reply."""
    match node:
        case Text():
            branch.transcript.add_text(node.text, is_template=node.is_control)
        case RoleBegin():
            branch.transcript.open_role(node.role)
        case RoleEnd():
            branch.transcript.close_role()
        case Fork():
            fork(node, branch)
        case Gen() | Select():
            return await call(node, branch)
    return None


def fork(node: Fork, branch: Branch) -> None:
    """Give each child a copy of the transcript, encoded, so that all share the exact prefix."""
    branch.transcript.token_ids()
    for child in node.branches:
        child.release(branch.transcript.copy())


async def call(node: Call, branch: Branch) -> Reply:
    """Run a gen or select, record it and make its value."""
    run = branch.run
    blank = CallRecord(
        index=run.num_calls_started,
        kind="gen" if isinstance(node, Gen) else "select",
        name=node.name,
        location=node.location,
        branch=branch.path,
    )
    run.num_calls_started += 1
    started = run.clock()
    record = blank
    try:
        record = await (gen(node, branch, blank) if isinstance(node, Gen) else select(node, branch, blank))
        record = replace(record, seconds=run.clock() - started)
        value = value_of(node, record)
    except BaseException as error:
        run.calls.append(replace(record, seconds=run.clock() - started, error=summary(error)))
        raise
    run.calls.append(record)
    return Reply(value, record)


def value_of(node: Call, record: CallRecord) -> Any:
    """Make the value of a call's text.

    Raises:
        ValueError: the text does not fit the schema.
    """
    if not isinstance(node, Gen) or node.schema is None:
        return record.text
    try:
        return node.schema.value(record.text)
    except ValueError as error:
        if record.finish_reason is not FinishReason.LENGTH:
            raise
        raise ValueError(
            f"the value was cut off after {len(record.token_ids)} tokens (max_tokens)"
        ) from error


async def gen(node: Gen, branch: Branch, record: CallRecord) -> CallRecord:
    """Let the model continue the transcript, and append what it wrote."""
    run, transcript = branch.run, branch.transcript
    prompt_ids = transcript.token_ids()
    sampling = SamplingParams(**{**run.sampling, **node.sampling}, grammar=node.grammar)
    output = await run.backend.generate(GenerateRequest(prompt_ids, sampling, label=node.name or ""))
    token_ids, is_stopped = output.token_ids, output.finish_reason is FinishReason.STOP
    if is_stopped and token_ids and token_ids[-1] in run.backend.eos_ids.union(sampling.stop_token_ids):
        token_ids = token_ids[:-1]
    transcript.add_generated(token_ids, output.text, is_cut=is_stopped and bool(sampling.stop))
    return replace(
        record,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        text=output.text,
        usage=output.usage,
        finish_reason=output.finish_reason,
        logprobs=output.logprobs,
    )


async def select(node: Select, branch: Branch, record: CallRecord) -> CallRecord:
    """Append the choice with the highest mean log-probability per token, the first of equals.

    The distribution is over the choices as wholes: softmax of their total log-probabilities.
    """
    backend, transcript = branch.run.backend, branch.transcript
    prefix_ids = transcript.token_ids()
    if not prefix_ids:
        raise InvalidRequest("select needs a transcript to continue: put text before it", parameter="select")
    continuations = [backend.encode([TextPiece(choice)], is_start=False) for choice in node.choices]
    scored = await backend.score(prefix_ids, continuations, label=node.name or "")
    totals = [math.fsum(score.logprobs) for score in scored]
    means = [total / len(ids) for total, ids in zip(totals, continuations, strict=True)]
    winner = max(range(len(means)), key=means.__getitem__)
    transcript.add_generated(continuations[winner], node.choices[winner])
    weights = [math.exp(total - max(totals)) for total in totals]
    return replace(
        record,
        prompt_ids=prefix_ids,
        token_ids=tuple(continuations[winner]),
        text=node.choices[winner],
        usage=total_usage([score.usage for score in scored]),
        distribution=MappingProxyType(
            {
                choice: weight / math.fsum(weights)
                for choice, weight in zip(node.choices, weights, strict=True)
            }
        ),
    )
