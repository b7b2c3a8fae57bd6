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
from types import TracebackType
from typing import Any, Self

import httpx2

from frontend_lang.backends.values import DeadlineExceeded, EngineError, InvalidRequest

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

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post a body and give the JSON that comes back; raises like `events`."""
        async with self, self._answer("POST", path, body) as response:
            return self._json(path, await response.aread())

    async def get(self, path: str) -> Any:
        """Give the JSON at a path; raises like `events`."""
        async with self, self._answer("GET", path, None) as response:
            return self._json(path, await response.aread())

    def _json(self, path: str, content: bytes) -> Any:
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
        raise self._refusal(path, response, content)

    def _refusal(self, path: str, response: httpx2.Response, content: bytes) -> Exception:
        message, parameter = _error_of(content)
        told = f"{self.url}{path} answered {response.status_code}: {message}"
        if response.status_code in CALLERS_FAULT:
            return InvalidRequest(told, parameter=parameter or "request")
        if response.status_code in WORTH_ANOTHER_TRY:
            return RemoteUnavailable(
                told, status=response.status_code, retry_after_s=_retry_after_s(response.headers)
            )
        return RemoteError(told, status=response.status_code)

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


def _error_of(content: bytes) -> tuple[str, str | None]:
    """Give an error body's message and parameter, whatever dialect it is in. Pure."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    match body:
        case {"error": {"message": str(message), "param": str(parameter)}}:
            return message[:MAX_ERROR_CHARACTERS], parameter
        case {"error": {"message": str(message)}} | {"message": str(message)} | {"error": str(message)}:
            return message[:MAX_ERROR_CHARACTERS], None
    return content.decode("utf-8", "replace")[:MAX_ERROR_CHARACTERS] or "nothing", None


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


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
