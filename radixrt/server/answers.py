"""What all answers have in common: ids, usage, details, logprobs, JSON text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fastapi.responses import Response

from radixrt.errors import RequestAborted
from radixrt.explain import PrefixReport
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import FinishReason, TokenLogprob, Usage

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def answer_id(kind: str) -> str:
    """Give a new id, e.g. "chatcmpl-..."."""
    return f"{kind}-{secrets.token_hex(12)}"


def dump(value: Any) -> str:
    """Give compact JSON text."""
    return _ENCODER.encode(value)


def json_response(value: Any) -> Response:
    """Give a response with a JSON body."""
    return Response(dump(value), media_type="application/json")


def finish_name(reason: FinishReason | None) -> str:
    """Give OpenAI's word for why a sample ended.

    Raises:
        RequestAborted: it was given up, which is no end of an answer.
    """
    if reason is None or reason == FinishReason.ABORT:
        raise RequestAborted("the request was aborted")
    return reason.value


def total(usages: Iterable[Usage]) -> Usage:
    """Add the usages of several requests. Pure."""
    found = list(usages)
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in found),
        cached_tokens=sum(usage.cached_tokens for usage in found),
        computed_tokens=sum(usage.computed_tokens for usage in found),
        forced_tokens=sum(usage.forced_tokens for usage in found),
        output_tokens=sum(usage.output_tokens for usage in found),
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    """Give usage as OpenAI's completions have it; cached_tokens is always there."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def usage_notes(usage: Usage) -> dict[str, int]:
    """Give usage for the log."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def details_json(usage: Usage, reports: Iterable[PrefixReport]) -> dict[str, Any]:
    """Give what radixrt.details asks for.

    Args:
        reports: of the prompts, as the cache was before the request ran.
    """
    return {
        "cached_tokens": usage.cached_tokens,
        "computed_tokens": usage.computed_tokens,
        "forced_tokens": usage.forced_tokens,
        "prefixes": [{**asdict(report), "text": str(report)} for report in reports],
    }


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Give a token's text; bytes that are no text by themselves as OpenAI writes them, so that they stay apart."""
    raw = tokenizer.vocab_bytes[token_id]
    try:
        return raw.decode() if raw else tokenizer.token_text(token_id)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprob(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    """Give one token's entry of a chat answer's logprobs."""
    return {
        **_chat_token(tokenizer, entry.token_id, entry.logprob),
        "top_logprobs": [_chat_token(tokenizer, token_id, value) for token_id, value in entry.top],
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.vocab_bytes[token_id]
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": max(logprob, -9999.0),
        "bytes": list(raw) if raw else None,
    }
