"""Messages with tool calls and results -> messages as a chat template takes them."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Sequence
from typing import Any

from radixrt.errors import InvalidRequest
from radixrt.server.bodies_chat import Message
from radixrt.server.reading import check_depth
from radixrt.server.tool_plan import Tool
from radixrt.server.tool_reader import parse_arguments
from radixrt.text.tool_forms import ToolForm

_ROLES = {"developer": "system"}  # templates know no developer
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = string.digits + string.ascii_lowercase

Plain = dict[str, Any]


def plain_messages(
    messages: Sequence[Message], form: ToolForm | None, tools: Sequence[Tool] = ()
) -> list[Plain]:
    """Give messages as a chat template takes them.

    Args:
        form: how calls are written; a template that does not write them itself gets them, and the tools, as text.
    Raises:
        InvalidRequest: a message has no text, or a part of it breaks a rule.
    """
    names: dict[str, str] = {}
    plain = [_plain(message, index, form, names) for index, message in enumerate(messages)]
    if form is None or form.is_rendered:
        return plain
    return _with_tools(_as_text(plain, form), form, tools)


def text_of(message: Message, place: str) -> str:
    """Give a message's text."""
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise InvalidRequest(f"{place}/content is missing", parameter=f"{place}/content")
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _plain(message: Message, index: int, form: ToolForm | None, names: dict[str, str]) -> Plain:
    place, role = f"messages/{index}", message.role
    _check_fields(message, place)
    plain: Plain = {"role": _ROLES.get(role, role), "content": text_of(message, place)}
    if (message.tool_calls or role == "tool") and form is None:
        raise InvalidRequest(
            "the model's chat template writes tool calls in a form that this server does not know",
            parameter=place,
        )
    if message.tool_calls:
        calls = []
        for at, call in enumerate(message.tool_calls):
            names[call.id] = call.function.name
            arguments = _arguments(call.function.arguments, f"{place}/tool_calls/{at}/function/arguments")
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": _id(call.id, form), "type": "function", "function": function})
        plain["tool_calls"] = calls
    if role == "tool" and message.tool_call_id is not None:
        plain["tool_call_id"] = _id(message.tool_call_id, form)
        if name := names.get(message.tool_call_id):
            plain["name"] = name
    return plain


def _check_fields(message: Message, place: str) -> None:
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest("only an assistant's message has tool_calls", parameter=f"{place}/tool_calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise InvalidRequest("only a tool's message has a tool_call_id", parameter=f"{place}/tool_call_id")
    if message.tool_call_id is None and message.role == "tool":
        raise InvalidRequest(f"{place}/tool_call_id is missing", parameter=f"{place}/tool_call_id")


def _arguments(text: str, pointer: str) -> Plain:
    try:
        check_depth(text.encode())
        return parse_arguments(text)
    except (ValueError, RecursionError, InvalidRequest):
        raise InvalidRequest(f"{pointer} must be the text of a JSON object", parameter=pointer) from None


def _id(given: str, form: ToolForm | None) -> str:
    """Give an id that is plain letters and digits and, for Mistral's templates, nine of them; equal for equal ids."""
    is_mistral = form is not None and form.name == "mistral"
    if _NINE.fullmatch(given) if is_mistral else re.fullmatch(r"[A-Za-z0-9_-]{1,64}", given):
        return given
    number = int.from_bytes(hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest())
    characters = []
    for _ in range(9):
        number, digit = divmod(number, len(_DIGITS))
        characters.append(_DIGITS[digit])
    return "".join(characters)


# -- templates that know no tools ------------------------------------------------------------------------------


def _as_text(plain: Sequence[Plain], form: ToolForm) -> list[Plain]:
    """Write calls into the assistant's text, and results into the user's."""
    found: list[Plain] = []
    follows_result = False
    for message in plain:
        role, content = message["role"], message["content"]
        if calls := message.get("tool_calls"):
            written = [
                (call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
                for call in calls
            ]
            content = "\n".join(part for part in (content, form.written(written)) if part)
        is_result = role == "tool"
        if is_result:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        if is_result and follows_result:
            found[-1]["content"] += f"\n{content}"
        else:
            found.append({"role": role, "content": content})
        follows_result = is_result
    return found


def _with_tools(plain: list[Plain], form: ToolForm, tools: Sequence[Tool]) -> list[Plain]:
    """Put the description of the tools at the end of the system message."""
    if not tools:
        return plain
    described = _description(form, tools)
    if plain and plain[0]["role"] == "system":
        first = {"role": "system", "content": f"{plain[0]['content']}\n\n{described}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": described}, *plain]


def _description(form: ToolForm, tools: Sequence[Tool]) -> str:
    lines = [json.dumps(tool.shown()["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(
        [
            "You can call these functions, one JSON description a line:",
            *lines,
            "A call is written like this, with the function's name and its arguments as JSON:",
            form.written([("NAME", "{...}")]),
        ]
    )
