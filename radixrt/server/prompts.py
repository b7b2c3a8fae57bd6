"""Messages and texts -> prompt token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from radixrt.errors import InvalidRequest
from radixrt.server.bodies_chat import ChatBody, Message
from radixrt.server.tool_history import plain_messages, text_of
from radixrt.server.tool_plan import Tool
from radixrt.text.tokenizer import Tokenizer
from radixrt.text.tool_forms import ToolForm
from radixrt.types import TextPiece


def has_breakpoint(messages: Sequence[Message]) -> bool:
    """Tell whether a message marks the end of a reusable prefix."""
    return any(
        part.prompt_cache_breakpoint is not None
        for message in messages
        if message.content is not None and not isinstance(message.content, str)
        for part in message.content
    )


def chat_pieces(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
    *,
    form: ToolForm | None = None,
    tools: Sequence[Tool] = (),
) -> list[TextPiece]:
    """Render a chat up to where the answer begins. Takes a text's length of time.

    Args:
        form: how tool calls are written; None: there may be none.
        tools: what the model is shown.
    """
    if tokenizer.chat is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", parameter="messages")
    plain = plain_messages(messages, form, tools)
    is_rendered = form is not None and form.is_rendered
    # Contents are kept apart by the template's renderer; names and arguments of tools by stand-ins.
    calls = [message.get("tool_calls") for message in plain]
    shown = [tool.shown() for tool in tools] if is_rendered else []
    [calls, shown], stand_ins = tokenizer.shielded([calls, shown])
    for message, shielded in zip(plain, calls, strict=True):
        if shielded is not None:
            message["tool_calls"] = shielded
    return tokenizer.chat.render(
        plain, add_generation_prompt=True, variables=variables, tools=shown, stand_ins=stand_ins
    )


def template_variables(body: ChatBody, known: Collection[str]) -> dict[str, Any]:
    """Give the variables for the model's template.

    reasoning_effort and verbosity are offered under these names and, for templates that only know an on and off,
    as enable_thinking; a template that reads none of them is unaffected.
    """
    offered: dict[str, Any] = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    if body.reasoning_effort is not None:
        offered["enable_thinking"] = body.reasoning_effort not in ("none", "minimal")
    offered = {name: value for name, value in offered.items() if value is not None and name in known}
    return {**offered, **(body.chat_template_kwargs or {})}


def chat_prompt(
    tokenizer: Tokenizer, body: ChatBody, *, form: ToolForm | None = None, tools: Sequence[Tool] = ()
) -> list[int]:
    """Render and encode a chat; content never becomes a control token. Takes a text's length of time."""
    variables = template_variables(body, () if tokenizer.chat is None else tokenizer.chat.variables)
    if not body.continue_final_message:
        pieces = chat_pieces(tokenizer, body.messages, variables, form=form, tools=tools)
        return tokenizer.encode_pieces(pieces)
    *before, last = body.messages
    if last.role != "assistant" or last.tool_calls or not before:
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant, without tool calls, and one before it",
            parameter="continue_final_message",
        )
    begun = TextPiece(text_of(last, f"messages/{len(before)}"))
    pieces = chat_pieces(tokenizer, before, variables, form=form, tools=tools)
    return tokenizer.encode_pieces([*pieces, begun])
