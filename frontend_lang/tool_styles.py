"""How calls of tools, their results and the answer stand in a transcript: as JSON between marks, or in the model's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from frontend_lang.backends import GrammarSpec, InvalidRequest, ToolForm


class ShownTool(Protocol):
    """What of a tool decides how its calls are written."""

    @property
    def name(self) -> str: ...

    def schema(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give the JSON Schema of the arguments, and its definitions under names of this tool."""


class Style(Protocol):
    """How one round of a gen with tools is written and read.

    Attributes:
        before, after: text around what the model writes.
        result_role: role of the message that holds a result, where the transcript has messages.
        result_before, result_after: text around a result in a transcript of plain text.
    """

    @property
    def before(self) -> str: ...
    @property
    def after(self) -> str: ...
    @property
    def result_role(self) -> str: ...
    @property
    def result_before(self) -> str: ...
    @property
    def result_after(self) -> str: ...

    def grammar(
        self, tools: Sequence[ShownTool], *, can_call: bool, can_answer: bool
    ) -> GrammarSpec | None: ...

    def sampling(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the sampling options of a round; raises InvalidRequest for one that cannot be."""

    def read(self, text: str, *, can_call: bool, can_answer: bool) -> dict[str, Any]:
        """Give {"name": ..., "arguments": ...} or {"answer": ...}; raises ValueError when the text is neither."""

    def told(self, result: str) -> str:
        """Give a result as the content of its message."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls and results stand in the transcript. The default is what Hermes and Qwen models were trained on.

    A model that may also answer writes {"answer": "..."} in the place of a call.

    Attributes:
        before, after: text around the JSON of a call: {"name": ..., "arguments": {...}}. Control tokens in it, and in
            the two below, mean themselves.
        arguments_key: "arguments", or what a model was trained to write there ("parameters").
        result_role: role of the message that holds a result, where the transcript has messages.
        result_before, result_after: text around a result in a transcript of plain text.
    """

    before: str = "<tool_call>\n"
    after: str = "\n</tool_call>"
    arguments_key: str = "arguments"
    result_role: str = "tool"
    result_before: str = "\n<tool_response>\n"
    result_after: str = "\n</tool_response>\n"

    def grammar(self, tools: Sequence[ShownTool], *, can_call: bool, can_answer: bool) -> GrammarSpec:
        """Give the constraint of one round: a call, or the final answer where there is one. Pure."""
        kinds: list[dict[str, Any]] = []
        definitions: dict[str, Any] = {}
        for tool in tools if can_call else ():
            arguments, more = tool.schema()
            definitions |= more
            kinds.append(_object({"name": {"const": tool.name}, self.arguments_key: arguments}))
        if can_answer:
            kinds.append(_object({"answer": {"type": "string"}}))
        schema: dict[str, Any] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return GrammarSpec.json_schema({**schema, "$defs": definitions} if definitions else schema)

    def sampling(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the sampling options of a round. Pure."""
        return given

    def read(self, text: str, *, can_call: bool, can_answer: bool) -> dict[str, Any]:
        """Read the JSON; raises ValueError when it is cut off. Pure."""
        written = json.loads(text)
        if "answer" in written:
            return {"answer": written["answer"]}
        return {"name": written["name"], "arguments": written[self.arguments_key]}

    def told(self, result: str) -> str:
        """Give a result as it is. Pure."""
        return result


@dataclass(frozen=True, slots=True)
class ModelStyle:
    """The form that the model's own chat template writes. A model that may also answer does so in free text.

    The model writes the marks of a call itself, which its constraint forces.
    """

    form: ToolForm
    before: str = ""
    after: str = ""
    result_before: str = field(default=ToolFormat().result_before)
    result_after: str = field(default=ToolFormat().result_after)

    @property
    def result_role(self) -> str:
        return self.form.result_role

    def grammar(self, tools: Sequence[ShownTool], *, can_call: bool, can_answer: bool) -> GrammarSpec | None:
        """Give the constraint of one round; None: an answer is any text. Pure."""
        if not can_call:
            return None
        allowed = []
        for tool in tools:
            if self.form.read(self.form.written([(tool.name, "{}")])) != (tool.name, {}):
                raise InvalidRequest(
                    f"the name {tool.name!r} cannot stand in a call of this model's form; tool_format=ToolFormat() "
                    "takes any name",
                    parameter="tools",
                    value=tool.name,
                )
            arguments, definitions = tool.schema()
            schema = {**arguments, "$defs": definitions} if definitions else arguments
            allowed.append((tool.name, GrammarSpec.json_schema(schema)))
        return self.form.grammar(allowed, min_calls=0 if can_answer else 1, max_calls=1)

    def sampling(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let control tokens of the marks be seen. Pure."""
        if not self.form.shown_ids:
            return given
        if given.get("stop"):
            raise InvalidRequest(
                "stop cannot be combined with tools here: the marks of this model's calls are control tokens; "
                "tool_format=ToolFormat() writes them as text",
                parameter="stop",
                value=given["stop"],
            )
        return {**given, "shown_token_ids": self.form.shown_ids}

    def read(self, text: str, *, can_call: bool, can_answer: bool) -> dict[str, Any]:
        """Find the call, else take all as the answer. Pure."""
        found = self.form.read(text) if can_call else None
        if found is not None:
            return {"name": found[0], "arguments": found[1]}
        if not can_answer:
            raise ValueError(f"there is no call in {text[:80]!r}")
        return {"answer": text}

    def told(self, result: str) -> str:
        """Give a result as the template writes it. Pure."""
        return json.dumps(result, ensure_ascii=False) if self.form.is_result_json else result


def style_of(wanted: ToolFormat | None, form: ToolForm | None) -> Style:
    """Give the style of a gen: what it asks for, else the model's own form. Pure.

    A model whose template knows no tools was trained for no form: it gets the JSON of ToolFormat, as its form "hermes" is.
    """
    if wanted is not None:
        return wanted
    if form is None or (form.name == "hermes" and not form.is_rendered):
        return ToolFormat()
    return ModelStyle(form)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
