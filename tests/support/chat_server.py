"""A small server that speaks the OpenAI chat protocol and answers from a script, for tests on 127.0.0.1."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = "[DONE]"


@dataclass
class Answer:
    """What to send: a status with headers and body, or events.

    Attributes:
        is_cut: promise more bytes than are sent, then hang up.
        wait: called before each event.
    """

    events: list[Any] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    content_type: str = "text/event-stream"
    is_cut: bool = False
    wait: Callable[[], object] = lambda: None


def chat(*texts: str, usage: dict[str, Any] | None = None, reason: str = "stop", **changes: Any) -> Answer:
    """Make a streamed answer of one sample per text, two characters at a time."""
    events: list[Any] = []
    for index, text in enumerate(texts):
        events.append({"choices": [{"index": index, "delta": {"role": "assistant", "content": ""}}]})
        events += [
            {"choices": [{"index": index, "delta": {"content": text[start : start + 2]}}]}
            for start in range(0, len(text), 2)
        ]
        events.append({"choices": [{"index": index, "delta": {}, "finish_reason": reason}]})
    events.append({"choices": [], "usage": usage or {"prompt_tokens": 7, "completion_tokens": 3}})
    return Answer([*events, DONE], **changes)


@dataclass
class ChatServer:
    """Give the answers in turn, the last one for ever; keep what was asked."""

    answers: list[Answer]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_hung_up: int = 0
    info: dict[str, Any] = field(default_factory=dict)  # what every GET gives

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers["content-length"])
        self.bodies.append(json.loads(handler.rfile.read(length)))
        self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        answer = self.answers[min(len(self.bodies), len(self.answers)) - 1]
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        if answer.status != 200:
            content = json.dumps(answer.body).encode()
            handler.send_header("content-length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
            return
        handler.send_header("content-type", answer.content_type)
        handler.send_header("connection", "close")
        if answer.is_cut:
            handler.send_header("content-length", "1000000")
        handler.end_headers()
        handler.close_connection = True
        try:
            for event in answer.events:
                answer.wait()
                data = event if isinstance(event, str) else json.dumps(event)
                handler.wfile.write(f"data: {data}\n\n".encode())
                handler.wfile.flush()
        except OSError:
            self.num_hung_up += 1


@contextmanager
def serving(*answers: Answer) -> Iterator[ChatServer]:
    """Run a ChatServer on a free port of 127.0.0.1 while the block runs."""
    server = ChatServer(list(answers))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            server.answer(self)

        def do_GET(self) -> None:
            content = json.dumps(server.info).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
