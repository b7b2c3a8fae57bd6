"""Spans through OpenTelemetry's API."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.asking import run
from tests.support.deadlines import LONG_S, deadlines_pass

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello spans"}], "max_tokens": 4, "temperature": 0}
LATE = {**BODY, "max_tokens": 1500, "ignore_eos": True, "radixrt": {"timeout_s": LONG_S}}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter():
    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_is_a_span_under_the_callers(engine, exporter, is_stream):
    exporter.clear()

    async def work(http):
        await http.get("/health")
        return await http.post(CHAT, json={**BODY, "stream": is_stream}, headers={"traceparent": PARENT})

    response = run(engine, work)
    [span] = exporter.get_finished_spans()
    assert span.name == f"POST {CHAT}"
    assert span.kind == trace.SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["http.route"] == CHAT
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.attributes["gen_ai.usage.input_tokens"] > 4
    assert span.attributes["radixrt.request_id"] == response.headers["x-request-id"]
    assert [event.name for event in span.events] == ["gen_ai.first_token"]
    assert span.status.is_ok or span.status.is_unset
    told = str(dict(span.attributes)) + str([dict(event.attributes) for event in span.events])
    assert "Hello" not in told


def test_a_stream_that_broke_is_an_error_span(engine, exporter):
    exporter.clear()
    with deadlines_pass(engine):
        assert run(engine, lambda http: http.post(CHAT, json={**LATE, "stream": True})).status_code == 200
    [span] = exporter.get_finished_spans()
    assert span.status.status_code == trace.StatusCode.ERROR
    assert span.attributes["radixrt.outcome"] == "deadline_exceeded"


def test_a_failure_is_an_error_span(engine, exporter):
    exporter.clear()
    with deadlines_pass(engine):
        assert run(engine, lambda http: http.post(CHAT, json=LATE)).status_code == 504
    [span] = exporter.get_finished_spans()
    assert span.status.status_code == trace.StatusCode.ERROR
    assert span.attributes["http.response.status_code"] == 504


def test_without_an_sdk_nothing_is_recorded():
    """In a process of its own: a provider cannot be taken back."""
    code = (
        "from opentelemetry import trace\n"
        "from radixrt.server.gate import Visit\n"
        "from radixrt.server.tracing import annotate, note_first_token\n"
        "note_first_token(); annotate('m', {}, Visit('r'))()\n"
        "assert not trace.get_current_span().is_recording()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
