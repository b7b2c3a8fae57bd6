"""/metrics: names, truth, who may read it; the dashboard asks for nothing that is not there."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixrt.errors import EngineStopped
from radixrt.server.watching import Metrics
from tests.support.asking import run
from tests.support.deadlines import LONG_S, deadlines_pass

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello metrics"}], "max_tokens": 8, "temperature": 0}
DASHBOARD = json.loads((files("radixrt.server") / "dashboards" / "radixrt.json").read_text())
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
]


def samples(text):
    """Give (name, labels) -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found, name, **labels):
    """Add up the values of a metric with these labels."""
    wanted = set(labels.items())
    return sum(
        number for (key, given), number in found.items() if key == f"radixrt:{name}" and wanted <= set(given)
    )


async def scrape(http, headers=None):
    response = await http.get("/metrics", headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=")
    return samples(response.text)


@pytest.fixture(scope="module")
def live_and_stats(engine):
    """Give the samples of a server that has seen every kind of request once, and what the engine says then."""

    async def work(http):
        await http.post(CHAT, json=BODY)
        await http.post(CHAT, json={**BODY, "regex": "ab+"})
        late = {**BODY, "max_tokens": 1500, "ignore_eos": True, "radixrt": {"timeout_s": LONG_S}}
        with deadlines_pass(engine):
            await http.post(CHAT, json=late)
        await http.post(CHAT, json={**BODY, "temperature": -1})
        await http.get("/nothing/here")
        return await scrape(http), engine.stats()

    return run(engine, work)


@pytest.fixture(scope="module")
def live(live_and_stats):
    return live_and_stats[0]


def test_counts_are_those_of_what_happened(live):
    assert value(live, "request_accepted_total") == 3
    assert value(live, "request_success_total") == 2
    assert value(live, "request_failure_total", reason="deadline_exceeded") == 1
    assert value(live, "request_failure_total") == 1
    assert value(live, "http_requests_total", path=CHAT, status="200") == 2
    assert value(live, "http_requests_total", path=CHAT, status="400") == 1
    assert value(live, "http_requests_total", path=CHAT, status="504") == 1
    assert value(live, "http_requests_total", path="other", status="404") == 1
    assert value(live, "http_requests_open") == 1  # the scrape itself
    assert value(live, "engine_up") == 1
    assert value(live, "e2e_request_latency_seconds_count") == 3
    assert value(live, "time_to_first_token_seconds_count") == 3
    assert value(live, "request_generation_tokens_count") == 2
    assert value(live, "inter_token_latency_seconds_sum") > 0
    assert all(("model_name", "tiny") in labels for _, labels in live)


def test_engine_counters_are_the_engines_own(live_and_stats):
    live, stats = live_and_stats
    assert value(live, "num_requests_running") == stats.num_running == 0
    assert value(live, "prompt_tokens_total") == stats.prompt_tokens
    assert value(live, "generation_tokens_total") == stats.output_tokens
    assert value(live, "engine_steps_total") == stats.num_steps
    assert value(live, "engine_step_seconds_bucket", le="+Inf") == sum(stats.step_s.counts)
    assert value(live, "prefix_cache_queries_total") == stats.cache.num_lookup_tokens
    assert value(live, "kv_pages", state="free") == stats.cache.num_free_pages
    buckets = [
        number
        for (name, labels), number in sorted(
            live.items(), key=lambda item: float(dict(item[0][1]).get("le", 0))
        )
        if name == "radixrt:engine_step_seconds_bucket"
    ]
    assert buckets == sorted(buckets)


@pytest.mark.parametrize("query", QUERIES)
def test_each_query_of_the_dashboard_asks_for_what_is_there(live, query):
    labels = {}
    for name, given in live:
        labels.setdefault(name, set()).update(label for label, _ in given)
    asked = re.findall(r"(radixrt:\w+)\{([^}]*)\}", query)
    assert asked
    assert len(asked) == query.count("radixrt:")
    for name, selector in asked:
        assert name in labels, name
        assert set(re.findall(r"(\w+)=~?", selector)) <= labels[name]
    for group in re.findall(r"by \(([^)]*)\)", query):
        for label in group.split(","):
            assert all(label.strip() in labels[name] for name, _ in asked), label
    if "histogram_quantile" in query:
        assert all(name.endswith("_bucket") for name, _ in asked)
    elif "rate(" in query:
        assert all(name.endswith("_total") for name, _ in asked)


def test_the_dashboards_variables_are_there(live):
    queries = [item["query"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"]
    found = [re.fullmatch(r"label_values\((radixrt:\w+), (\w+)\)", query).groups() for query in queries]
    assert found
    for name, label in found:
        assert any(key == name and label in dict(given) for key, given in live)


def test_a_request_that_is_given_up_is_counted_as_aborted(engine):
    import asyncio

    from radixrt.server import create_app
    from tests.support.servers import client_of, scope_of

    app = create_app(engine)

    async def go():
        body = json.dumps({**BODY, "max_tokens": 1500, "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent = []

        async def receive():
            if messages:
                return messages.pop(0)
            while sum("body" in item for item in sent) < 3:
                await asyncio.sleep(0.005)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await app(scope_of("POST", CHAT), receive, send)
        async with client_of(app) as http:
            return await scrape(http)

    found = asyncio.run(go())
    assert value(found, "request_accepted_total") == 1
    assert value(found, "request_failure_total", reason="aborted") == 1
    assert value(found, "request_success_total") == 0


def test_with_several_keys_only_the_tenant_metrics_may_read(engine):
    async def work(http):
        return [
            (await http.get("/metrics", headers={"authorization": f"Bearer {key}"})).status_code
            for key in ("key-of-alice", "key-of-prometheus", "key-of-nobody")
        ]

    keys = "alice=key-of-alice,metrics=key-of-prometheus"
    assert run(engine, work, api_keys=keys) == [403, 200, 401]
    assert run(engine, work, api_keys="alice=key-of-alice")[0] == 200


def test_a_dead_engine_is_told():
    def stats():
        raise EngineStopped("dead")

    found = samples(Metrics("m", stats).page().decode())
    assert value(found, "engine_up") == 0
    assert ("radixrt:engine_up", (("model_name", "m"),)) in found
