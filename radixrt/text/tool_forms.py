"""The forms in which models write tool calls, and which one a model's template writes.

    hermes    <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>      (also Qwen)
    llama3    {"name": "f", "parameters": {...}}
    mistral   [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]   or   [TOOL_CALLS]f[ARGS]{...}

The exact characters are taken from what the model's own template writes for a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from radixrt.errors import InvalidRequest
from radixrt.types import CallMarks, GrammarSpec, StructuralTag, TextPiece

FormName = Literal["hermes", "llama3", "mistral"]
NAME_PATTERN = r"[A-Za-z0-9_.:/-]{1,128}"
MAX_HEAD_CHARACTERS = 512

FormChoice = Literal["auto", "hermes", "llama3", "mistral"]


class FormChat(Protocol):
    """The part of a chat template from which a form is read."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[TextPiece]: ...

    def open_role(self, history: Sequence[Mapping[str, str]], role: str) -> tuple[str, str]: ...


class FormTokenizer(Protocol):
    """The part of a tokenizer from which a form is read."""

    @property
    def chat(self) -> FormChat | None: ...

    @property
    def special_ids(self) -> AbstractSet[int]: ...

    def token_text(self, token_id: int) -> str: ...


_PROBE, _OTHER = "probe_function", "other_function"
_VALUE = "probe_value"
_RESULT = 'probe "result"'
_ARGUMENTS = rf'\{{"key": ?"{_VALUE}"\}}'
_WRITTEN: tuple[tuple[FormName, str], ...] = (
    (
        "hermes",
        rf'(?P<before><tool_call>\s*\{{"name": ?"){_PROBE}(?P<between>", ?"arguments": ?){_ARGUMENTS}(?P<after>\}}\s*</tool_call>)',
    ),
    ("llama3", rf'(?P<before>\{{"name": ?"){_PROBE}(?P<between>", ?"parameters": ?){_ARGUMENTS}(?P<after>\}})'),
    ("mistral", rf"(?P<before>\[TOOL_CALLS\] ?){_PROBE}(?P<between>\[ARGS\]){_ARGUMENTS}(?P<after>)"),
    (
        "mistral",
        rf'(?P<before>\[TOOL_CALLS\] ?)(?P<list>\[)\{{"name": ?"{_PROBE}", ?"arguments": ?{_ARGUMENTS}(?:, ?"id": ?"\w+")?\}}\]',
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How calls are written.

    Attributes:
        trigger: what begins a call; it does not occur in the text around calls.
        before, between, after: what stands before a call's name, between name and arguments, after these. Of a list:
            `before` is what stands before its bracket, the others are empty.
        separator: between two calls that follow each other.
        is_list: one mark with a JSON list of calls.
        max_calls: 1 if the template takes one call in a message only.
        is_rendered: the template writes tools and calls; otherwise the server writes them into the messages.
        shown_ids: the control tokens in the marks: a reader must see them.
        result_role: the role whose message holds the result of a call; "user" where the template can put none of its
            own behind a message that it was not told to be a call.
        is_result_json: the template writes results as JSON text.
    """

    name: FormName
    trigger: str
    before: str
    between: str = ""
    after: str = ""
    separator: str = ""
    is_list: bool = False
    max_calls: int | None = None
    is_rendered: bool = False
    shown_ids: tuple[int, ...] = ()
    result_role: str = "user"
    is_result_json: bool = False

    @classmethod
    def of(cls, tokenizer: FormTokenizer, wanted: FormChoice = "auto") -> ToolForm | None:
        """Give the form of a model's calls; None: its template writes them in a form that is not known here.

        A template that knows no tools gets the form hermes, which it does not write itself. So does a template that
        writes another form than the wanted one. Runs the template a few times.
        """
        text = _rendered(tokenizer, [_PROBE])
        knows_tools = text is not None and _VALUE in text
        found = _read_form(text) if text is not None and knows_tools else None
        if found is not None and wanted in ("auto", found.name):
            return _shown(tokenizer, _with_results(tokenizer, _with_two(tokenizer, found)))
        if wanted == "auto" and knows_tools:
            return None
        return _shown(tokenizer, PLAIN_FORMS["hermes" if wanted == "auto" else wanted])

    def grammar(
        self, tools: Sequence[tuple[str, GrammarSpec]], *, min_calls: int, max_calls: int | None
    ) -> GrammarSpec:
        """Give the constraint on an answer that may call these functions: (name, constraint of its arguments).

        Without a least number of calls there may be text around them, otherwise there are only calls.
        """
        limits = [limit for limit in (max_calls, self.max_calls) if limit is not None]
        most = min(limits) if limits else None
        has_text = min_calls == 0
        if self.is_list:
            content = GrammarSpec.json_schema(_list_schema(tools, max_calls=most))
            tags, most = [StructuralTag(self.before, content, "")], 1
        else:
            tags = [
                StructuralTag(f"{self.before}{name}{self.between}", arguments, self.after)
                for name, arguments in tools
            ]
        return GrammarSpec.structural(
            tags,
            triggers=[self.trigger] if has_text else [],
            min_tags=min_calls,
            max_tags=most,
            free_text=has_text,
            separator="" if has_text or most == 1 else self.separator,
        )

    @property
    def head(self) -> re.Pattern[str]:
        """Match what begins a call, up to its arguments; group 1 is its name."""
        if self.is_list:
            return re.compile(rf'{re.escape(self.before)}\[\{{"name": ?"({NAME_PATTERN})", ?"arguments":')
        return re.compile(f"{re.escape(self.before)}({NAME_PATTERN}){re.escape(self.between)}")

    @property
    def next_head(self) -> re.Pattern[str] | None:
        """Match what leads from one call of a list to the next; None if calls are not in a list."""
        if not self.is_list:
            return None
        return re.compile(rf'\}}, ?\{{"name": ?"({NAME_PATTERN})", ?"arguments":')

    @property
    def marks(self) -> CallMarks:
        """Give what tells calls from the text around them."""
        is_json = self.trigger.startswith("{")
        return CallMarks(
            begin=self.trigger,
            num_before_json=0 if is_json else len(self.trigger),
            opener="[" if self.is_list else "{",
            end=self.after.removeprefix("}"),
        )

    @property
    def tail(self) -> str:
        """Give what ends the last call of a list, or every call."""
        return "}]" if self.is_list else self.after

    def read(self, text: str) -> tuple[str, Any] | None:
        """Give name and arguments of the first call in a whole answer; None when there is none.

        Raises:
            ValueError: the call is not whole.
        """
        head = self.head.search(text)
        if head is None:
            return None
        rest = text[head.end() :].lstrip(" ")
        arguments, end = json.JSONDecoder().raw_decode(rest)
        if not rest[end:].startswith("}" if self.is_list else self.after):
            raise ValueError(f"the call of {head[1]} is not whole")
        return head[1], arguments

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write calls: (name, text of the arguments)."""
        if self.is_list:
            items = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
            return f"{self.before}[{', '.join(items)}]"
        texts = [f"{self.before}{name}{self.between}{arguments}{self.after}" for name, arguments in calls]
        return self.separator.join(texts)


PLAIN_FORMS: dict[FormName, ToolForm] = {
    "hermes": ToolForm(
        "hermes",
        "<tool_call>",
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
        separator="\n",
    ),
    "llama3": ToolForm("llama3", '{"name": "', '{"name": "', '", "parameters": ', "}", separator="; "),
    "mistral": ToolForm("mistral", "[TOOL_CALLS]", "[TOOL_CALLS] ", is_list=True),
}


def _read_form(text: str) -> ToolForm | None:
    for name, pattern in _WRITTEN:
        if found := re.search(pattern, text):
            parts = found.groupdict()
            before, is_list = parts["before"], "list" in parts
            trigger = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(name, before)
            return ToolForm(
                name,
                trigger,
                before,
                parts.get("between") or "",
                parts.get("after") or "",
                separator=PLAIN_FORMS[name].separator,
                is_list=is_list,
                is_rendered=True,
            )
    return None


def _with_two(tokenizer: FormTokenizer, form: ToolForm) -> ToolForm:
    """Learn from a message with two calls what stands between them, or that there may be only one."""
    text = _rendered(tokenizer, [_PROBE, _OTHER])
    if text is None or _OTHER not in text.rpartition(_PROBE)[2]:
        return replace(form, max_calls=1)
    if form.is_list:
        return form
    found = re.search(rf"{_ARGUMENTS}{re.escape(form.after)}(\W*?){re.escape(form.before)}{_OTHER}", text)
    return form if found is None else replace(form, separator=found[1])


def _with_results(tokenizer: FormTokenizer, form: ToolForm) -> ToolForm:
    """Learn from a message with a result how results are written."""
    text = _rendered(tokenizer, [_PROBE], result=_RESULT)
    if text is None or tokenizer.chat is None:
        return form
    history = [{"role": role, "content": ""} for role in ("user", "assistant")]
    try:
        tokenizer.chat.open_role(history, "tool")
        tokenizer.chat.open_role([*history, {"role": "tool", "content": ""}], "assistant")
    except InvalidRequest:
        return form
    return replace(form, result_role="tool", is_result_json=json.dumps(_RESULT) in text)


def _shown(tokenizer: FormTokenizer, form: ToolForm) -> ToolForm:
    marks = "\n".join((form.before, form.between, form.after, form.separator))
    names = {token_id: tokenizer.token_text(token_id) for token_id in tokenizer.special_ids}
    ids = [token_id for token_id, name in names.items() if name and name in marks]
    return replace(form, shown_ids=tuple(sorted(ids)))


def _rendered(tokenizer: FormTokenizer, names: Sequence[str], *, result: str | None = None) -> str | None:
    """Render a chat in which these functions are called; None if the template refuses it.

    Args:
        result: of the first call; None: its message is not there.
    """
    if tokenizer.chat is None:
        return None
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
        for name in (_PROBE, _OTHER)
    ]
    calls: list[dict[str, Any]] = [
        {
            "id": f"probe{index:04}",
            "type": "function",
            "function": {"name": name, "arguments": {"key": _VALUE}},
        }
        for index, name in enumerate(names)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    if result is not None:
        messages.append({"role": "tool", "content": result, "tool_call_id": calls[0]["id"], "name": names[0]})
    try:
        pieces = tokenizer.chat.render(messages, tools=tools)
    except InvalidRequest:
        return None
    return "".join(piece.text for piece in pieces)


def _list_schema(tools: Sequence[tuple[str, GrammarSpec]], *, max_calls: int | None) -> dict[str, Any]:
    """Give the schema of a list of calls. Each arguments' schema has its own $id, so that its references hold."""
    items = []
    for index, (name, arguments) in enumerate(tools):
        schema = {"type": "object"} if arguments.kind == "json_object" else arguments.payload()
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {**schema, "$id": f"tool:{index}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    limits = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "minItems": 1, **limits, "items": {"anyOf": items}}
