"""A real server under many clients that leave, break rules and set deadlines: each request has one outcome.

The short run is for every day; the minute with 200 clients stands under the mark slow.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from contextlib import contextmanager

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.load import GIVEN_UP, Prober, Seen, client, idle_server
from tests.support.servers import process_of, served, url_of

logger = logging.getLogger("tests.load")
OPTIONS = (
    "--device", "cpu", "--kernels", "torch", "--dtype", "float32", "--threads", "1", "--num-pages", "1024",
    "--checks", "idle",
)  # fmt: skip
# What a client can meet when the server stops while it asks: told clearly, or not let in any more.
STOPPING = frozenset(
    {"engine_stopped", "transport ConnectError", "transport ReadError", "transport RemoteProtocolError"}
)


def counted(http):
    """Give the server's metrics by name, added up over their labels."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
            for label in ("state", "reason"):
                if label in sample.labels:
                    found[f"{sample.name}/{sample.labels[label]}"] = sample.value
    return found


@contextmanager
def probed(url):
    prober = Prober(url)
    try:
        yield prober
    finally:
        prober.stop()


def load(url, *, num_clients, seconds, seed, ends=frozenset(), during=None):
    """Let clients ask for so long; `during` runs beside them in a thread."""
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request is a load of its own
    seen = Seen()

    async def go():
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            until_s = time.monotonic() + seconds
            asking = [
                client(http, seed * 1000 + index, until_s, seen, ends=ends) for index in range(num_clients)
            ]
            beside = [asyncio.to_thread(during)] if during else []
            await asyncio.gather(*asking, *beside)

    asyncio.run(go())
    return seen


def check_quiet(url):
    """After the load: everything accepted has one outcome, all pages are free or cached, the audit passes."""
    with httpx2.Client(base_url=url, timeout=60) as http:
        deadline = time.monotonic() + 60
        while True:
            found = counted(http)
            ended = found["radixrt:request_success_total"] + found.get("radixrt:request_failure_total", 0)
            is_idle = not found["radixrt:num_requests_running"] and not found["radixrt:num_requests_waiting"]
            is_told = found["radixrt:http_requests_open"] == 1  # this one
            if is_idle and is_told and ended == found["radixrt:request_accepted_total"]:
                break
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        pages = found["radixrt:kv_pages/free"] + found["radixrt:kv_pages/cached"]
        assert pages == 1023, found
        time.sleep(1.5)  # the engine audits its invariants after a second of rest, and dies if one is broken
        assert http.get("/health").status_code == 200
        return found


def check_load(url, process, *, num_clients, seconds, warm_s):
    memory = psutil.Process(process.pid).memory_info
    seen = load(url, num_clients=num_clients, seconds=warm_s, seed=1)
    before = memory().rss
    with idle_server() as idle_url, probed(idle_url) as control, probed(url) as prober:
        later = load(url, num_clients=num_clients, seconds=seconds, seed=2)
    for item in (seen, later):
        assert not item.faults, item.faults[:20]
    found = check_quiet(url)
    kinds = {kind for kind, _ in seen.outcomes + later.outcomes}
    assert len(kinds) == 11, kinds
    assert found["radixrt:request_failure_total/aborted"] > 0
    assert found["radixrt:request_failure_total/deadline_exceeded"] > 0
    num_given_up = sum(n for (_, what), n in (seen.outcomes + later.outcomes).items() if what == GIVEN_UP)
    # What nobody left early was accepted and is counted; of what was left, a part was.
    num_answered = seen.num_accepted + later.num_accepted
    assert (
        num_answered
        <= found["radixrt:request_accepted_total"]
        <= num_answered
        + num_given_up
        + sum(
            n for (kind, what), n in (seen.outcomes + later.outcomes).items() if what == "deadline_exceeded"
        )
    )
    assert prober.statuses == {200}
    growth = memory().rss - before
    logger.info(
        f"{sum(later.outcomes.values())} requests in {seconds} s by {num_clients} clients; /health p50 "
        f"{1e3 * prober.quantile_s(0.5):.1f} ms, p99 {1e3 * prober.quantile_s(0.99):.1f} ms (an idle server beside it: "
        f"{1e3 * control.quantile_s(0.5):.1f} and {1e3 * control.quantile_s(0.99):.1f} ms); memory +{growth / 2**20:.1f} MiB"
    )
    return prober, control, growth


def test_each_request_under_load_has_one_outcome(model_folder):
    with served(model_folder, *OPTIONS) as (url, process):
        prober, _, growth = check_load(url, process, num_clients=32, seconds=5, warm_s=3)
        assert prober.quantile_s(0.99) < 5  # a ceiling against hangs; the slow test has the goal
        assert growth < 200 << 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_minute_of_two_hundred_streams(model_folder):
    with served(model_folder, *OPTIONS, "--max-running", "200") as (url, process):
        prober, control, growth = check_load(url, process, num_clients=200, seconds=60, warm_s=30)
        # The goal on a machine of its own; one that is shared delays an idle server as well.
        assert prober.quantile_s(0.99) < max(0.1, 4 * control.quantile_s(0.99))
        assert growth < 20 << 20


def test_sigterm_under_load_ends_each_request_and_the_server(model_folder):
    with served(model_folder, *OPTIONS, "--drain-s", "2") as (url, process):

        def stop():
            time.sleep(2.5)
            process.send_signal(signal.SIGTERM)

        seen = load(url, num_clients=24, seconds=60, seed=3, ends=STOPPING, during=stop)
        assert not seen.faults, seen.faults[:20]
        assert process.wait(timeout=60) == 0
        told = {what for _, what in seen.outcomes}
        assert told & STOPPING
        assert told & {"stop", "length"}


DYING = """
import sys
from radixrt.errors import InvariantViolation
from radixrt.loop import EngineLoop
step, seen = EngineLoop._step, []
def dying(self):
    seen.append(1)
    if len(seen) > 60:
        raise InvariantViolation("injected")
    step(self)
EngineLoop._step = dying
from radixrt.launch import main
sys.exit(main())
"""


@pytest.mark.slow
def test_the_engines_death_under_load_hangs_nobody(model_folder):
    command = [sys.executable, "-c", DYING, "serve", str(model_folder), "--port", "0", *OPTIONS]
    process = process_of(command)
    try:
        url = url_of(process)
        seen = load(url, num_clients=24, seconds=60, seed=4, ends=STOPPING)
        assert not seen.faults, seen.faults[:20]
        assert any(what == "engine_stopped" for _, what in seen.outcomes)
        assert process.wait(timeout=60) == 1
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()
