"""Messages and texts -> prompt token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from radixrt.errors import InvalidRequest
from radixrt.server.bodies_chat import ChatBody, Message
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import TextPiece

_ROLES = {"developer": "system"}  # templates know no developer


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Give messages as a chat template takes them.

    Raises:
        InvalidRequest: a message has no text.
    """
    return [_plain(message, index) for index, message in enumerate(messages)]


def _plain(message: Message, index: int) -> dict[str, str]:
    place = f"messages/{index}"
    if message.tool_calls or message.tool_call_id is not None or message.role == "tool":
        raise InvalidRequest("tools are not supported yet", parameter=place)
    if message.content is None:
        raise InvalidRequest(f"{place}/content is missing", parameter=f"{place}/content")
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": _ROLES.get(message.role, message.role), "content": text}


def has_breakpoint(messages: Sequence[Message]) -> bool:
    """Tell whether a message marks the end of a reusable prefix."""
    return any(
        part.prompt_cache_breakpoint is not None
        for message in messages
        if message.content is not None and not isinstance(message.content, str)
        for part in message.content
    )


def chat_pieces(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
) -> list[TextPiece]:
    """Render a chat up to where the answer begins. Takes a text's length of time."""
    if tokenizer.chat is None:
        raise InvalidRequest("this model has no chat template; use /v1/completions", parameter="messages")
    return tokenizer.chat.render(plain_messages(messages), add_generation_prompt=True, variables=variables)


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


def chat_prompt(tokenizer: Tokenizer, body: ChatBody) -> list[int]:
    """Render and encode a chat; content never becomes a control token. Takes a text's length of time."""
    variables = template_variables(body, () if tokenizer.chat is None else tokenizer.chat.variables)
    if not body.continue_final_message:
        return tokenizer.encode_pieces(chat_pieces(tokenizer, body.messages, variables))
    *before, last = body.messages
    if last.role != "assistant" or not before:
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant and one before it",
            parameter="continue_final_message",
        )
    [begun] = plain_messages([last])
    return tokenizer.encode_pieces([*chat_pieces(tokenizer, before, variables), TextPiece(begun["content"])])
