"""/v1/responses in terms of chat: its body becomes a chat's, a chat's deltas become its items and events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from radixrt.errors import InvalidRequest, RequestError
from radixrt.server.answers import answer_id
from radixrt.server.bodies import CallBody as CommonBody
from radixrt.server.bodies_chat import ChatBody
from radixrt.server.bodies_responses import (
    FlatAllowed,
    FlatChosen,
    InputCall,
    InputItem,
    InputMessage,
    InputResult,
    InputText,
    ResponsesBody,
)
from radixrt.server.service import Service
from radixrt.types import Usage

_MEMORY = "this server keeps no responses: a request brings its whole input"
Event = dict[str, Any]


def check_stateless(body: ResponsesBody) -> None:
    """Raise InvalidRequest if the body needs what an earlier request left, or would leave something itself."""
    if body.store:
        raise InvalidRequest(f"store must be false: {_MEMORY}", parameter="store", value=True)
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is not supported: {_MEMORY}", parameter=name)
    if body.background:
        raise InvalidRequest(f"background must be false: {_MEMORY}", parameter="background", value=True)


# -- the request ------------------------------------------------------------------------------------------------


def chat_body(body: ResponsesBody) -> tuple[ChatBody, list[int]]:
    """Give the chat that a body asks for, and for each of its messages the index of its input item (-1: none)."""
    messages: list[dict[str, Any]] = []
    origins: list[int] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
        origins.append(-1)
    items = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for index, item in enumerate(items):
        if isinstance(item, InputCall) and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(_call(item))
            continue
        messages.append(_message(item))
        origins.append(index)
    wants_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
    # What the two bodies have in common is checked already and is handed on as it is.
    common = body.model_dump(
        include=set(CommonBody.model_fields), exclude={"radixrt"}, exclude_none=True, by_alias=True
    )
    given: dict[str, Any] = {
        **common,
        "radixrt": body.radixrt.model_dump(),
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": wants_logprobs,
        "top_logprobs": body.top_logprobs,
        "response_format": _response_format(body),
        "verbosity": None if body.text is None else body.text.verbosity,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "tools": [_tool(item.model_dump()) for item in body.tools or ()],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    return ChatBody.model_validate(given), origins


def _message(item: InputItem) -> dict[str, Any]:
    if isinstance(item, InputCall):
        return {"role": "assistant", "content": None, "tool_calls": [_call(item)]}
    if isinstance(item, InputResult):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _parts(item.output)}
    return {"role": item.role, "content": _parts(item.content)}


def _parts(content: str | list[InputText]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text, "prompt_cache_breakpoint": part.prompt_cache_breakpoint}
        for part in content
    ]


def _call(item: InputCall) -> dict[str, Any]:
    return {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}


def _tool(flat: dict[str, Any]) -> dict[str, Any]:
    kind = flat.pop("type")
    return {"type": kind, "function": flat}


def _tool_choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if isinstance(choice, FlatChosen):
        return _tool(choice.model_dump())
    if isinstance(choice, FlatAllowed):
        tools = [_tool(item.model_dump()) for item in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    inner = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": inner}


_RENAMED = (
    ("response_format/json_schema/schema", "text/format/schema"),
    ("response_format", "text/format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning/effort"),
    ("verbosity", "text/verbosity"),
    ("tool_choice/allowed_tools/tools", "tool_choice/tools"),
)


def renamed(error: RequestError, origins: Sequence[int]) -> RequestError:
    """Give a chat's error in the words of this body. Pure."""
    parameter = error.parameter
    for old, new in _RENAMED:
        if parameter == old or parameter.startswith(f"{old}/"):
            parameter = new + parameter[len(old) :]
            break
    head, *rest = parameter.split("/")
    if head == "messages" and rest and rest[0].isdecimal() and int(rest[0]) < len(origins):
        at = origins[int(rest[0])]
        parameter = "instructions" if at < 0 else "/".join(["input", str(at), *rest[1:]])
    elif head == "messages":
        parameter = "input"
    elif head in ("tools", "tool_choice"):
        parameter = parameter.replace("/function/", "/", 1)
    message = str(error).replace(error.parameter, parameter)
    return type(error)(message, parameter=parameter, value=error.value)


# -- the answer -------------------------------------------------------------------------------------------------


class ItemBuilder:
    """Build a response's output from a chat's deltas, and tell each step as an event.

    Invariant: `items` are those of all output_item.done events, in order of output_index.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []  # logprobs of text that is held back
        self._is_begun = False

    def add(self, delta: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Take one delta of a chat answer."""
        self._waiting += logprobs
        events: list[Event] = []
        if text := delta.get("content"):
            events += self._begin_message()
            events.append(self._delta("response.output_text.delta", text, with_content=True))
            self._text.append(text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._begin_call(call)
            if arguments := call["function"]["arguments"]:
                events.append(self._delta("response.function_call_arguments.delta", arguments))
                self._text.append(arguments)
        return events

    def end(self, *, is_complete: bool) -> list[Event]:
        """Close what is open; an answer of no text is an empty message."""
        events = [] if self.items or self._open else self._begin_message()
        return events + self._close("completed" if is_complete else "incomplete")

    def _begin_message(self) -> list[Event]:
        if self._open is not None and self._open["type"] == "message":
            return []
        events = self._close("completed")
        self._open = {
            "id": answer_id("msg"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        return [
            *events,
            self._item_event("response.output_item.added"),
            self._part_event("response.content_part.added", _text_part("", [])),
        ]

    def _begin_call(self, call: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        self._open = {
            "id": answer_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": "",
        }
        return [*events, self._item_event("response.output_item.added")]

    def _close(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        text = "".join(self._text)
        self._text = []
        if item["type"] == "message":
            self._logprobs += self._waiting
            part = _text_part(text, self._logprobs)
            place = {"item_id": item["id"], "output_index": len(self.items), "content_index": 0}
            events = [
                {"type": "response.output_text.done", **place, "text": text, "logprobs": self._logprobs},
                self._part_event("response.content_part.done", part),
            ]
            self._open = {**item, "status": status, "content": [part]}
            self._logprobs = []
        else:
            place = {"item_id": item["id"], "output_index": len(self.items)}
            events = [
                {
                    "type": "response.function_call_arguments.done",
                    **place,
                    "name": item["name"],
                    "arguments": text,
                }
            ]
            self._open = {**item, "status": status, "arguments": text}
        self._waiting = []
        events.append(self._item_event("response.output_item.done"))
        self.items.append(self._open)
        self._open = None
        return events

    def _delta(self, kind: str, text: str, *, with_content: bool = False) -> Event:
        assert self._open is not None
        event: Event = {
            "type": kind,
            "item_id": self._open["id"],
            "output_index": len(self.items),
            "delta": text,
        }
        if with_content:
            event |= {"content_index": 0, "logprobs": self._waiting}
            self._logprobs += self._waiting
            self._waiting = []
        return event

    def _item_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items), "item": self._open}

    def _part_event(self, kind: str, part: dict[str, Any]) -> Event:
        assert self._open is not None
        return {
            "type": kind,
            "item_id": self._open["id"],
            "output_index": len(self.items),
            "content_index": 0,
            "part": part,
        }


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def response_head(service: Service, body: ResponsesBody) -> dict[str, Any]:
    """Give a response as it is when nothing was written yet."""
    text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text is not None else {}
    return {
        "id": answer_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": _dumped(body.tool_choice) or "auto",
        "tools": [item.model_dump() for item in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _dumped(choice: str | FlatChosen | FlatAllowed | None) -> Any:
    return choice.model_dump() if isinstance(choice, FlatChosen | FlatAllowed) else choice


def response_usage(usage: Usage) -> dict[str, Any]:
    """Give usage as responses have it; cached_tokens is always there."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
