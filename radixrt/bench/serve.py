"""What the HTTP path costs over the engine in this process: time per request, CPU per streamed token.

    the same requests -> [engine in this process] and [server process <- one plain socket per stream] -> differences

The client is a bare socket, so that its own cost stays out of the figures. A chat is rendered and encoded in this process
too. The CPU is that of the server's event loop thread alone: the engine's thread does the same work either way. What a
token takes is the difference of long and short streams: what a request takes besides is told apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radixrt.asking import Prompt
from radixrt.engine import AsyncEngine, Engine
from radixrt.errors import EngineStopped, InvalidRequest
from radixrt.types import SamplingParams

NUM_BLOCKS, BLOCK_REQUESTS = 10, 20  # blocks of the arms take turns
NUM_STREAMS = 16
SHORT_STREAM, LONG_STREAM = 16, 208  # tokens
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


async def time_engine(engine: AsyncEngine, prompt: Callable[[], Prompt]) -> list[float]:
    """Time requests of one token in this process, in seconds; making the prompt counts."""
    sampling = SamplingParams(max_tokens=1, temperature=0)
    seconds: list[float] = []
    for _ in range(BLOCK_REQUESTS):
        started = time.perf_counter()
        await engine.generate(prompt(), sampling)
        seconds.append(time.perf_counter() - started)
    return seconds


@contextmanager
def server(options: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Run a server on a free port; give its host, port and process id.

    Raises:
        EngineStopped: it does not start (its words are on stderr).
    """
    command = [sys.executable, "-m", "radixrt", "serve", "--port", "0"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command.append(option if value else f"--no-{option[2:]}")
        else:
            command += [option, str(value)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"serves .* at http://([^:/]+):([0-9]+)", line):
                break
            sys.stderr.write(line)
        else:
            raise EngineStopped("the server did not start")
        log = process.stderr  # read on: nobody wants a full pipe
        threading.Thread(target=lambda: deque(log, maxlen=0), daemon=True).start()
        yield found[1], int(found[2]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def request_bytes(path: str, body: Mapping[str, Any]) -> bytes:
    """Give an HTTP request. Pure."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    return head.encode() + text


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Read one whole answer, chunked or not; give how many events with text it had.

    Raises:
        EngineStopped: the status is not 200.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise EngineStopped(f"the server answered {head.splitlines()[0].decode()}")
    if b"transfer-encoding: chunked" not in head:
        found = re.search(rb"content-length: ([0-9]+)", head)
        assert found is not None
        await reader.readexactly(int(found[1]))
        return 0
    num_events = 0
    while num_bytes := int(await reader.readline(), 16):
        num_events += (await reader.readexactly(num_bytes + 2)).count(b"data: ")
    await reader.readline()
    return num_events


async def time_requests(host: str, port: int, path: str, body: Mapping[str, Any]) -> list[float]:
    """Time requests one after the other on one connection, in seconds."""
    reader, writer = await asyncio.open_connection(host, port)
    raw, seconds = request_bytes(path, body), []
    for _ in range(BLOCK_REQUESTS):
        started = time.perf_counter()
        writer.write(raw)
        await read_answer(reader)
        seconds.append(time.perf_counter() - started)
    writer.close()
    return seconds


async def stream_cpu_s(host: str, port: int, process_id: int, body: Mapping[str, Any]) -> tuple[float, int]:
    """Run streams side by side; give the CPU seconds of the server's event loop and the number of events."""
    connections = [await asyncio.open_connection(host, port) for _ in range(NUM_STREAMS)]
    before = _loop_cpu_s(process_id)
    for index, (_, writer) in enumerate(connections):
        writer.write(request_bytes("/v1/chat/completions", {**body, "user": str(index)}))
    counts = await asyncio.gather(*(read_answer(reader) for reader, _ in connections))
    used = _loop_cpu_s(process_id) - before
    for _, writer in connections:
        writer.close()
    return used, sum(counts)


def _loop_cpu_s(process_id: int) -> float:
    """Give the CPU time of the process's first thread, which runs the event loop. Counted in ns, not in ticks."""
    return int(Path(f"/proc/{process_id}/task/{process_id}/schedstat").read_text().split()[0]) / 1e9


async def _measure(engine: AsyncEngine, host: str, port: int, process_id: int) -> dict[str, Any]:
    chat = [{"role": "user", "content": PROMPT}]
    tokenizer = engine.engine.tokenizer
    template = tokenizer.chat
    if template is None:
        raise InvalidRequest("bench serve needs a model with a chat template", parameter="model")
    one = {"max_tokens": 1, "temperature": 0}
    seconds: dict[str, list[float]] = {"engine": [], "engine_chat": [], "completion": [], "chat": []}
    cpu_s = 0.0
    for _ in range(NUM_BLOCKS):
        seconds["engine"] += await time_engine(engine, lambda: PROMPT)
        seconds["engine_chat"] += await time_engine(
            engine, lambda: tokenizer.encode_pieces(template.render(chat, add_generation_prompt=True))
        )
        seconds["completion"] += await time_requests(host, port, "/v1/completions", {"prompt": PROMPT, **one})
        before_s = _loop_cpu_s(process_id)
        seconds["chat"] += await time_requests(host, port, "/v1/chat/completions", {"messages": chat, **one})
        cpu_s += _loop_cpu_s(process_id) - before_s
    streamed = {"messages": chat, "ignore_eos": True, "stream": True, "seed": 1}
    short_s, _ = await stream_cpu_s(host, port, process_id, {**streamed, "max_tokens": SHORT_STREAM})
    long_s, num_events = await stream_cpu_s(host, port, process_id, {**streamed, "max_tokens": LONG_STREAM})
    medians = {f"{name}_p50_ms": 1e3 * statistics.median(found) for name, found in seconds.items()}
    return {
        **medians,
        "completion_overhead_ms": medians["completion_p50_ms"] - medians["engine_p50_ms"],
        "chat_overhead_ms": medians["chat_p50_ms"] - medians["engine_chat_p50_ms"],
        "chat_cpu_ms": 1e3 * cpu_s / (NUM_BLOCKS * BLOCK_REQUESTS),
        "num_events": num_events,
        "cpu_ms_per_token": 1e3 * (long_s - short_s) / (NUM_STREAMS * (LONG_STREAM - SHORT_STREAM)),
    }


def measure(options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure both ways, in turns; each has an engine of its own, and one of them is idle at a time."""
    with Engine(**options) as engine, server(options) as (host, port, process):
        return asyncio.run(_measure(AsyncEngine(engine), host, port, process))


def report(measured: Mapping[str, Any]) -> str:
    """Put the figures into words."""
    return "\n".join(
        [
            f"one token, cached prompt: completions {measured['completion_p50_ms']:.2f} ms, engine "
            f"{measured['engine_p50_ms']:.2f} (+{measured['completion_overhead_ms']:.2f}); chat "
            f"{measured['chat_p50_ms']:.2f}, engine {measured['engine_chat_p50_ms']:.2f} "
            f"(+{measured['chat_overhead_ms']:.2f}); medians of {NUM_BLOCKS * BLOCK_REQUESTS}",
            f"a chat request takes {measured['chat_cpu_ms']:.2f} ms of the event loop's CPU",
            f"{NUM_STREAMS} chat streams: {measured['cpu_ms_per_token']:.3f} ms of the event loop's CPU per token (streams of "
            f"{LONG_STREAM} tokens less those of {SHORT_STREAM}; {measured['num_events']} events)",
        ]
    )
