"""The task that executes a branch's nodes in order; what a call does is in generating, selecting, asking, tooling."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
    RoleBegin,
    RoleEnd,
    Select,
    Step,
    Text,
    UseTools,
)
from frontend_lang.selecting import select
from frontend_lang.tooling import use_tools
from frontend_lang.waiting import can_wait, until_done, wait_for

DONE = Reply(None)


def begin(branches: Sequence[Branch]) -> None:
    """Start branches, and give the loop one turn: it hands new calls to the runtime before the program goes on."""
    num_started = sum([start(branch) for branch in branches])
    if num_started and can_wait():
        wait_for(asyncio.sleep(0))


def start(branch: Branch) -> bool:
    """Execute what is queued, in a task as far as it has to wait; tell whether a new one had to be started."""
    if branch.failure is not None or (branch.task is not None and not branch.task.done()):
        return False
    if branch.ready is None or branch.ready.done():
        perform(branch)
        if not branch.queue:
            return False
    branch.task = branch.run.loop.create_task(drain(branch))
    return True


async def settle(branch: Branch) -> None:
    """Wait until everything queued has been executed or the branch failed."""
    while not branch.is_idle and not branch.run.is_closed:
        start(branch)
        if branch.task is not None and not branch.task.done():
            await until_done(branch.task)


async def drain(branch: Branch) -> None:
    """Execute the queue in order until it is empty; an error becomes the branch's failure."""
    if branch.ready is not None:
        await branch.ready
    while True:
        perform(branch)
        if not branch.queue:
            return
        step = branch.queue[0]
        try:
            reply = await call(step, branch)
        except asyncio.CancelledError:
            if branch.failure is None:  # an abandoned branch has one
                fail(branch, step, RequestAborted(f"{step.node.label} was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - kept for the readers of the branch, raised there
            fail(branch, step, error)
            return
        finish(branch, reply)


def perform(branch: Branch) -> None:
    """Execute the nodes at the head of the queue that need not wait."""
    while branch.queue:
        step = branch.queue[0]
        try:
            reply = execute(step, branch)
        except Exception as error:  # noqa: BLE001 - kept for the readers of the branch, raised there
            fail(branch, step, error)
            return
        if reply is None:
            return
        finish(branch, reply)


def finish(branch: Branch, reply: Reply) -> None:
    """Take the executed step from the queue and give its variable the value."""
    step = branch.queue.popleft()
    if step.variable is not None:
        branch.set(step.node.name if isinstance(step.node, Call) else None, step.variable, reply)


def fail(branch: Branch, step: Step, error: Exception) -> None:
    """End a branch by an error at a step; it is untold until someone reads it."""
    failure = branch.failure_at(step, error)
    branch.run.untold.append(failure)
    branch.fail(failure)


def execute(step: Step, branch: Branch) -> Reply | None:
    """Execute a node that need not wait; None for one that must."""
    transcript, node = branch.transcript, step.node
    if isinstance(node, Gen):  # the most frequent one that must
        return None
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
            transcript.marks[node] = num_texts
        case Capture():
            return Reply(transcript.text_since(transcript.marks[node.mark]))
        case _:
            return None
    if branch.run.listener is not None and (text := transcript.text_since(num_texts)):
        branch.run.listener(TextDelta(branch.path, text))
    return DONE


async def call(step: Step, branch: Branch) -> Reply:
    """Run a call, record it and make its value."""
    node = step.node
    match node:
        case UseTools():
            return await use_tools(node, step, branch)
        case Gen():
            return await gen(node, step, branch)
        case Select():
            return await select(node, step, branch)
        case Decide():
            return await decide(node, step, branch)
    raise AssertionError(f"{node.label} is no call")
