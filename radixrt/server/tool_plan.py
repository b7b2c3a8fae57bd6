"""Tools and tool_choice -> what the model is shown, what it may write, and who reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from radixrt.errors import GrammarTooCostly, InvalidRequest, RequestError, UnsupportedGrammar, suggest
from radixrt.server.bodies_tools import AllowedChoice, ChosenTool, ToolChoice
from radixrt.server.errors import pointed
from radixrt.server.tool_forms import ToolForm
from radixrt.types import GrammarSpec

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_LOOSE = (UnsupportedGrammar, GrammarTooCostly)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called.

    Attributes:
        pointer: where its parameters stand in the request.
    """

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    is_strict: bool
    pointer: str

    def shown(self) -> dict[str, Any]:
        """Give it as chat templates take it."""
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description or "",
            "parameters": self.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's tools ask of the answer.

    Attributes:
        tools: those that the model is shown.
        grammar: the constraint on the answer.
        has_text: False: the answer is calls and nothing else.
        loose_names: tools that are not strict and whose schema cannot be enforced: their arguments are any object.
    """

    form: ToolForm
    tools: tuple[Tool, ...]
    grammar: GrammarSpec
    has_text: bool
    loose_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Choice:
    names: tuple[str, ...]
    min_calls: int
    max_calls: int | None


def plan_tools(
    form: ToolForm | None,
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    *,
    is_parallel: bool,
    check: Callable[[Tool], GrammarSpec | None],
) -> ToolPlan | None:
    """Plan the calls of an answer; None: no tool may be called. Then the model is shown none either.

    Args:
        is_parallel: False: at most one call in an answer.
        check: gives the constraint of a tool's arguments, see `arguments_of`.
    Raises:
        InvalidRequest: the choice names a tool that is not there, or a tool breaks a rule.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", parameter="tool_choice")
        return None
    _check_names(tools)
    wanted = _chosen(tools, choice, is_parallel=is_parallel)
    if wanted is None:
        return None
    if form is None:
        raise InvalidRequest(
            "the model's chat template writes tool calls in a form that this server does not know; its operator can "
            "choose one with the option tool_format",
            parameter="tools",
        )
    loose: list[str] = []
    allowed: list[tuple[str, GrammarSpec]] = []
    for tool in tools:
        arguments = check(tool)
        if tool.name in wanted.names:
            allowed.append((tool.name, arguments or GrammarSpec.json_object()))
            loose += [tool.name] if arguments is None else []
    grammar = form.grammar(allowed, min_calls=wanted.min_calls, max_calls=wanted.max_calls)
    return ToolPlan(form, tuple(tools), grammar, wanted.min_calls == 0, tuple(loose))


def arguments_of(tool: Tool, check: Callable[[GrammarSpec], object]) -> GrammarSpec | None:
    """Give the constraint on a tool's arguments; None: its schema cannot be enforced, and it is not strict.

    Args:
        check: raises RequestError for a constraint that cannot be enforced.
    Raises:
        RequestError: the schema is none or no object's, or it is strict and cannot be enforced.
    """
    schema = _NO_PARAMETERS if tool.parameters is None else {"type": "object", **tool.parameters}
    if schema["type"] != "object":
        raise InvalidRequest(
            f'the parameters of the tool {tool.name!r} must have "type": "object"',
            parameter=f"{tool.pointer}/type",
            value=schema["type"],
        )
    try:
        spec = GrammarSpec.json_schema(schema)
        check(spec)
    except _LOOSE as error:
        if not tool.is_strict:
            return None
        raise _named(tool, error) from None
    except RequestError as error:
        raise _named(tool, error) from None
    return spec


def _named(tool: Tool, error: RequestError) -> RequestError:
    """Give an error that names the tool and the place in its parameters."""
    found = pointed(error, tool.pointer)
    return type(found)(f"in the tool {tool.name!r}: {found}", parameter=found.parameter, value=found.value)


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            place = tool.pointer.removesuffix("/parameters")
            raise InvalidRequest(f"two tools have the name {tool.name!r}", parameter=f"{place}/name")
        seen.add(tool.name)


def _chosen(tools: Sequence[Tool], choice: ToolChoice | None, *, is_parallel: bool) -> _Choice | None:
    names = tuple(tool.name for tool in tools)
    most = None if is_parallel else 1
    match choice:
        case "none":
            return None
        case None | "auto":
            return _Choice(names, 0, most)
        case "required":
            return _Choice(names, 1, most)
        case ChosenTool():
            _check_known(choice.function.name, names, "tool_choice/function/name")
            return _Choice((choice.function.name,), 1, 1)
        case AllowedChoice():
            allowed = choice.allowed_tools
            for index, item in enumerate(allowed.tools):
                pointer = f"tool_choice/allowed_tools/tools/{index}/function/name"
                _check_known(item.function.name, names, pointer)
            chosen = tuple(dict.fromkeys(item.function.name for item in allowed.tools))
            return _Choice(chosen, int(allowed.mode == "required"), most)


def _check_known(name: str, known: Sequence[str], pointer: str) -> None:
    if name not in known:
        raise InvalidRequest(
            f"tool_choice names the tool {name!r}, which is not in tools.{suggest(name, known)}",
            parameter=pointer,
            value=name,
        )


class ArgumentSchemas:
    """What `arguments_of` found out, for schemas seen lately. Threads may share it.

    Invariant: at most `max_entries` entries, of at most MAX_KEPT_CHARACTERS of schema each.
    """

    MAX_KEPT_CHARACTERS = 1 << 16

    def __init__(self, check: Callable[[GrammarSpec], object], *, max_entries: int = 256) -> None:
        """Args: check: raises RequestError for a constraint that cannot be enforced."""
        self._check = check
        self._max_entries = max_entries
        self._found: dict[tuple[str, bool], GrammarSpec | None] = {}

    def __call__(self, tool: Tool) -> GrammarSpec | None:
        """Give the constraint on a tool's arguments; see `arguments_of`. What is refused is not kept."""
        key = json.dumps(tool.parameters), tool.is_strict
        if key in self._found:
            return self._found[key]
        found = arguments_of(tool, self._check)
        if len(key[0]) <= self.MAX_KEPT_CHARACTERS:
            while len(self._found) >= self._max_entries:
                self._found.pop(next(iter(self._found), key), None)
            self._found[key] = found
        return found


def choice_name(choice: ToolChoice | None) -> Literal["none", "auto", "required", "named"]:
    """Give a choice's kind in one word. Pure."""
    match choice:
        case ChosenTool():
            return "named"
        case AllowedChoice():
            return choice.allowed_tools.mode
        case None:
            return "auto"
        case _:
            return choice
