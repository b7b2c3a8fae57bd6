"""What a gen with tools does: the model writes a call, it is run, and its result is the next of the transcript."""

from __future__ import annotations

from functools import partial
from typing import Any

from frontend_lang.branch import Branch, Reply
from frontend_lang.calling import timed
from frontend_lang.events import TextDelta
from frontend_lang.generating import gen
from frontend_lang.limits import NO_LIMITS
from frontend_lang.nodes import Gen, Step, UseTools
from frontend_lang.tool_styles import Style, style_of
from frontend_lang.tools import ToolAnswer, ToolCall
from frontend_lang.values import Reader


async def use_tools(node: UseTools[Any], step: Step, branch: Branch) -> Reply:
    """Let the model make one call, or as many as it wants within max_rounds and then answer.

    A call stands in the assistant's message; its result is a message of its own, where the transcript has messages.
    """
    calls: list[ToolCall] = []
    box, style = node.box, style_of(node.box.format, branch.run.backend.tool_form)
    while True:
        can_call = box.max_rounds is None or len(calls) < box.max_rounds
        reply = await _written(node, step, branch, style, can_call=can_call)
        written = reply.value
        if "answer" in written:
            return Reply(ToolAnswer(written["answer"], tuple(calls)), reply.record)
        call = await timed(branch.run, NO_LIMITS, lambda: box.call(written))  # noqa: B023 - awaited here
        calls.append(call)
        is_last = box.max_rounds is None
        _append_result(style, branch, call, is_last=is_last)
        if is_last:
            return Reply(call, reply.record)


async def _written(node: UseTools[Any], step: Step, branch: Branch, style: Style, *, can_call: bool) -> Reply:
    """Let the model write a call or its answer."""
    tools, can_answer = node.box.tools, node.box.max_rounds is not None
    grammar = style.grammar(tools, can_call=can_call, can_answer=can_answer)
    read = partial(style.read, can_call=can_call, can_answer=can_answer)
    one: Gen[Any] = Gen(node.name, style.sampling(node.sampling), grammar, Reader(read), node.limits)
    _append(branch, style.before)
    reply = await gen(one, Step(one, step.location), branch)
    _append(branch, style.after)
    return reply


def _append_result(style: Style, branch: Branch, call: ToolCall, *, is_last: bool) -> None:
    transcript = branch.transcript
    if not transcript.messages:
        _append(branch, style.result_before)
        branch.transcript.add_text(call.result)
        _tell(branch, call.result)
        _append(branch, style.result_after)
        return
    num_texts = transcript.num_texts
    transcript.open_role(style.result_role)
    transcript.add_text(style.told(call.result))
    transcript.close_role()
    if not is_last:
        transcript.open_role("assistant")
    _tell(branch, transcript.text_since(num_texts))


def _append(branch: Branch, text: str) -> None:
    branch.transcript.add_text(text, is_template=True)
    _tell(branch, text)


def _tell(branch: Branch, text: str) -> None:
    if branch.run.listener is not None and text:
        branch.run.listener(TextDelta(branch.path, text))
