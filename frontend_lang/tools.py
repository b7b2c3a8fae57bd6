"""Typed Python functions as tools: their schemas, the calls a model may write, and what comes of them."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticSerializationError, to_json

from frontend_lang.backends import InvalidRequest
from frontend_lang.backends.unicode import escaped
from frontend_lang.schemas import NO_SCHEMA, TypeSchema, first_line, portable
from frontend_lang.tool_styles import ToolFormat as ToolFormat
from frontend_lang.waiting import in_thread


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made.

    Attributes:
        arguments: as they were passed, converted to the types of the signature.
        value: what the function gave; None if it raised.
        result: the text that the model sees.
        error: what the function raised, or None.
    """

    name: str
    arguments: Mapping[str, Any]
    value: Any
    result: str
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The end of a conversation with tools: the model's answer and the calls before it, in order."""

    text: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        arguments: checks and converts what the model wrote; its fields are the parameters, in order.
    """

    name: str
    description: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Read a function's name, first line of documentation, and typed parameters.

        Raises:
            InvalidRequest: a parameter has no type, a type that is no JSON data, or cannot be named in a call; or the
                function gives its result in pieces.
        """
        if not inspect.isroutine(function):
            raise InvalidRequest(
                f"each tool must be a function, got {function!r:.80}", parameter="tools", value=function
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise _refused(function, "it is a generator function, which has no one result")
        try:
            hints = typing.get_type_hints(function, include_extras=True)
            parameters = inspect.signature(function).parameters
        except (NameError, TypeError, ValueError) as error:
            raise _refused(function, str(error)) from None
        fields: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise _refused(function, f"parameter {name!r} cannot be passed by name")
            if name not in hints:
                raise _refused(function, f"parameter {name!r} has no type")
            # Pydantic has uses of its own for some names ("schema", "_x"): a parameter's name is its alias.
            hint: Any = Annotated[portable(hints[name]), Field(alias=name)]
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[f"argument_{len(fields)}"] = (hint, default)
        try:
            arguments = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
            arguments.model_json_schema(schema_generator=TypeSchema)
        except NO_SCHEMA as error:
            raise _refused(function, first_line(error)) from None
        description = (inspect.getdoc(function) or "").partition("\n")[0]
        return cls(function.__name__, description, function, arguments, tuple(parameters))

    def schema(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give the JSON Schema of the arguments, and its definitions under names of this tool. Pure."""
        schema = self.arguments.model_json_schema(
            ref_template=f"#/$defs/{self.name}.{{model}}", schema_generator=TypeSchema
        )
        definitions = schema.pop("$defs", {})
        return schema, {f"{self.name}.{name}": item for name, item in definitions.items()}

    def given(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Check and convert what the model wrote; raises ValueError when it does not fit the signature. Pure."""
        values = dict(self.arguments.model_validate(written)).values()
        return dict(zip(self.parameters, values, strict=True))

    async def run(self, given: Mapping[str, Any]) -> Any:
        """Call the function: an async one on this loop, a plain one in a worker thread."""
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**given)
        value = await in_thread(lambda: self.function(**given))
        return await value if inspect.isawaitable(value) else value  # of an async function inside a plain one


@dataclass(frozen=True, slots=True)
class ToolBox:
    """The tools of one `gen`.

    Attributes:
        max_rounds: None = the model makes exactly one call. Else it makes at most so many calls and then answers.
        on_error: "tell" = the model sees what a tool raised; "raise" = the gen fails with it.
        format: how calls are written; None = in the model's own form, where that is known.
    """

    tools: tuple[Tool, ...]
    max_rounds: int | None = None
    on_error: Literal["tell", "raise"] = "tell"
    format: ToolFormat | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ToolBox:
        """Make a box of gen's options `tools`, `max_rounds`, `on_tool_error`, `tool_format`; raises InvalidRequest."""
        functions = options["tools"]
        if not isinstance(functions, Sequence) or not functions:
            raise InvalidRequest("tools must be a list of functions", parameter="tools", value=functions)
        tools = tuple(Tool.of(function) for function in functions)
        if len({tool.name for tool in tools}) != len(tools):
            raise InvalidRequest("tools must have distinct names", parameter="tools", value=functions)
        rounds = options.get("max_rounds")
        if rounds is not None and (isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1):
            raise InvalidRequest(
                f"max_rounds must be a whole number of at least 1, got {rounds!r}",
                parameter="max_rounds",
                value=rounds,
            )
        on_error = options.get("on_tool_error", "tell")
        if on_error not in ("tell", "raise"):
            raise InvalidRequest(
                f'on_tool_error must be "tell" or "raise", got {on_error!r}',
                parameter="on_tool_error",
                value=on_error,
            )
        return cls(tools, rounds, on_error, options.get("tool_format"))

    async def call(self, written: Mapping[str, Any]) -> ToolCall:
        """Run the call that the model wrote: its name and arguments.

        Raises:
            ValueError: the arguments do not fit the signature. Exception: the tool's, with on_error "raise".
        """
        tool = next(tool for tool in self.tools if tool.name == written["name"])
        given = tool.given(written["arguments"])
        try:
            value = await tool.run(given)
        except Exception as error:
            if self.on_error == "raise":
                raise
            told = escaped(f"error: {type(error).__name__}: {error}")
            return ToolCall(tool.name, given, None, told, error)
        return ToolCall(tool.name, given, value, _shown(value))


def describe_tools(tools: Sequence[Callable[..., Any]]) -> str:
    """Give the text that tells a model of its tools, for a system message: one JSON Schema a line. Pure."""
    lines = []
    for tool in map(Tool.of, tools):
        schema = tool.arguments.model_json_schema(schema_generator=TypeSchema)
        about = {"name": tool.name, "description": tool.description, "parameters": schema}
        lines.append(json.dumps({"type": "function", "function": about}, ensure_ascii=False))
    return "You can call these functions:\n" + "\n".join(lines)


def _shown(value: object) -> str:
    """Give a result as the model sees it: text as it is, everything else as JSON if it can be."""
    if isinstance(value, str):
        return escaped(value)
    try:
        return to_json(value).decode()
    except PydanticSerializationError:
        return escaped(str(value))


def _refused(function: Callable[..., Any], why: str) -> InvalidRequest:
    return InvalidRequest(f"{function.__name__} cannot be a tool: {why}", parameter="tools", value=function)
