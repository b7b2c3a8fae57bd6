"""What a program's author writes: gen, select, roles and control text."""

from __future__ import annotations

import builtins
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from frontend_lang.backends import GrammarSpec, InvalidRequest, SamplingParams
from frontend_lang.backends.unicode import check_unicode
from frontend_lang.decisions import Decisions, Question, checked_questions
from frontend_lang.limits import CallLimits, Retry, checked_retry, checked_timeout
from frontend_lang.nodes import (
    Block,
    Decide,
    Expression,
    Gen,
    RoleBegin,
    RoleEnd,
    Select,
    Text,
    UseTools,
    flatten,
)
from frontend_lang.selection import Method, checked_method
from frontend_lang.tools import ToolAnswer, ToolBox, ToolCall, ToolFormat
from frontend_lang.values import CONSTRAINTS, check_can_heal, constraint_of

if TYPE_CHECKING:
    from frontend_lang.state import Branches

T = TypeVar("T")

_MOST_TOKENS = 1 << 20


class _Sampling(TypedDict, total=False):
    """The sampling options of a call, all but max_tokens; SamplingParams says what each means."""

    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool


class SamplingOptions(_Sampling, total=False):
    """The sampling options of a whole program."""

    max_tokens: int


class GenOptions(_Sampling, total=False):
    """The options of `gen` that leave the type of its value alone.

    Attributes:
        seed: the same seed gives the same tokens.
        logprobs: how many alternatives to report per token, see `state.record(name).logprobs`.
        heal: let the model write the last token of the prompt again, perhaps as part of a longer one: for prompts
            that end inside a word ("http:"). The tokens taken back are those of the last token of plain text, never
            one that the model wrote; the value and the text are as if nothing had been taken back. Not with schema or
            grammar.
        timeout_s: seconds after which the call fails with DeadlineExceeded, all tries together.
        retries: how often to send the call again after an error on the way (remote runtimes only).
    """

    seed: int | None
    logprobs: int | None
    heal: bool
    timeout_s: float | None
    retries: int | Retry | None


class ConstraintOptions(GenOptions, total=False):
    """The constraints under which the value of a `gen` is still text: at most one.

    Attributes:
        regex: the text matches it as a whole.
        choices: the text is one of these; drawn like any text, unlike `select`, which scores them all.
        grammar: Lark text whose start rule is `start`, or a GrammarSpec.
    """

    regex: str | None
    choices: Sequence[str] | None
    grammar: str | GrammarSpec | None


class ToolOptions(GenOptions, total=False):
    """The options of a `gen` with tools; sampling options and limits hold for each of its requests.

    Attributes:
        on_tool_error: "tell" (default): what a tool raises becomes a result that the model sees, `ToolCall.error` says
            what it was. "raise": the gen fails with it.
        tool_format: how calls and results stand in the transcript. By default in the form that the model's own chat
            template writes, where it writes one that is known, else as ToolFormat() does.
    """

    on_tool_error: Literal["tell", "raise"]
    tool_format: ToolFormat | None


class SelectOptions(TypedDict, total=False):
    """The options of `select`, which says what each means."""

    method: Method | None
    choices_method: Method | None
    temperature: float
    timeout_s: float | None
    retries: int | Retry | None


class DecideOptions(TypedDict, total=False):
    """The options of `decide`: as in GenOptions."""

    timeout_s: float | None
    retries: int | Retry | None


_OTHER_NAMES = {"dtype": "type", "json_schema": "schema"}  # what programs written for SGLang call them
_GEN_OPTIONS = (
    "max_tokens",
    *ConstraintOptions.__annotations__,
    "schema",
    "type",
    "n",
    *_OTHER_NAMES,
    "choices_method",
    "tools",
    "max_rounds",
    "on_tool_error",
    "tool_format",
)
_TOOL_OPTIONS = frozenset({"max_rounds", "on_tool_error", "tool_format"})
_LOGPROB_NAMES = ("return_logprob", "top_logprobs_num")


@overload
def gen(
    name: str | None = ...,
    max_tokens: int | None = ...,
    *,
    tools: Sequence[Callable[..., Any]],
    max_rounds: int,
    **options: Unpack[ToolOptions],
) -> UseTools[ToolAnswer]: ...


@overload
def gen(
    name: str | None = ...,
    max_tokens: int | None = ...,
    *,
    tools: Sequence[Callable[..., Any]],
    **options: Unpack[ToolOptions],
) -> UseTools[ToolCall]: ...


@overload
def gen(
    name: str | None = ..., max_tokens: int | None = ..., *, n: int, **options: Unpack[ConstraintOptions]
) -> Gen[Branches]: ...


@overload
def gen(
    name: str | None = ..., max_tokens: int | None = ..., *, schema: type[T], **options: Unpack[GenOptions]
) -> Gen[T]: ...


@overload
def gen(
    name: str | None = ...,
    max_tokens: int | None = ...,
    *,
    type: builtins.type[T],
    **options: Unpack[GenOptions],
) -> Gen[T]: ...


@overload
def gen(
    name: str | None = ..., max_tokens: int | None = ..., **options: Unpack[ConstraintOptions]
) -> Gen[str]: ...


@overload
def gen(
    name: str | None = ..., max_tokens: int | None = ..., *, schema: Any, **options: Unpack[GenOptions]
) -> Gen[Any]: ...


@overload
def gen(
    name: str | None = ..., max_tokens: int | None = ..., *, type: Any, **options: Unpack[GenOptions]
) -> Gen[Any]: ...


def gen(
    name: str | None = None, max_tokens: int | None = None, **options: Any
) -> Gen[Any] | Select | UseTools[Any]:
    """Let the model write, and keep the text as variable `name`.

    What it gives is also the handle of its value: `person = gen("person", schema=Person); s += person` and then
    `s[person]` is a Person for the type checker too. Everything the caller passes is copied; None means not given. A
    name is a variable: using it again rebinds it.

    Args:
        schema: the text is JSON for this type: a Pydantic model, TypedDict, dataclass, `list[Model]`, ... (the value
            is an instance, and the text has no keys that it does not know), or a JSON Schema as a dict (the value is
            plain JSON data).
        type: the text is one plain scalar, and the value is it: str, int, float, Decimal, bool, date, time, datetime,
            UUID, an Enum or a Literal. Whole numbers have at most 18 digits, others 16 and 15 after the point, years
            1000 to 9999.
        tools: functions with typed parameters; the model calls one: what it writes is constrained to their signatures,
            checked, and the function run (an async one on the program's loop, a plain one in a worker thread); the
            result follows in the transcript. The value is a ToolCall. See ToolOptions.
        max_rounds: with tools: the model calls at most so many times, as long as it wants to, and then answers. The
            value is a ToolAnswer.
        n: number of samples. Above 1 the value is their branches, each with its own text and its own value of `name`;
            the State itself goes on with the first one's text.
        options: GenOptions and ConstraintOptions say what each means.
    Raises:
        InvalidRequest: unknown option (names the nearest), value out of range, two constraints.
    """
    given = {key: value for key, value in (options | {"max_tokens": max_tokens}).items() if value is not None}
    _check_known("gen", options, [*_GEN_OPTIONS, *_LOGPROB_NAMES])
    _translate(given)
    limits = _limits(given)
    if "choices_method" in given:
        return _select_of(name, given)
    if "tools" in given:
        return _tools_of(name, given, limits)
    for option in _TOOL_OPTIONS & given.keys():
        raise InvalidRequest(f"{option} needs tools", parameter=option, value=given[option])
    is_healed, n = given.pop("heal", False), given.pop("n", 1)
    if not isinstance(is_healed, bool):
        raise InvalidRequest(f"heal must be a bool, got {is_healed!r}", parameter="heal", value=is_healed)
    grammar, reader = constraint_of(given)
    if is_healed:
        check_can_heal(grammar)
    options = {key: value for key, value in given.items() if key not in CONSTRAINTS}
    if "min_tokens" in options and "max_tokens" not in options:  # may stand alone: the program has the other
        return Gen(_checked_name(name), checked_sampling(options), grammar, reader, limits, n, is_healed)
    params = SamplingParams(**options, n=n, grammar=grammar)
    sampling = MappingProxyType({key: getattr(params, key) for key in options})
    return Gen(_checked_name(name), sampling, grammar, reader, limits, n, is_healed, params)


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    *,
    method: Method | None = None,
    choices_method: Method | None = None,
    temperature: float = 0.0,
    timeout_s: float | None = None,
    retries: int | Retry | None = None,
) -> Select:
    """Append the likeliest of several texts, and keep it as variable `name`.

    Each choice is scored as a continuation of the transcript. `state.distribution(name)` tells how likely each was as
    a whole, whatever the method.

    Args:
        method: who wins, the first of equals. "token_length_normalised" (default): the highest mean log-probability
            per token.
            "greedy_token": the one reached by taking the likeliest next token every time. "unconditional_likelihood":
            the one that the transcript makes most likelier than it is by itself.
        choices_method: another name for it.
        temperature: must be 0: nothing is drawn.
    Raises:
        InvalidRequest: no choices, an empty one, or two that are equal; no such method.
    """
    GrammarSpec.choice(choices)  # the same rules hold
    if choices_method is not None and method is not None:
        raise InvalidRequest(
            "choices_method is another name of method: give one of them",
            parameter="choices_method",
            value=choices_method,
        )
    if temperature != 0:
        raise InvalidRequest(
            f"temperature must be 0 in select, got {temperature!r}; gen(choices=...) draws one",
            parameter="temperature",
            value=temperature,
        )
    limits = CallLimits(checked_timeout(timeout_s), checked_retry(retries))
    return Select(
        _checked_name(name),
        tuple(choices),
        checked_method(method or choices_method or "token_length_normalised"),
        limits,
    )


def decide(
    name: str | None,
    questions: Mapping[str, Question[Any]],
    *,
    timeout_s: float | None = None,
    retries: int | Retry | None = None,
) -> Decide[Decisions]:
    """Ask several questions about the transcript, and keep the answers as variable `name`.

    The value maps each question's name to its Decision: the likeliest answer and the probability of each. Every
    question is a short text behind the transcript, which is computed once; its answer is one row of logits. Nothing
    of it stays in the transcript.

    Args:
        questions: made by `predicate`, `choice` and `score`.
    Raises:
        InvalidRequest: no questions.
    """
    limits = CallLimits(checked_timeout(timeout_s), checked_retry(retries))
    return Decide(_checked_name(name), checked_questions(questions), limits)


def _translate(given: dict[str, Any]) -> None:
    """Rename the options that programs written for SGLang use.

    Raises:
        InvalidRequest: an option under both of its names; a schema that is no JSON.
    """
    for other, ours in _OTHER_NAMES.items():
        if other in given:
            _check_one_name(given, ours, other)
            value = given.pop(other)
            is_text = other == "json_schema" and isinstance(value, str)
            given[ours] = _parsed(value) if is_text else value
    for other in _LOGPROB_NAMES:
        if other in given:
            _check_one_name(given, "logprobs", other)
    is_wanted, num_top = given.pop("return_logprob", None), given.pop("top_logprobs_num", None)
    if not isinstance(is_wanted, bool | None):
        raise InvalidRequest(
            f"return_logprob must be a bool, got {is_wanted!r}", parameter="return_logprob", value=is_wanted
        )
    if is_wanted is False and num_top:
        raise InvalidRequest(
            "top_logprobs_num has no effect with return_logprob=False",
            parameter="top_logprobs_num",
            value=num_top,
        )
    if is_wanted or num_top:
        given["logprobs"] = num_top or 0


def _check_one_name(given: Mapping[str, Any], ours: str, other: str) -> None:
    if ours in given:
        raise InvalidRequest(
            f"{other} is another name of {ours}: give one of them", parameter=other, value=given[other]
        )


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(
            f"json_schema must be JSON: {error}", parameter="json_schema", value=schema
        ) from None


def _tools_of(name: str | None, given: dict[str, Any], limits: CallLimits) -> UseTools[Any]:
    refused = [option for option in (*CONSTRAINTS, "n", "heal") if option in given]
    if refused:
        raise InvalidRequest(
            f"tools cannot be combined with {refused[0]}", parameter=refused[0], value=given[refused[0]]
        )
    box = ToolBox.of({option: given.pop(option) for option in ("tools", *_TOOL_OPTIONS) if option in given})
    return UseTools(_checked_name(name), checked_sampling(given), box, limits)


def _limits(given: dict[str, Any]) -> CallLimits:
    return CallLimits(
        checked_timeout(given.pop("timeout_s", None)), checked_retry(given.pop("retries", None))
    )


def _select_of(name: str | None, given: dict[str, Any]) -> Select:
    """Make the select that `gen(choices=..., choices_method=...)` means; no other option would have an effect."""
    method, choices = given.pop("choices_method"), given.pop("choices", ())
    given = {key: value for key, value in given.items() if (key, value) != ("temperature", 0)}
    if given:
        raise InvalidRequest(
            f"choices_method scores the choices: {next(iter(given))} has no effect on it",
            parameter=next(iter(given)),
            value=next(iter(given.values())),
        )
    return select(name, choices, method=method)


def role(name: str, *parts: str | Expression) -> Block:
    """Make a chat message of one or several parts in the model's own template.

    Raises:
        InvalidRequest: a message inside a message.
    """
    nodes = tuple(node for part in parts for node in flatten(part))
    for node in nodes:
        if isinstance(node, RoleBegin | RoleEnd):
            raise InvalidRequest(
                f"{node.role}(...) cannot stand inside {name}(...)", parameter="role", value=node.role
            )
    return Block((RoleBegin(name), *nodes, RoleEnd(name)))


def system(*parts: str | Expression) -> Block:
    """Make a system message."""
    return role("system", *parts)


def user(*parts: str | Expression) -> Block:
    """Make a user message."""
    return role("user", *parts)


def assistant(*parts: str | Expression) -> Block:
    """Make an assistant message; usually holds a `gen`."""
    return role("assistant", *parts)


def control(text: str) -> Text:
    """Make text in which control tokens ("<|im_end|>") mean themselves.

    In all other text of a program they are plain characters, so that data cannot pose as a message. A transcript
    that starts with control text gets no begin-of-sequence token by itself.
    """
    return Text(text, is_control=True)


def checked_sampling(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a read-only copy of sampling options, each checked alone.

    Raises:
        InvalidRequest: a value out of range.
    """
    known = {item.name for item in fields(SamplingParams)}
    given = {name: value for name, value in options.items() if name in known}
    params = SamplingParams(**{"max_tokens": _MOST_TOKENS, **given})
    return MappingProxyType({name: getattr(params, name) for name in given})


def check_program_sampling(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a read-only copy of a program's sampling options.

    Raises:
        InvalidRequest: unknown option (names the nearest) or value out of range.
    """
    _check_known("a program", options, SamplingOptions.__annotations__)
    return checked_sampling(options)


def _check_known(what: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for name in options:
        if name not in known:
            raise InvalidRequest(
                f"{what} has no option {name!r}.{nearest(name, known)}", parameter=name, value=options[name]
            )


def _checked_name(name: object) -> str | None:
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidRequest(f"name must be a non-empty string, got {name!r}", parameter="name", value=name)
    if name is not None:
        check_unicode(name, "name")
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """Give ' Did you mean "x"?' for the nearest known name, or ''. Pure."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""
