"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixrt.server.bodies import Breakpoint, ConstrainedBody, Name
from radixrt.server.bodies_tools import MAX_TOOLS, CallBody, CallId, ChatTool, ToolChoice
from radixrt.server.reading import Body


class TextPart(Body):
    """A part of a message. Images, audio and files are not taken: the server fetches and decodes nothing."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class Message(Body):
    """A message. What SDKs send back of their own answers (refusal, annotations, ...) is accepted when empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    name: Name | None = None  # no chat template reads it
    tool_calls: Annotated[list[CallBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: CallId | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ChatBody(ConstrainedBody):
    """A chat request.

    Attributes:
        tool_choice: with "none" the model is not shown the tools either.
        parallel_tool_calls: False: at most one call in an answer.
        max_completion_tokens: as max_tokens, which it replaces.
        reasoning_effort, verbosity: given to the model's template; most templates do not read them.
        chat_template_kwargs: variables that the model's template reads, e.g. enable_thinking.
        continue_final_message: go on writing the last message, which must be the assistant's.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    continue_final_message: bool | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    moderation: None = None
    web_search_options: None = None
