"""A chat request's plan, and how its samples become messages or deltas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from radixrt.errors import InvalidRequest
from radixrt.server.answers import finish_name
from radixrt.server.bodies_chat import ChatBody
from radixrt.server.constraints import Constraint, constraint_of
from radixrt.server.gate import Visit
from radixrt.server.prompts import chat_prompt, has_breakpoint
from radixrt.server.sampling import sampling_of
from radixrt.server.service import Service
from radixrt.server.tool_plan import Tool, ToolPlan, plan_tools
from radixrt.server.tool_reader import ToolReader
from radixrt.types import MAX_TOKENS_LIMIT, FinishReason, GenerateRequest


class AnswerReader(Protocol):
    """Reads one sample's text as it comes and says what of it goes into the message."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """Take new text; give the deltas it makes."""

    def finish(self) -> list[dict[str, Any]]:
        """Give the deltas of what was held back; no text comes after this."""

    def finish_name(self, reason: FinishReason) -> str:
        """Give OpenAI's word for why the sample ended."""

    def message(self) -> dict[str, Any]:
        """Give the whole message of all that was pushed."""


class TextReader:
    """Read an answer that is text and nothing else."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def push(self, text: str) -> list[dict[str, Any]]:
        self._parts.append(text)
        return [{"content": text}] if text else []

    def finish(self) -> list[dict[str, Any]]:
        return []

    def finish_name(self, reason: FinishReason) -> str:
        return finish_name(reason)

    def message(self) -> dict[str, Any]:
        return {"role": "assistant", "content": "".join(self._parts), "refusal": None, "annotations": []}


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What a chat body asks of the engine, and who reads each sample's answer."""

    request: GenerateRequest
    constraint: Constraint | None
    reader: Callable[[], AnswerReader]
    tools: ToolPlan | None = None


async def plan_chat(service: Service, visit: Visit, body: ChatBody) -> ChatPlan:
    """Turn a chat body into an engine request.

    Raises:
        RequestError: a field breaks a rule.
    """
    service.check_model(body.model)
    constraint = constraint_of(body)
    has_tools = body.tools or body.tool_choice is not None
    tools = await service.in_thread(lambda: _tools(service, body)) if has_tools else None
    if tools is not None:
        if (
            constraint is not None and tools.has_text
        ):  # a constraint on text has no say where only calls are allowed
            raise InvalidRequest(
                f"{constraint.pointer} cannot be combined with tools that may be called: use tool_choice none or required",
                parameter=constraint.pointer,
            )
        constraint = Constraint(tools.grammar, "tools")
    wanted = _wanted_tokens(body)
    sampling = sampling_of(
        body,
        max_tokens=service.config.default_max_tokens if wanted is None else wanted,
        logprobs=_num_logprobs(body),
        grammar=None if constraint is None else constraint.spec,
    )
    tokenizer = service.engine.tokenizer
    reader: Callable[[], AnswerReader] = TextReader
    shown: tuple[Tool, ...] = ()
    if tools is not None:
        reader, shown = partial(ToolReader, tools.form), tools.tools
        stop = sampling.stop if tools.has_text else ()  # it has its say in text
        sampling = replace(sampling, shown_token_ids=tools.form.shown_ids, stop=stop)
        visit.notes.update({"loose_tools": tools.loose_names} if tools.loose_names else {})
    has_calls = bool(shown) or any(item.tool_calls or item.role == "tool" for item in body.messages)

    def encode() -> list[int]:
        form = service.tool_form if has_calls else None
        return chat_prompt(tokenizer, body, form=form, tools=shown)

    prompt_ids = await service.in_thread(encode)
    if wanted is None:
        sampling = service.fitted(sampling, len(prompt_ids))
    terms = service.terms(visit, body, has_breakpoint=has_breakpoint(body.messages))
    request = terms.request(prompt_ids, sampling)
    if tools is not None:
        request = replace(request, call_marks=tools.form.marks)
    return ChatPlan(request, constraint, reader, tools)


def _wanted_tokens(body: ChatBody) -> int | None:
    """Give max_tokens by either of its names; the one that the client used is named if it is wrong."""
    wanted = body.max_completion_tokens
    if wanted is None:
        return body.max_tokens
    if not 1 <= wanted <= MAX_TOKENS_LIMIT:
        raise InvalidRequest(
            f"max_completion_tokens must be in [1, {MAX_TOKENS_LIMIT}], got {wanted}",
            parameter="max_completion_tokens",
        )
    return wanted


def _num_logprobs(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", parameter="top_logprobs")
        return None
    count = body.top_logprobs or 0
    if not 0 <= count <= 20:
        raise InvalidRequest(f"top_logprobs must be in [0, 20], got {count}", parameter="top_logprobs")
    return count


def _tools(service: Service, body: ChatBody) -> ToolPlan | None:
    """Plan the tools of a body. Takes a schema's length of time."""
    given = [
        Tool(
            item.function.name,
            item.function.description,
            item.function.parameters,
            is_strict=bool(item.function.strict),
            pointer=f"tools/{index}/function/parameters",
        )
        for index, item in enumerate(body.tools or ())
    ]
    return plan_tools(
        service.tool_form if given else None,
        given,
        body.tool_choice,
        is_parallel=body.parallel_tool_calls is not False,
        check=service.argument_schemas,
    )
