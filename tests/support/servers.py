"""Servers for tests: the app on a tiny model in this process, and a real one on a free port."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from radixrt.config import ServerConfig
from radixrt.engine import Engine
from radixrt.server import create_app

ROOT = Path(__file__).parents[2]
START_S = 120


def client(engine: Engine, **options: Any) -> httpx2.AsyncClient:
    """Give a client of a new app over an engine; options are ServerConfig's."""
    app = create_app(engine, ServerConfig(**options))
    return client_of(app)


def client_of(app: Any) -> httpx2.AsyncClient:
    """Give a client of an app in this process."""
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False),
        base_url="http://test",
        timeout=60,
    )


async def at_rest(app: Any) -> None:
    """End an app's threads, and wait for what they were doing for clients that have left, and for what comes of it."""
    service = app.state.service
    for threads in (service._text_threads, service._grammar_threads):
        await asyncio.to_thread(threads.shutdown)
    for _ in range(3):  # a thread's result is handed to the event loop, which hands it on
        await asyncio.sleep(0)


def scope_of(method: str, path: str, *, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Give the ASGI scope of a JSON request, to drive an app message by message."""
    given = {"content-type": "application/json", "host": "test", **(headers or {})}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }


def events(text: str) -> list[Any]:
    """Give the data of a stream's events; [DONE] as that text."""
    found = []
    for part in text.split("\n\n"):
        lines = [line.removeprefix("data: ") for line in part.splitlines() if line.startswith("data: ")]
        if lines:
            found.append(lines[0] if lines == ["[DONE]"] else json.loads("\n".join(lines)))
    return found


@contextmanager
def served(
    model: Path | str, *options: str, log: list[str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `radixrt serve` on a free port; give its URL and its process, which is ended at the end.

    Args:
        log: gets the lines that it prints once it listens, and "" when there are no more.
    """
    process = process_of([sys.executable, "-m", "radixrt", "serve", str(model), "--port", "0", *options])
    try:
        yield url_of(process, log), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def listening(app: Any) -> Iterator[tuple[uvicorn.Server, str]]:
    """Run an app on a free port of 127.0.0.1 in a thread of its own; give the server and its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


def process_of(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a server's process on this checkout; its log can be read."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


def url_of(process: subprocess.Popen[bytes], log: list[str] | None = None) -> str:
    """Wait until a server says where it listens; what it prints from then on is read, and put into the log given."""
    assert process.stderr is not None
    deadline, seen = time.monotonic() + START_S, []
    while time.monotonic() < deadline:
        line = process.stderr.readline().decode()
        seen.append(line)
        if found := re.search(r"serves \S+ at (http://\S+)", line):
            _drain(process, log)
            return found[1]
        if not line:
            break
    raise AssertionError("the server did not start:\n" + "".join(seen))


def _drain(process: subprocess.Popen[bytes], log: list[str] | None) -> None:
    """Read the log on, so that the pipe never fills."""
    stream = process.stderr
    assert stream is not None

    def read() -> None:
        line = b"begin"
        while line:
            line = stream.readline()
            if log is not None:
                log.append(line.decode())

    threading.Thread(target=read, daemon=True).start()
