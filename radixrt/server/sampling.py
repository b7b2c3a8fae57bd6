"""Sampling fields of a body -> SamplingParams."""

from __future__ import annotations

import re

from radixrt.errors import InvalidRequest
from radixrt.server.bodies import SamplingBody
from radixrt.types import GrammarSpec, SamplingParams

_TOKEN_ID = re.compile(r"[0-9]{1,10}", re.ASCII)
_PLAIN = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def sampling_of(
    body: SamplingBody,
    *,
    max_tokens: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: GrammarSpec | None = None,
) -> SamplingParams:
    """Give the sampling; a field that is missing or null has the default of SamplingParams.

    Raises:
        InvalidRequest: a value is out of its range.
    """
    given = body.model_dump(include=set(_PLAIN), exclude_none=True)
    if given.get("top_k") == -1:  # as others write "all"
        given["top_k"] = 0
    if body.min_tokens is not None and body.min_tokens > max_tokens > 0:
        raise InvalidRequest(
            f"min_tokens must be at most max_tokens, {max_tokens}, got {body.min_tokens}",
            parameter="min_tokens",
        )
    stop = body.stop if body.stop is not None else ()
    return SamplingParams(
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        **given,
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for name in given:
        if not _TOKEN_ID.fullmatch(name):
            raise InvalidRequest(
                f"logit_bias must map token ids to numbers, got {name[:40]!r}", parameter="logit_bias"
            )
    return {int(name): bias for name, bias in given.items()}
