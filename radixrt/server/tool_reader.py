"""Read tool calls out of an answer while it is written."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from radixrt.server.answers import finish_name
from radixrt.text.json_end import JsonEnd
from radixrt.text.tool_forms import MAX_HEAD_CHARACTERS, ToolForm
from radixrt.types import FinishReason

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class ReadCall:
    """A call as far as it was read."""

    call_id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class ToolReader:
    """Read one sample's answer: text, and calls in one form. Its text is under the form's constraint.

    White space before a call and after the last one belongs to nobody. A text without calls is given as it is.
    """

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._head = form.head
        self._next_head = form.next_head
        self._buffer = ""
        self._content: list[str] = []
        self._calls: list[ReadCall] = []
        self._end: JsonEnd | None = None
        self._state: Callable[[list[dict[str, Any]]], bool] = self._read_text

    def push(self, text: str) -> list[dict[str, Any]]:
        """Take new text; give the deltas it makes."""
        self._buffer += text
        deltas: list[dict[str, Any]] = []
        while self._buffer and self._state(deltas):
            pass
        return _joined(deltas)

    def finish(self) -> list[dict[str, Any]]:
        """Give what was held back. A call that was cut off before its name was whole is nothing."""
        rest, self._buffer = self._buffer, ""
        deltas: list[dict[str, Any]] = []
        if self._state == self._read_text and (rest.strip() or not self._calls):
            self._tell(rest, deltas)
        return deltas

    def finish_name(self, reason: FinishReason) -> str:
        """Give OpenAI's word for why the sample ended."""
        name = finish_name(reason)
        return "tool_calls" if self._calls and name == "stop" else name

    def message(self) -> dict[str, Any]:
        """Give the whole message."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "annotations": [],
        }
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self._calls
            ]
        return message

    # -- states: each takes something off the buffer and tells whether there may be more to do ---------------

    def _read_text(self, deltas: list[dict[str, Any]]) -> bool:
        trigger, text = self._form.trigger, self._buffer
        at = text.find(trigger)
        if at >= 0:
            self._tell(text[:at].rstrip(), deltas)
            self._buffer = text[at:]
            self._state = self._read_head
            return True
        held = next(
            (
                length
                for length in range(min(len(trigger) - 1, len(text)), 0, -1)
                if trigger.startswith(text[-length:])
            ),
            0,
        )
        sure = text[: len(text) - held].rstrip()  # white space may stand before a call
        if sure:
            self._tell(sure, deltas)
            self._buffer = text[len(sure) :]
        return False

    def _read_head(self, deltas: list[dict[str, Any]]) -> bool:
        found = self._head.match(self._buffer)
        if found is None:
            if len(self._buffer) > MAX_HEAD_CHARACTERS:  # not under the constraint: it is text
                self._tell(self._buffer[:1], deltas)
                self._buffer = self._buffer[1:]
                self._state = self._read_text
                return True
            return False
        self._open(found[1], deltas)
        self._buffer = self._buffer[found.end() :]
        return True

    def _read_arguments(self, deltas: list[dict[str, Any]]) -> bool:
        assert self._end is not None
        if not self._calls[-1].parts:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
        length = self._end.find(self._buffer)
        taken = self._buffer if length is None else self._buffer[:length]
        self._calls[-1].parts.append(taken)
        deltas.append({"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": taken}}]})
        self._buffer = self._buffer[len(taken) :]
        if length is not None:
            self._state = self._read_tail
            if not self._form.tail:
                self._state = self._read_text
        return length is not None

    def _read_tail(self, deltas: list[dict[str, Any]]) -> bool:
        tail = self._form.tail
        if self._buffer.startswith(tail):
            self._buffer = self._buffer[len(tail) :]
            self._state = self._read_text
            return True
        if self._next_head is not None and (found := self._next_head.match(self._buffer)):
            self._open(found[1], deltas)
            self._buffer = self._buffer[found.end() :]
            return True
        return False

    # -- what comes of it ------------------------------------------------------------------------------------

    def _open(self, name: str, deltas: list[dict[str, Any]]) -> None:
        call = ReadCall(new_call_id(self._form), name)
        self._calls.append(call)
        function = {"name": name, "arguments": ""}
        opened = {
            "index": len(self._calls) - 1,
            "id": call.call_id,
            "type": "function",
            "function": function,
        }
        deltas.append({"tool_calls": [opened]})
        self._end = JsonEnd()
        self._state = self._read_arguments

    def _tell(self, text: str, deltas: list[dict[str, Any]]) -> None:
        if text:
            self._content.append(text)
            deltas.append({"content": text})


def _joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbours that say more of the same, so that a chunk makes few events. Pure."""
    found: list[dict[str, Any]] = []
    for delta in deltas:
        last = found[-1] if found else {}
        if "content" in delta and "content" in last:
            found[-1] = {"content": last["content"] + delta["content"]}
        else:
            found.append(delta)
    return found


def new_call_id(form: ToolForm) -> str:
    """Give a new id; Mistral's templates want nine letters and digits."""
    if form.name == "mistral":
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def parse_arguments(text: str) -> dict[str, Any]:
    """Give the object that a call's arguments are.

    Raises:
        ValueError: it is no JSON object.
    """
    value = json.loads(text or "{}", parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
