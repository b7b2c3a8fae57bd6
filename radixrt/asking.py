"""What callers give an engine: prompts, one or many, with the sampling of each; checked before anything is begun."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Any

from radixrt.errors import InvalidRequest
from radixrt.types import SamplingParams

Prompt = str | Seq[int]


def as_prompts(prompt: Prompt | Seq[Prompt]) -> tuple[list[Prompt], bool]:
    """Give the prompts, and whether they are a batch. Pure.

    Raises:
        InvalidRequest: neither text nor token ids nor a list of these, or nothing at all.
    """
    if isinstance(prompt, str):
        return [prompt], False
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Seq):
        raise InvalidRequest(
            f"prompt must be text, token ids or a list of these, got {type(prompt).__name__}",
            parameter="prompt",
            value=prompt,
        )
    items: list[Any] = list(prompt)
    if not items:
        raise InvalidRequest("prompt must have at least one token", parameter="prompt", value=prompt)
    is_batch = isinstance(items[0], str | Seq)
    return (items, True) if is_batch else ([items], False)


def as_sampling(
    sampling: SamplingParams | Seq[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Give the sampling of each prompt. Pure.

    Raises:
        InvalidRequest: neither one for all nor one per prompt.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * num_prompts
    if (
        not isinstance(sampling, Seq)
        or len(sampling) != num_prompts
        or not all(isinstance(item, SamplingParams) for item in sampling)
    ):
        raise InvalidRequest(
            f"sampling must be one SamplingParams, or one per prompt ({num_prompts})",
            parameter="sampling",
            value=sampling,
        )
    return list(sampling)


def check_ids(parameter: str, token_ids: Seq[int], num_ids: int) -> None:
    """Raise InvalidRequest unless all are token ids in [0, num_ids)."""
    try:
        if bool in set(map(type, token_ids)):
            raise TypeError
        values = array("q", token_ids)
    except (TypeError, OverflowError):
        raise InvalidRequest(
            f"{parameter} must hold whole numbers in [0, {num_ids})", parameter=parameter, value=token_ids
        ) from None
    if values and not (min(values) >= 0 and max(values) < num_ids):
        wrong = next(value for value in values if not 0 <= value < num_ids)
        raise InvalidRequest(
            f"{parameter}: token ids must be in [0, {num_ids}), got {wrong}", parameter=parameter, value=wrong
        )
