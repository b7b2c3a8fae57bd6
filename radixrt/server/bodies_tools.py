"""Tools as chat requests write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixrt.server.reading import Body

MAX_TOOLS = 128
# No character that JSON would escape, and none that begins a control token.
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
CallId = Annotated[str, Field(max_length=256)]


class ToolFunction(Body):
    """A function that the model may call.

    Attributes:
        parameters: JSON Schema of an object; missing: the function takes none.
        strict: True: a schema that cannot be enforced is an error. Otherwise arguments under such a schema are
            any JSON object; all other schemas are enforced whether strict or not.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Body):
    """A tool. Only functions: custom tools with grammars of their own are not taken."""

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(Body):
    """The name of a function."""

    name: ToolName


class ChosenTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Body):
    """The tools that may be called; all are shown to the model, so that its prompt stays the same."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Body):
    """A choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | ChosenTool | AllowedChoice


class CalledFunction(Body):
    """A call in an earlier answer; arguments are the text of a JSON object."""

    name: ToolName
    arguments: str


class CallBody(Body):
    """A call in an earlier answer."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients that put streams together leave it in
