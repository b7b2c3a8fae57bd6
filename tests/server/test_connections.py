"""Connections that keep the server waiting, and what is no HTTP."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from radixrt.config import ServerConfig
from radixrt.server import create_app
from radixrt.server.serve import uvicorn_config
from tests.support.servers import events
from tests.support.threads import wait_until

LONG_S = 120  # against hangs; a busy machine takes its time to fill a connection
HEAD = "Host: x\r\nContent-Type: application/json\r\n"


@contextmanager
def listening(engine, **options):
    """Run an app as `radixrt serve` does, in a thread; give its port, the server and its service."""
    config = ServerConfig(port=0, **{"body_timeout_s": 1, **options})
    app = create_app(engine, config)
    server = uvicorn.Server(uvicorn_config(app, config))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1], server, app.state.service
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def connected(port, *, receive_bytes=None):
    with socket.socket() as client:
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(LONG_S)
        client.connect(("127.0.0.1", port))
        yield client


def is_closed_within(client, drip, *, seconds=LONG_S):
    """Tell whether the server hangs up on a client that sends a little now and then."""
    deadline = time.monotonic() + seconds
    client.settimeout(0.2)
    while time.monotonic() < deadline:
        try:
            if drip:
                client.sendall(drip)
            if not client.recv(65536):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize(
    ("begin", "drip"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n"),
        (f"POST /no HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode(), b"1\r\n \r\n"),
        (f"POST /generate HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode(), b"1\r\n \r\n"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n"),
    ],
    ids=["silent", "slow head", "endless body that nobody reads", "endless body", "slow second head"],
)
def test_who_sends_no_request_is_cut_off(engine, begin, drip):
    with listening(engine) as (port, _, _), connected(port) as client:
        client.sendall(begin)
        assert is_closed_within(client, drip)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "q" * 2_000_000, "return_token_strs": True}),
        ("/generate", {"prompt": "a", "max_tokens": 1900, "n": 16, "stream": True, "ignore_eos": True, "logprobs": 20}),
    ],
    ids=["whole", "stream"],
)  # fmt: skip
def test_who_does_not_read_the_answer_is_cut_off(engine, path, body):
    raw = json.dumps(body).encode()
    with listening(engine) as (port, server, service), connected(port, receive_bytes=2048) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\n{HEAD}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_until(lambda: server.server_state.connections)
        wait_until(lambda: not server.server_state.connections)
        wait_until(lambda: service.load.num_open == 0)
        wait_until(lambda: engine.stats().num_running == 0)


def test_a_slow_reader_gets_all(engine):
    raw = json.dumps({"prompt": "q" * 2_000_000, "return_token_strs": True}).encode()
    patience_s = 2  # the reader below may be held up for most of that
    with (
        listening(engine, body_timeout_s=patience_s) as (port, _, _),
        connected(port, receive_bytes=2048) as client,
    ):
        client.sendall(
            f"POST /tokenize HTTP/1.1\r\n{HEAD}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        answer, began_s = bytearray(client.recv(1)), time.monotonic()
        while found := client.recv(1 << 16):
            answer += found
            if time.monotonic() - began_s < 2.5 * patience_s:
                time.sleep(0.01)
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_is_framed_as_its_client_can_read_it(engine, version):
    raw = json.dumps({"prompt": "a", "max_tokens": 20, "stream": True, "ignore_eos": True}).encode()
    with listening(engine) as (port, _, _), connected(port) as client:
        head = (
            f"POST /generate HTTP/{version}\r\n{HEAD}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        client.sendall(head.encode() + raw)
        answer = bytearray()
        while found := client.recv(1 << 16):
            answer += found
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == "1.1")
    if version == "1.1":
        whole = b""
        while num_bytes := int(body[: (at := body.index(b"\r\n"))], 16):
            whole += body[at + 2 : at + 2 + num_bytes]
            assert body[at + 2 + num_bytes :][:2] == b"\r\n"
            body = body[at + 4 + num_bytes :]
        assert body == b"0\r\n\r\n"
        body = whole
    found = events(body.decode())
    assert found[-1] == "[DONE]"
    assert sum(len(item.get("token_ids", ())) for item in found[:-1]) == 20


STREAMS = {
    "/generate": {"prompt": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


def read_streams(port, service, num_rounds):
    """Read streams of all kinds to their ends on one connection."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
    for path, body in list(STREAMS.items()) * num_rounds:
        raw = json.dumps({"model": service.model_name, **body, "max_tokens": 5, "stream": True})
        client.request("POST", path, raw, {"Content-Type": "application/json"})
        answer = client.getresponse().read()
        assert answer.endswith(b"data: [DONE]\n\n"), answer
    client.close()


def test_who_read_a_stream_to_its_end_has_not_gone_away(engine, caplog):
    caplog.set_level("INFO", logger="radixrt.access")
    with listening(engine) as (port, _, service):
        read_streams(port, service, num_rounds=5)
    records = [record for record in caplog.records if record.name == "radixrt.access"]
    assert len(records) == 5 * len(STREAMS)
    assert not [record for record in records if "outcome" in vars(record)["fields"]]


def test_a_request_leaves_nothing_to_the_garbage_collector(engine):
    with listening(engine) as (port, server, service):
        read_streams(port, service, num_rounds=1)
        wait_until(lambda: not server.server_state.connections)
        gc.collect()
        gc.disable()
        try:
            read_streams(port, service, num_rounds=5)
            wait_until(lambda: not server.server_state.connections)
            left = [item for item in gc.get_objects() if type(item) is RequestResponseCycle]
        finally:
            gc.enable()
    assert left == []


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01" * 40 + b"\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 40_000, 431),
    ],
    ids=["TLS", "no host", "two lengths", "unknown coding", "endless head"],
)
def test_what_is_no_http_is_answered_as_all_errors_are(engine, raw, status):
    with listening(engine) as (port, _, _), connected(port) as client:
        client.sendall(raw)
        answer = b""
        while found := client.recv(65536):
            answer += found
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"x-request-id: req_" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
