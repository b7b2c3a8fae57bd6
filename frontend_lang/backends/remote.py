"""The road to a server: one request at a time, tried again where the server allows it, errors in radixrt's own words.

RemoteError              the server answered with an error, or with something that is no answer
└── RemoteUnavailable    it may answer the same request later: busy, restarting, connection lost
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import httpx2

from frontend_lang.backends.values import (
    DeadlineExceeded,
    EngineError,
    GrammarDeadEnd,
    GrammarTooCostly,
    InvalidRequest,
    NeverFits,
    PromptTooLong,
    RequestError,
    UnknownModel,
    UnsupportedGrammar,
)

# What an error's code means here; the first two are OpenAI's too.
REQUEST_CODES: Mapping[str, type[RequestError]] = {
    "context_length_exceeded": PromptTooLong,
    "model_not_found": UnknownModel,
    "never_fits": NeverFits,
    "unsupported_grammar": UnsupportedGrammar,
    "grammar_too_costly": GrammarTooCostly,
}
ENGINE_CODES: Mapping[str, type[EngineError]] = {
    "deadline_exceeded": DeadlineExceeded,
    "grammar_dead_end": GrammarDeadEnd,
}
CALLERS_FAULT = (400, 404, 413, 422)
WORTH_ANOTHER_TRY = (408, 409, 425, 429, 500, 502, 503, 504)
FIRST_DELAY_S, MOST_DELAY_S = 0.5, 60.0
MAX_ERROR_CHARACTERS = 500


class RemoteError(EngineError):
    """A server did not give an answer.

    Attributes:
        status: of its HTTP response; None when there was none, or it began well and broke.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RemoteUnavailable(RemoteError):
    """The same request may succeed later.

    Attributes:
        retry_after_s: how long the server asks to wait; None when it does not say.
    """

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, status=status)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Told:
    """An error as a server tells it."""

    message: str
    parameter: str | None = None
    code: str | None = None


class Remote:
    """Own the connections to one server.

    Connections live while a request is under way or inside `async with`: they belong to one event loop, and every
    `run` of a program has its own.

    Args:
        url: http or https, up to where the routes begin.
        api_key: sent as a bearer token.
        timeout_s: longest silence of the server; None = wait for ever.
        max_retries: how often a request is sent again before its first byte of answer came.
        sleep, jitter: how to wait, and a number in [0, 1) that spreads waiting clients.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float | None = 600.0,
        max_retries: int = 2,
        sleep: Callable[[float], Any] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(
                f"url must begin with http:// or https://, got {url!r}", parameter="url", value=url
            )
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or not 0 <= max_retries <= 100:
            raise InvalidRequest(
                f"max_retries must be a whole number in [0, 100], got {max_retries!r}",
                parameter="max_retries",
                value=max_retries,
            )
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._sleep = sleep
        self._jitter = jitter
        self._clients: dict[asyncio.AbstractEventLoop, tuple[httpx2.AsyncClient, int]] = {}

    async def __aenter__(self) -> Self:
        self._retain()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._release()

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """Post a body and give the data of the server-sent events that come back.

        Raises:
            InvalidRequest: the server refused the request itself.
            RemoteError, RemoteUnavailable: see there.
        """
        async with self, self._answer("POST", path, body) as response:
            try:
                async for event in httpx2.EventSource(response):
                    yield event.data
            except httpx2.SSEError as error:
                raise RemoteError(f"{self.url}{path} did not stream: {_said(error)}") from error
            except httpx2.TransportError as error:
                raise RemoteUnavailable(f"{self.url}{path} broke off: {_said(error)}") from error
            except httpx2.DecodingError as error:
                raise _unreadable(f"{self.url}{path}", error) from error

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post a body and give the JSON that comes back; raises like `events`."""
        async with self, self._answer("POST", path, body) as response:
            return await self._json(path, response)

    async def get(self, path: str) -> Any:
        """Give the JSON at a path; raises like `events`."""
        async with self, self._answer("GET", path, None) as response:
            return await self._json(path, response)

    async def _json(self, path: str, response: httpx2.Response) -> Any:
        try:
            content = await response.aread()
        except httpx2.TransportError as error:
            raise RemoteUnavailable(f"{self.url}{path} broke off: {_said(error)}") from error
        except httpx2.DecodingError as error:
            raise _unreadable(f"{self.url}{path}", error) from error
        try:
            return json.loads(content)
        except ValueError as error:
            raise RemoteError(
                f"{self.url}{path} answered with something that is no JSON: {content[:80]!r}"
            ) from error

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncGenerator[httpx2.Response, None]:
        """Give the response to a request once its status is good."""
        client, _ = self._clients[asyncio.get_running_loop()]
        for attempt in range(self._max_retries + 1):
            try:
                response = await self._send(client, method, path, body)
            except RemoteUnavailable as error:
                if attempt == self._max_retries:
                    raise
                await self._sleep(self._delay_s(error.retry_after_s, attempt))
            else:
                async with aclosing(response):
                    yield response
                return

    async def _send(
        self, client: httpx2.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None
    ) -> httpx2.Response:
        try:
            request = client.build_request(method, self.url + path, json=body, headers=self._headers)
            response = await client.send(request, stream=True)
            if response.is_success:
                return response
            async with aclosing(response):
                content = await response.aread()
        except httpx2.TransportError as error:
            raise RemoteUnavailable(f"{self.url}{path} cannot be reached: {_said(error)}") from error
        except httpx2.DecodingError as error:
            raise _unreadable(f"{self.url}{path}", error) from error
        raise self._refusal(path, response, content)

    def _refusal(self, path: str, response: httpx2.Response, content: bytes) -> Exception:
        told = _error_of(content)
        status = response.status_code
        message = f"{self.url}{path} answered {status}: {told.message}"
        if told.code in REQUEST_CODES or told.code in ENGINE_CODES:
            return error_of(replace(told, message=message))
        if status in CALLERS_FAULT:
            return InvalidRequest(message, parameter=told.parameter or "request")
        if status in WORTH_ANOTHER_TRY and response.headers.get("x-should-retry") != "false":
            return RemoteUnavailable(message, status=status, retry_after_s=_retry_after_s(response.headers))
        return RemoteError(message, status=status)

    def _delay_s(self, retry_after_s: float | None, attempt: int) -> float:
        """Give what the server asks for, else a delay that doubles; never more than a minute."""
        if retry_after_s is not None:
            return min(retry_after_s, MOST_DELAY_S)
        return min(FIRST_DELAY_S * float(2**attempt), MOST_DELAY_S) * (1 + self._jitter()) / 2

    def _retain(self) -> None:
        loop = asyncio.get_running_loop()
        client, num_users = self._clients.get(loop) or (
            httpx2.AsyncClient(timeout=httpx2.Timeout(self._timeout_s), follow_redirects=False),
            0,
        )
        self._clients[loop] = (client, num_users + 1)

    async def _release(self) -> None:
        loop = asyncio.get_running_loop()
        client, num_users = self._clients[loop]
        if num_users > 1:
            self._clients[loop] = (client, num_users - 1)
            return
        del self._clients[loop]
        await client.aclose()


async def within(timeout_s: float | None, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Give events until a time after the start.

    Raises:
        DeadlineExceeded: the next one did not come in time. Only waiting for it counts, whatever the reader does.
    """
    loop = asyncio.get_running_loop()
    deadline_s = None if timeout_s is None else loop.time() + timeout_s
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                event = await anext(events, None)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the server had no answer within {timeout_s:g} s") from error
        if event is None:
            return
        yield event


def event_of(data: str) -> Mapping[str, Any]:
    """Parse an event's data; raises RemoteError when it is no JSON object."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise RemoteError(f"the server sent an event that is no JSON: {data[:80]!r}") from error
    if not isinstance(event, Mapping):
        raise RemoteError(f"the server sent an event that is no object: {data[:80]!r}")
    return event


def error_of(told: Told) -> Exception:
    """Give the exception that an error told in mid-stream, or by its code, stands for. Pure."""
    if (request_error := REQUEST_CODES.get(told.code or "")) is not None:
        return request_error(told.message, parameter=told.parameter or "request")
    return ENGINE_CODES.get(told.code or "", RemoteError)(told.message)


def told_by(error: object) -> Told:
    """Read what stands under "error" in a body or an event, whatever dialect it is in. Pure."""
    if not isinstance(error, Mapping):
        return Told(str(error)[:MAX_ERROR_CHARACTERS])
    parameter, code = error.get("param"), error.get("code")
    return Told(
        str(error.get("message", error))[:MAX_ERROR_CHARACTERS],
        parameter if isinstance(parameter, str) else None,
        code if isinstance(code, str) else None,
    )


def _error_of(content: bytes) -> Told:
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if isinstance(body, Mapping):
        return told_by(body.get("error") or body)
    return Told(content.decode("utf-8", "replace")[:MAX_ERROR_CHARACTERS] or "nothing")


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Give the seconds to wait; dates are not read: clocks differ. Pure."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    return None


def _unreadable(place: str, error: Exception) -> RemoteError:
    return RemoteError(f"{place} answered with what cannot be unpacked: {_said(error)}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
