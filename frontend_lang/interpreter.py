"""The task that executes a branch's nodes in order; what a call does is in generating, selecting, asking, tooling."""

from __future__ import annotations

import asyncio

from frontend_lang.asking import decide
from frontend_lang.backends import RequestAborted
from frontend_lang.branch import Branch, Reply
from frontend_lang.events import TextDelta
from frontend_lang.generating import fork, gen
from frontend_lang.nodes import (
    Call,
    Capture,
    Decide,
    Fork,
    Gen,
    Mark,
    Request,
    RoleBegin,
    RoleEnd,
    Select,
    Step,
    Text,
    UseTools,
)
from frontend_lang.selecting import select
from frontend_lang.tooling import use_tools


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
        case Gen() | Select() | UseTools() | Decide():
            return await call(node, step, branch)
    if branch.run.listener is not None and (text := transcript.text_since(num_texts)):
        branch.run.listener(TextDelta(branch.path, text))
    return None


async def call(node: Request, step: Step, branch: Branch) -> Reply:
    """Run a call, record it and make its value."""
    match node:
        case UseTools():
            return await use_tools(node, step, branch)
        case Gen():
            return await gen(node, step, branch)
        case Select():
            return await select(node, step, branch)
        case Decide():
            return await decide(node, step, branch)
