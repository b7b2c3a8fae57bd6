"""What a program's author writes: gen, select, roles and control text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

from pydantic import BaseModel

from frontend_lang.backends import GrammarSpec, InvalidRequest, SamplingParams
from frontend_lang.constraints import CONSTRAINTS, constraint_of
from frontend_lang.nodes import Block, Expression, Gen, RoleBegin, RoleEnd, Select, Text, flatten

_MOST_TOKENS = 1 << 20


class SamplingOptions(TypedDict, total=False):
    """The sampling options of a call or a whole program; SamplingParams says what each means."""

    max_tokens: int
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


class GenOptions(SamplingOptions, total=False):
    """The options of `gen`.

    Attributes:
        seed: the same seed gives the same tokens.
        logprobs: how many alternatives to report per token, see `state.record(name).logprobs`.
        n: only 1; several samples are `state.fork(n)`.
        regex, choices, schema, grammar: at most one constraint on the text. `schema` is a Pydantic model class
            (the value is a validated instance) or a JSON Schema (the value is parsed JSON).
    """

    seed: int | None
    logprobs: int | None
    n: int
    regex: str | None
    choices: Sequence[str] | None
    schema: type[BaseModel] | Mapping[str, Any] | None
    grammar: GrammarSpec | None


def gen(name: str | None = None, **options: Unpack[GenOptions]) -> Gen:
    """Let the model write, and keep the text as variable `name`.

    Everything the caller passes is copied; None means not given. A name is a variable: using it again rebinds it.
    Raises:
        InvalidRequest: unknown option (names the nearest), value out of range, two constraints.
    """
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    _check_known("gen", options, GenOptions.__annotations__)
    if given.pop("n", 1) != 1:
        raise InvalidRequest(
            f"n must be 1 in gen, got {options['n']!r}; state.fork(n) gives several samples of one prefix",
            parameter="n",
            value=options["n"],
        )
    grammar, schema = constraint_of(given)
    sampling = checked_sampling({key: value for key, value in given.items() if key not in CONSTRAINTS})
    return Gen(_checked_name(name), sampling, grammar, schema)


def select(name: str | None = None, choices: Sequence[str] = ()) -> Select:
    """Append the likeliest of several texts, and keep it as variable `name`.

    Each choice is scored as a continuation of the transcript; the one with the highest mean log-probability per
    token wins, the first of equals. `state.distribution(name)` tells how likely each was as a whole.
    Raises:
        InvalidRequest: no choices, an empty one, or two that are equal.
    """
    GrammarSpec.choice(choices)  # the same rules hold
    return Select(_checked_name(name), tuple(choices))


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
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """Give ' Did you mean "x"?' for the nearest known name, or ''. Pure."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""
