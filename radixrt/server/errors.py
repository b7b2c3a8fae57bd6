"""Exceptions -> statuses and bodies, in one place.

Every error has the body {"error": {"message", "type", "param", "code"}}. What the caller did wrong is told in full;
what failed in here is told in general words, and the log has the rest under the request's id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from radixrt.errors import (
    DeadlineExceeded,
    EngineStopped,
    GrammarDeadEnd,
    GrammarTooCostly,
    InvalidRequest,
    NeverFits,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    RequestError,
    UnknownModel,
    UnsupportedGrammar,
)

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARACTERS = 2_000
# OpenAI's clients repeat a request that failed with 408, 409, 429 or 5xx, unless this header says otherwise.
NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told: the status, the four fields of the body, and headers."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Give the JSON body."""
        message = self.message[:MAX_MESSAGE_CHARACTERS]
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Give the whole response."""
        text = json.dumps(
            self.body(), ensure_ascii=True
        )  # ASCII: a lone surrogate of the request stays legal
        return Response(text, self.status, headers=dict(self.headers), media_type="application/json")


class Refusal(Exception):
    """A request is refused before it reaches the engine."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def refused(status: int, message: str, *, code: str, param: str | None = None, **headers: str) -> Refusal:
    """Give the refusal with this status; headers by name, _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Refusal(Failure(status, message, _type(status), param, code, named))


def _type(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    if status in named:
        return named[status]
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


_REQUEST_CODES: dict[type[RequestError], tuple[int, str]] = {
    QueueFull: (429, "queue_full"),
    UnknownModel: (404, "model_not_found"),
    PromptTooLong: (400, "context_length_exceeded"),
    NeverFits: (400, "never_fits"),
    UnsupportedGrammar: (400, "unsupported_grammar"),
    GrammarTooCostly: (400, "grammar_too_costly"),
    InvalidRequest: (400, "invalid_value"),
}


def failure_of(error: BaseException) -> Failure:
    """Give what a client is told about an exception. Pure."""
    if isinstance(error, Refusal):
        return error.failure
    if isinstance(error, RequestError):
        status, code = next(
            (found for kind, found in _REQUEST_CODES.items() if isinstance(error, kind)),
            (400, "invalid_value"),
        )
        headers = {"retry-after": str(RETRY_AFTER_S)} if status == 429 else {}
        return Failure(status, str(error), _type(status), error.parameter, code, headers)
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, DeadlineExceeded):
        return Failure(504, str(error), "server_error", "timeout_s", "deadline_exceeded", NO_RETRY)
    if isinstance(error, EngineStopped):
        message = "the server is stopping or its engine has died"
        return Failure(503, message, "server_error", None, "engine_stopped", {"retry-after": "5"})
    if isinstance(error, GrammarDeadEnd):
        message = "the constraint left no token to choose"
        return Failure(500, message, "server_error", None, "grammar_dead_end", NO_RETRY)
    if isinstance(error, RequestAborted):
        return Failure(499, "the request was aborted", "server_error", None, "aborted", NO_RETRY)
    return Failure(
        500,
        "the server failed on this request; its log has the reason",
        "server_error",
        None,
        "internal_error",
    )


def _of_http(error: HTTPException) -> Failure:
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    code = codes.get(error.status_code, "invalid_request")
    messages = {404: "there is no such route", 405: "the route does not take this method"}
    message = messages.get(error.status_code, str(error.detail))
    return Failure(
        error.status_code, message, _type(error.status_code), None, code, dict(error.headers or {})
    )


_CONSTRAINT_NAMES = ("grammar", "regex", "lark", "ebnf", "choices", "schema", "tags")


def pointed(error: RequestError, pointer: str, *, is_inner: bool = False) -> RequestError:
    """Give an error about a constraint with its parameter under `pointer`, where the client wrote it. Pure.

    Args:
        is_inner: the whole parameter is a place inside of what stands at `pointer`.
    """
    if is_inner:
        return type(error)(str(error), parameter=f"{pointer}/{error.parameter}", value=error.value)
    name, _, rest = error.parameter.partition("/")
    if name and name not in _CONSTRAINT_NAMES:
        return error
    outer = f"{pointer}/{rest}" if rest else pointer
    return type(error)(str(error), parameter=outer, value=error.value)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every expected exception of a route with its body; the gate answers the others."""

    async def answer(_request: Request, error: Exception) -> Response:
        return failure_of(error).response()

    for kind in (Refusal, RequestError, HTTPException):
        app.add_exception_handler(kind, answer)
