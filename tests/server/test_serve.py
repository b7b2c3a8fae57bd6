"""`radixrt serve` as a process: start-up, drain, disconnects, exit status."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager

import httpx2
import pytest

from radixrt.server.logs import MAX_WAITING_LINES, JsonFormatter, LogWriter
from tests.support.servers import ROOT, events, served
from tests.support.threads import wait_until

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "ignore_eos": True}
SMALL = ("--device", "cpu", "--kernels", "torch", "--num-pages", "512", "--dtype", "float32")


def ask_in_thread(url, body):
    found = {}

    def ask():
        with httpx2.Client(timeout=120) as http, http.stream("POST", f"{url}{CHAT}", json=body) as response:
            found["status"] = response.status_code
            found["begun"] = True
            found["text"] = "".join(response.iter_text())

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, found


def value_of(name, metrics):
    [line] = [line for line in metrics.splitlines() if line.startswith(f"radixrt:{name}{{")]
    return float(line.rpartition(" ")[2])


@contextmanager
def unread(url, path, body):
    """Ask on a connection of which nothing is read."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(head.encode() + raw)
        yield


def test_requests_under_way_are_finished_after_sigterm(model_folder):
    with served(model_folder, *SMALL, "--drain-s", "300") as (url, process):
        asked = [ask_in_thread(url, {**LONG, "max_tokens": 150, "stream": True}) for _ in range(4)]
        wait_until(lambda: all("begun" in found for _, found in asked))
        process.send_signal(signal.SIGTERM)
        for thread, found in asked:
            thread.join(200)
            assert events(found["text"])[-1] == "[DONE]"
        assert process.wait(timeout=60) == 0


def test_what_outlasts_the_drain_gets_an_error(model_folder):
    with served(model_folder, *SMALL, "--drain-s", "1") as (url, process):
        asked = [
            ask_in_thread(url, {**LONG, "max_tokens": 1900, "n": 8, "stream": is_stream})
            for is_stream in (True, False)
        ]
        wait_until(lambda: "begun" in asked[0][1])
        # Both have come, and this one: whoever has not is not let in any more.
        wait_until(lambda: value_of("http_requests_open", httpx2.get(f"{url}/metrics").text) == 3)
        process.send_signal(signal.SIGTERM)
        for thread, _ in asked:
            thread.join(60)
        streamed, whole = (found for _, found in asked)
        assert events(streamed["text"])[-1]["error"]["code"] == "engine_stopped"
        assert "[DONE]" not in streamed["text"]
        assert whole["status"] == 503
        assert json.loads(whole["text"])["error"]["code"] == "engine_stopped"
        assert process.wait(timeout=60) == 0


def accepts(url):
    try:
        return httpx2.get(f"{url}/health").status_code == 200
    except httpx2.TransportError:
        return False


def faults_of(log):
    """Give what a server told as faults, once it has told all."""
    wait_until(lambda: log[-1] == "")
    said = [json.loads(line) for line in log[:-1] if line.startswith("{")]
    return [line["message"] for line in said if "traceback" in line or line["level"] == "error"]


def test_who_reads_nothing_holds_up_no_stop_and_is_no_fault(model_folder):
    log = []
    whole = {"prompt": "q" * 700_000, "return_token_strs": True}
    stream = {"prompt": "a" * 1900, "prompt_logprobs": 20, "max_tokens": 100, "n": 8, "stream": True}
    with (
        served(model_folder, *SMALL, "--body-timeout-s", "600", "--drain-s", "1", log=log) as (url, process),
        unread(url, "/tokenize", whole),
    ):
        wait_until(lambda: any("/tokenize" in line for line in log))
        with unread(url, "/generate", {**stream, "ignore_eos": True}):
            # Each sample begins with 1 MB, more than a connection takes: its task waits there, and not for the engine.
            wait_until(lambda: value_of("engine_step_tokens_total", httpx2.get(f"{url}/metrics").text) > 2200)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
            assert faults_of(log) == []
    assert any("2 connections are still open" in line for line in log)


def test_a_second_sigint_cuts_off_streams_under_way_which_is_no_fault(model_folder):
    log = []
    with (
        served(model_folder, *SMALL, "--drain-s", "300", log=log) as (url, process),
        unread(url, CHAT, {**LONG, "max_tokens": 1900, "n": 8, "stream": True}),
    ):
        wait_until(lambda: value_of("engine_step_tokens_total", httpx2.get(f"{url}/metrics").text) > 100)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: not accepts(url))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert faults_of(log) == []


@pytest.mark.slow
def test_a_closed_connection_ends_its_request(model_folder):
    with (
        served(model_folder, *SMALL, "--max-running", "1", "--max-waiting", "1") as (url, _),
        httpx2.Client(timeout=60) as http,
    ):
        for is_stream in (True, False):
            body = {**LONG, "max_tokens": 1900, "stream": is_stream}
            with pytest.raises(httpx2.TimeoutException):
                httpx2.post(f"{url}{CHAT}", json=body, timeout=0.3)
            started = time.monotonic()
            assert http.post(f"{url}{CHAT}", json={**LONG, "max_tokens": 2}).status_code == 200
            assert time.monotonic() - started < 10  # one alone took many times as long


@pytest.mark.slow
def test_health_answers_while_the_engine_works(model_folder):
    with served(model_folder, *SMALL) as (url, _), httpx2.Client(timeout=60) as http:
        asked = [ask_in_thread(url, {**LONG, "max_tokens": 300, "n": 4, "stream": True}) for _ in range(4)]
        wait_until(lambda: all("begun" in found for _, found in asked))
        times = []
        for _ in range(50):
            started = time.monotonic()
            assert http.get(f"{url}/health").status_code == 200
            times.append(time.monotonic() - started)
        assert sorted(times)[len(times) // 2] < 1  # a generous ceiling: the load test measures it
        for thread, found in asked:
            thread.join(120)
            assert events(found["text"])[-1] == "[DONE]"


def test_start_up_prints_what_one_needs(model_folder):
    command = [sys.executable, "-m", "radixrt", "serve", str(model_folder), "--port", "0", *SMALL]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "RADIXRT_API_KEYS": "one=key-number-1",
    }
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    lines = []
    while not lines or "try" not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 0
    block = "".join(lines)
    for word in (
        "serves tiny at http://127.0.0.1:",
        "float32",
        "511 pages of 16 = 8176 tokens",
        "API keys   1",
        "curl http://127.0.0.1:",
    ):
        assert word in block
    assert "key-number-1" not in block + rest


@pytest.mark.slow
def test_a_taken_port_is_an_error_and_not_a_hang(model_folder):
    with served(model_folder, *SMALL) as (url, _):
        command = [
            sys.executable,
            "-m",
            "radixrt",
            "serve",
            str(model_folder),
            "--port",
            url.rsplit(":", 1)[1],
            *SMALL,
        ]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
        assert ended.returncode not in (0, None)
        assert b"address already in use" in ended.stderr


def test_log_lines_are_json_without_prompts(engine, caplog):
    from tests.support.asking import post

    with caplog.at_level("INFO", logger="radixrt.access"):
        post(
            engine,
            CHAT,
            {**LONG, "messages": [{"role": "user", "content": "a private matter"}], "max_tokens": 2},
            headers={"X-Request-Id": "mine"},
        )
    [record] = [record for record in caplog.records if record.name == "radixrt.access"]
    line = json.loads(JsonFormatter().format(record))
    assert line["status"] == 200
    assert line["path"] == CHAT
    assert line["output_tokens"] == 2
    assert line["client_request_id"] == "mine"
    assert line["request_id"].startswith("req_")
    assert "private" not in json.dumps(line)


class _Stuck:
    """A stream that takes nothing until its gate is set."""

    def __init__(self):
        self.gate, self.written = threading.Event(), []

    def write(self, text):
        self.gate.wait(30)
        self.written.append(text)

    def flush(self):
        pass


def test_a_log_that_nobody_reads_holds_up_nothing():
    stream = _Stuck()
    gate, written = stream.gate, stream.written
    writer = LogWriter(stream)
    started = time.monotonic()
    for number in range(MAX_WAITING_LINES + 500):
        writer.emit(logging.LogRecord("radixrt", logging.INFO, "", 0, f"line {number}", None, None))
    assert time.monotonic() - started < 20
    assert writer.num_dropped >= 499
    gate.set()
    writer.finish(timeout_s=30)
    assert len(written) + writer.num_dropped == MAX_WAITING_LINES + 500
    assert written[0] == "line 0\n"


class _Unsayable:
    def __str__(self):
        raise KeyError("no text")


def test_a_line_that_cannot_be_said_costs_no_other(capsys):
    stream = io.StringIO()
    writer = LogWriter(stream)
    writer.setFormatter(JsonFormatter())

    def emit(message, *args, **fields):
        record = logging.LogRecord("radixrt", logging.INFO, "", 0, message, args or None, None)
        record.fields = fields
        writer.emit(record)

    emit("%(name)s and %(other)s", {"name": 1})
    emit("fields", value=_Unsayable())
    emit("%s", _Unsayable())
    emit("the last")
    writer.finish(timeout_s=30)
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["the last"]
    assert capsys.readouterr().err.count("--- Logging error ---") == 3


def test_a_stream_that_fails_for_a_while_gets_the_lines_that_follow(capsys):
    class Full(io.StringIO):
        is_full = True

        def write(self, text):
            if self.is_full:
                raise OSError("no space left on device")
            return super().write(text)

    stream = Full()
    writer = LogWriter(stream)

    def emit(message):
        writer.emit(logging.LogRecord("radixrt", logging.INFO, "", 0, message, None, None))

    emit("lost")
    wait_until(lambda: "no space left" in capsys.readouterr().err)
    stream.is_full = False
    emit("written")
    writer.finish(timeout_s=30)
    assert stream.getvalue() == "written\n"


def test_a_line_says_what_was_so_when_it_was_said_and_keeps_no_frame():
    stream = _Stuck()
    gate, written = stream.gate, stream.written

    class Large:
        pass

    def failing():
        large = Large()
        frames.append(weakref.ref(large))
        raise ZeroDivisionError

    def emit(*args, exc_info=None):
        writer.emit(logging.LogRecord("radixrt", logging.INFO, "", 0, "state %s", args, exc_info))

    writer, state, frames = LogWriter(stream), ["before"], []
    emit("first")
    emit(state)
    state[0] = "after"
    try:
        failing()
    except ZeroDivisionError:
        emit("failed", exc_info=sys.exc_info())
    gc.collect()
    assert frames[0]() is None
    gate.set()
    writer.finish(timeout_s=30)
    assert written[1] == "state ['before']\n"
    assert "ZeroDivisionError" in written[2]
