"""The body of /v1/responses. Nothing is kept between requests: what needs a memory is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixrt.server.bodies import Breakpoint, CallBody, Name
from radixrt.server.bodies_tools import MAX_TOOLS, CallId, ToolName
from radixrt.server.reading import Body

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    """A part of a message; an answer's own parts come back with annotations and logprobs, which are not read."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=1024)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=1 << 20)] | None = None
    prompt_cache_breakpoint: Breakpoint | None = None


class InputMessage(Body):
    """A message, or an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(max_length=1024)]
    id: CallId | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # no template reads it


class InputCall(Body):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: str
    id: CallId | None = None
    status: Status | None = None
    namespace: None = None
    caller: None = None
    async_: None = Field(default=None, alias="async")


class InputResult(Body):
    """What a called function gave."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | Annotated[list[InputText], Field(max_length=1024)]
    id: CallId | None = None
    status: Status | None = None


InputItem = InputMessage | InputCall | InputResult


class FlatFormat(Body):
    """The form of the answer; the schema stands beside its name."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Form and length of the answer's text."""

    format: FlatFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FlatTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChosen(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    name: ToolName


class FlatAllowed(Body):
    """The tools that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatChosen], Field(min_length=1, max_length=MAX_TOOLS)]


class Reasoning(Body):
    """How much to think; given to the model's template."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: None = None
    generate_summary: None = None


class StatelessBody(CallBody):
    """Fields of OpenAI's that need what this server has not.

    Attributes:
        store, previous_response_id, conversation, background, prompt: need a memory: the route says so.
        truncation: a prompt that is too long is refused, so "auto" is not taken.
    """

    store: bool | None = None  # type: ignore[assignment]  # checked by the route, which says why
    previous_response_id: CallId | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: Literal["disabled"] | None = None
    max_tool_calls: None = None  # of tools that a server runs; it runs none
    moderation: None = None
    context_management: None = None


class ResponsesBody(StatelessBody):
    """A request for a response.

    Attributes:
        instructions: a system message before the input.
        include: "message.output_text.logprobs" asks for logprobs; "reasoning.encrypted_content" for what this server
            never has.
    """

    n: None = None  # a response is one answer
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4095)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChosen | FlatAllowed | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(max_length=8)
        ]
        | None
    ) = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
