"""Many clients at once, each doing something else: what they may see, and what they did see."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

CHAT = "/v1/chat/completions"
GIVEN_UP = "given up"
ANSWERED = frozenset({"stop", "length", "tool_calls"})
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@dataclass
class Seen:
    """What the clients saw: (kind of request, outcome) -> how often; and what must not happen."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_accepted: int = 0

    def note(self, kind: str, outcome: str, allowed: frozenset[str]) -> None:
        """Take in the one outcome of a request."""
        self.outcomes[kind, outcome] += 1
        if outcome not in allowed:
            self.faults.append(f"{kind}: {outcome}")


def _body(rng: random.Random, **fields: Any) -> dict[str, Any]:
    topic = rng.choice(["cats", "dogs", "birds and what they eat", "x" * rng.randint(1, 200)])
    content = f"Tell me about {topic}. " * rng.randint(1, 4)
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": rng.randint(1, 40),
        "temperature": rng.choice([0, 1]),
        **fields,
    }


def _kinds(rng: random.Random) -> tuple[str, dict[str, Any], frozenset[str]]:
    """Give a kind of request, its body, and the outcomes that it may have."""
    late = frozenset({"deadline_exceeded"})
    made: dict[str, tuple[int, dict[str, Any], frozenset[str]]] = {
        "stream": (6, {"stream": True}, ANSWERED),
        "whole": (3, {}, ANSWERED),
        "leave": (3, {"stream": True, "max_tokens": 400}, ANSWERED | {GIVEN_UP}),
        "cut": (2, {"max_tokens": 400}, ANSWERED | {GIVEN_UP}),
        "deadline": (2, {"stream": rng.random() < 0.5, "max_tokens": 400, "radixrt": {"timeout_s": 0.05}}, ANSWERED | late),
        "bad grammar": (1, {"regex": "(a" + str(rng.randint(0, 9))}, frozenset({"invalid_value", "unsupported_grammar"})),
        "refused schema": (1, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True, "maxItems": rng.randint(2, 6)}}}}, frozenset({"unsupported_grammar"})),
        "too long": (1, {"messages": [{"role": "user", "content": "y" * 9_000}]}, frozenset({"context_length_exceeded"})),
        "no such model": (1, {"model": "other"}, frozenset({"model_not_found"})),
        "schema": (1, {"stream": True, "max_tokens": 60, "structured_outputs": {"json": SCHEMA}}, frozenset({"stop"})),
        "tool": (1, {"stream": True, "max_tokens": 120, "tools": TOOLS, "tool_choice": "required"}, frozenset({"tool_calls"})),
    }  # fmt: skip
    [kind] = rng.choices(list(made), weights=[weight for weight, _, _ in made.values()])
    _, fields, allowed = made[kind]
    return kind, _body(rng, **fields), allowed


async def client(
    http: httpx2.AsyncClient, seed: int, until_s: float, seen: Seen, *, ends: frozenset[str]
) -> None:
    """Ask one thing after the other until the time is over.

    Args:
        ends: outcomes that any request may have besides its own: of a server that stops.
    """
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        kind, body, allowed = _kinds(rng)
        try:
            outcome = await _ask(http, kind, body, rng, seen)
        except httpx2.TransportError as error:
            outcome = f"transport {type(error).__name__}"
        seen.note(kind, outcome, allowed | ends)
        if outcome in ends and outcome not in ANSWERED:
            return


async def _ask(
    http: httpx2.AsyncClient, kind: str, body: dict[str, Any], rng: random.Random, seen: Seen
) -> str:
    if kind == "cut":
        try:
            async with asyncio.timeout(rng.uniform(0.01, 0.5)):
                return _whole(await http.post(CHAT, json=body), seen)
        except TimeoutError:
            return GIVEN_UP
    if not body.get("stream"):
        return _whole(await http.post(CHAT, json=body), seen)
    leaves_after = rng.randint(1, 6) if kind == "leave" else None
    async with http.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            return _whole_text(await response.aread())
        return await _streamed(response, leaves_after, seen)


def _whole(response: httpx2.Response, seen: Seen) -> str:
    if response.status_code != 200:
        return _whole_text(response.content)
    seen.num_accepted += 1
    return str(response.json()["choices"][0]["finish_reason"])


def _whole_text(raw: bytes) -> str:
    return str(json.loads(raw)["error"]["code"])


async def _streamed(response: httpx2.Response, leaves_after: int | None, seen: Seen) -> str:
    """Read a stream; it has one outcome: a finish reason and [DONE], or an error, or the reader left."""
    reasons, errors, num_done, num_events = [], [], 0, 0
    async for line in _lines(response):
        if line is None:
            return "broken off without a word"
        if not line.startswith("data: "):
            continue
        num_events += 1
        if line == "data: [DONE]":
            num_done += 1
            continue
        event = json.loads(line[6:])
        if "error" in event:
            errors.append(str(event["error"]["code"]))
        reasons += [item["finish_reason"] for item in event.get("choices", []) if item["finish_reason"]]
        if leaves_after is not None and num_events > leaves_after and not reasons:
            return GIVEN_UP
    seen.num_accepted += 1
    if errors:
        return errors[0] if len(errors) == 1 and not num_done else f"{errors} and {num_done} [DONE]"
    if len(reasons) == 1 and num_done == 1:
        return str(reasons[0])
    return f"broken: {reasons}, {num_done} [DONE]"


async def _lines(response: httpx2.Response) -> AsyncIterator[str | None]:
    """Give a stream's lines; None if the connection breaks."""
    try:
        async for line in response.aiter_lines():
            yield line
    except httpx2.TransportError:
        yield None


_PROBE = """
import http.client, json, select, sys, time
host, port = sys.argv[1].removeprefix("http://").split(":")
seconds, statuses = [], []
connection = http.client.HTTPConnection(host, int(port), timeout=30)
while not select.select([sys.stdin], [], [], 0.02)[0]:
    started = time.monotonic()
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    statuses.append(response.status)
    seconds.append(time.monotonic() - started)
json.dump([seconds, statuses], sys.stdout)
"""


class Prober:
    """Ask /health again and again, in a process of its own so that the load's clients do not delay it."""

    def __init__(self, url: str) -> None:
        self.seconds: list[float] = []
        self.statuses: set[int] = set()
        command = [sys.executable, "-c", _PROBE, url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def stop(self) -> None:
        """End it and read what it saw."""
        written, _ = self._process.communicate(b"stop", timeout=60)
        self.seconds, statuses = json.loads(written)
        self.statuses = set(statuses)

    def quantile_s(self, share: float) -> float:
        """Give the time that this share did not exceed."""
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))]


_IDLE = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet: two would wait for each other
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
    def log_message(self, *arguments):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def idle_server() -> Iterator[str]:
    """Run a server that does nothing else, in a process of its own: what it takes to answer is the machine's."""
    process = subprocess.Popen([sys.executable, "-c", _IDLE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
