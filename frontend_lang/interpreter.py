"""What each node does, one function per kind, and the task that executes a branch's nodes in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from frontend_lang.backends import (
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    RequestAborted,
    TextPiece,
    Usage,
)
from frontend_lang.branch import Branch, Reply
from frontend_lang.calling import CallLog, Teller, send, within
from frontend_lang.events import TextDelta
from frontend_lang.nodes import Call, Capture, Fork, Gen, Mark, RoleBegin, RoleEnd, Select, Step, Text
from frontend_lang.selection import ScoredChoice, covering, distribution, leaves, winner
from frontend_lang.trace import total_usage
from frontend_lang.transcript import NOT_HEALED
from frontend_lang.values import healed_grammar


def start(branch: Branch) -> bool:
    """Execute what is queued in a task; tell whether a new one had to be started."""
    if branch.failure is not None or (branch.task is not None and not branch.task.done()):
        return False
    branch.task = branch.run.loop.create_task(drain(branch))
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
        step = branch.queue[0]
        try:
            reply = await execute(step, branch)
        except asyncio.CancelledError:
            fail(branch, step, RequestAborted(f"{step.node.label} was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - kept for the readers of the branch, raised there
            fail(branch, step, error)
            return
        branch.queue.popleft()
        if reply is not None and step.variable is not None:
            branch.set(step.node.name if isinstance(step.node, Call) else None, step.variable, reply)


def fail(branch: Branch, step: Step, error: Exception) -> None:
    """End a branch by an error at a step; it is untold until someone reads it."""
    failure = branch.failure_at(step, error)
    branch.run.untold.append(failure)
    branch.fail(failure)


async def execute(step: Step, branch: Branch) -> Reply | None:
    """Execute one node; a call gives its reply."""
    transcript, node = branch.transcript, step.node
    num_texts = transcript.num_texts
    match node:
        case Text():
            transcript.add_text(node.text, is_template=node.is_control)
        case RoleBegin():
            transcript.open_role(node.role)
        case RoleEnd():
            transcript.close_role()
        case Fork():
            fork(node.branches, branch)
        case Mark():
            branch.marks[node] = num_texts
        case Capture():
            return Reply(transcript.text_since(branch.marks[node.mark]))
        case Gen() | Select():
            return await call(node, step, branch)
    if branch.run.listener is not None and (text := transcript.text_since(num_texts)):
        branch.run.listener(TextDelta(branch.path, text))
    return None


def fork(children: Sequence[Branch], branch: Branch) -> None:
    """Give each child a copy of the transcript, encoded, so that all share the exact prefix."""
    branch.transcript.token_ids()
    for child in children:
        child.release(branch.transcript.copy())


async def call(node: Gen[Any] | Select, step: Step, branch: Branch) -> Reply:
    """Run a call, record it and make its value."""
    log = CallLog("gen" if isinstance(node, Gen) else "select", step, node.name, branch)
    try:
        if isinstance(node, Select):
            return await select(node, branch, log)
        return await gen(node, step, branch, log)
    except BaseException as error:
        log.fail(error)
        raise


async def gen(node: Gen[Any], step: Step, branch: Branch, log: CallLog) -> Reply:
    """Let the model continue the transcript, and append what it wrote; with n > 1 the first of it."""
    run, transcript = branch.run, branch.transcript
    healed = transcript.heal() if node.is_healed else NOT_HEALED
    prompt_ids = transcript.token_ids()
    log.fields["prompt_ids"] = prompt_ids
    sampling = run.sampling_of(node, healed_grammar(node.grammar, healed.text))
    request = GenerateRequest(prompt_ids, sampling, label=node.name or "", scope_id=branch.scope_id())
    output = await send(request, run, node.limits, Teller(branch, step, num_hidden=len(healed.text)))
    fork([child for child, _ in step.samples], branch)
    for index, (child, variable) in enumerate(step.samples):
        own = log if index == 0 else CallLog("gen", step, node.name, child)
        own.fields |= {"prompt_ids": prompt_ids, "usage": output.usage if index == 0 else Usage()}
        own.fields |= child.transcript.add_sample(output.samples[index], sampling, healed, own.index)
        try:
            child.set(node.name, variable, Reply(value_of(node, own), own.close()))
        except ValueError as error:
            own.fail(error)
            failure = child.failure_at(step, error)
            run.untold.append(failure)
            variable.set_result(failure)
            child.fail(failure)
    written = transcript.add_sample(output.samples[0], sampling, healed, log.index)
    if log.record is not None:
        return Reply(step.value, log.record)
    log.fields |= {**written, "usage": output.usage}
    return Reply(value_of(node, log), log.close())


def value_of(node: Gen[Any], log: CallLog) -> Any:
    """Make the value of a call's text.

    Raises:
        ValueError: the text does not fit the schema.
    """
    text = log.fields["text"]
    if node.reader is None:
        return text
    try:
        return node.reader.read(text)
    except ValueError as error:
        if log.fields["finish_reason"] is not FinishReason.LENGTH:
            raise
        num_tokens = len(log.fields["token_ids"])
        raise ValueError(f"the value was cut off after {num_tokens} tokens (max_tokens)") from error


async def select(node: Select, branch: Branch, log: CallLog) -> Reply:
    """Append the choice that wins by the node's method, the first of equals."""
    run, transcript = branch.run, branch.transcript
    prefix_ids = transcript.token_ids()
    if not prefix_ids:
        raise InvalidRequest("select needs a transcript to continue: put text before it", parameter="select")
    log.fields["prompt_ids"] = prefix_ids
    run.deadline.check()
    sequences = [tuple(run.backend.encode([TextPiece(text)], is_start=False)) for text in node.choices]
    scored, usages = await score(node, branch, prefix_ids, sequences)
    if node.method == "unconditional_likelihood":
        bare, more = await score(node, branch, _bare_prefix(branch), sequences)
        scored = [
            replace(choice, unconditional=other.logprobs) for choice, other in zip(scored, bare, strict=True)
        ]
        usages += more
    best = winner(node.method, scored)
    transcript.add_generated(sequences[best], node.choices[best], call_index=log.index)
    if run.listener is not None:
        run.listener(TextDelta(branch.path, node.choices[best], node.name, is_generated=True))
    log.fields |= {
        "token_ids": sequences[best],
        "text": node.choices[best],
        "usage": total_usage(usages),
        "distribution": MappingProxyType(distribution(scored)),
    }
    return Reply(node.choices[best], log.close(), tuple(scored))


async def score(
    node: Select, branch: Branch, prefix_ids: Sequence[int], sequences: Sequence[tuple[int, ...]]
) -> tuple[list[ScoredChoice], list[Usage]]:
    """Score the leaves of the trie of choices behind a prefix; the others are beginnings of these."""
    run, chosen = branch.run, leaves(sequences)
    results = await within(
        run,
        node.limits,
        lambda: run.backend.score(
            prefix_ids,
            [sequences[index] for index in chosen],
            label=node.name or "",
            scope_id=branch.scope_id(),
        ),
    )
    choices = [
        ScoredChoice(text, ids, results[position].logprobs[: len(ids)])
        for text, ids, position in zip(node.choices, sequences, covering(sequences, chosen), strict=True)
    ]
    return choices, [result.usage for result in results]


def _bare_prefix(branch: Branch) -> tuple[int, ...]:
    """Give the shortest prefix: the begin of a sequence, or where a model has none, the end of another one."""
    backend = branch.run.backend
    prefix = backend.bos_ids or tuple(sorted(backend.eos_ids)[:1])
    if not prefix:
        raise InvalidRequest(
            "unconditional_likelihood needs a model with a token for the begin or end of a sequence",
            parameter="method",
        )
    return prefix
