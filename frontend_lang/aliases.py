"""Names that programs written for SGLang use, so that they run after changing the import.

What has no meaning here is refused with the way to do it; nothing is accepted without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Unpack

from frontend_lang.backends import InvalidRequest
from frontend_lang.branch import Reply
from frontend_lang.builders import GenOptions, SamplingOptions, gen
from frontend_lang.nodes import Gen, RoleBegin, RoleEnd

RUN_OPTIONS = frozenset({"stream", "backend", "max_new_tokens", *SamplingOptions.__annotations__})


def gen_int(
    name: str | None = None, max_tokens: int | None = None, **options: Unpack[GenOptions]
) -> Gen[int]:
    """Let the model write a whole number: `gen(name, type=int)`."""
    return gen(name, max_tokens, type=int, **options)


def gen_string(
    name: str | None = None, max_tokens: int | None = None, **options: Unpack[GenOptions]
) -> Gen[str]:
    """Let the model write text: `gen(name)`."""
    return gen(name, max_tokens, **options)


def system_begin() -> RoleBegin:
    """Begin a system message; `system_end()` ends it. `with state.system():` cannot be left open."""
    return RoleBegin("system")


def system_end() -> RoleEnd:
    """End a system message."""
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    """Begin a user message; `user_end()` ends it."""
    return RoleBegin("user")


def user_end() -> RoleEnd:
    """End a user message."""
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    """Begin an assistant message; `assistant_end()` ends it."""
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    """End an assistant message."""
    return RoleEnd("assistant")


def image(*_: object, **__: object) -> NoReturn:
    """Refuse: the models read text only."""
    raise InvalidRequest("images are not supported: the models read text only", parameter="image")


def video(*_: object, **__: object) -> NoReturn:
    """Refuse: the models read text only."""
    raise InvalidRequest("videos are not supported: the models read text only", parameter="video")


def separate_reasoning(*_: object, **__: object) -> NoReturn:
    """Refuse: say in the program where the reasoning ends."""
    raise InvalidRequest(
        'separate_reasoning is not supported: use two calls, gen("reasoning", stop="</think>") and gen("answer")',
        parameter="separate_reasoning",
    )


def flush_cache(*_: object, **__: object) -> NoReturn:
    """Refuse: the cache belongs to the engine."""
    raise InvalidRequest(
        "flush_cache is not supported: the cache belongs to the engine, see Engine.clear_cache()",
        parameter="flush_cache",
    )


def options_in(kwargs: Mapping[str, Any], known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give those keyword arguments of a run that its function does not take but a run knows. Pure.

    Args:
        known: the function's parameters; None = it takes any.
    """
    if known is None:
        return {}
    return {name: value for name, value in kwargs.items() if name not in known and name in RUN_OPTIONS}


def meta_info(reply: Reply) -> dict[str, Any]:
    """Give what a call cost and how likely its tokens were, under the names SGLang gives them. Pure.

    For select the entries of "input_token_logprobs" and "normalized_prompt_logprobs" are those of the choices, in
    order; a token is (logprob, token id, None).
    """
    record = reply.record
    if record is None:
        return {}
    info: dict[str, Any] = {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": len(record.token_ids),
        "cached_tokens": record.cached_tokens,
        "finish_reason": None if record.finish_reason is None else {"type": str(record.finish_reason)},
    }
    if reply.choices:
        info["normalized_prompt_logprobs"] = [choice.mean for choice in reply.choices]
        info["input_token_logprobs"] = [
            [
                (logprob, token_id, None)
                for token_id, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
            ]
            for choice in reply.choices
        ]
    if record.logprobs:
        info["output_token_logprobs"] = [(entry.logprob, entry.token_id, None) for entry in record.logprobs]
        info["output_top_logprobs"] = [
            [(logprob, token_id, None) for token_id, logprob in entry.top] for entry in record.logprobs
        ]
    return info
