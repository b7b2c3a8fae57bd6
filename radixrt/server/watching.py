"""What the server tells about itself: /metrics in Prometheus' text form.

Names are those that users of vLLM know, with our own prefix. Two sources: what is counted here as requests go by, and
the engine's own counters, read when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from radixrt.errors import EngineStopped
from radixrt.histogram import Histogram
from radixrt.metrics import EngineStats
from radixrt.server.errors import failure_of
from radixrt.types import GenerateRequest, OutputChunk

PREFIX = "radixrt:"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_FINE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_TOKENS = tuple(float(1 << power) for power in range(0, 21, 2))

Samples = Sequence[tuple[tuple[str, ...], float]]


class Metrics:
    """Count what goes by. Used by the event loop's thread; a scrape may run in another.

    Args:
        model_name: the label model_name of every metric.
        stats: the engine's counters; may raise EngineStopped, and then only what is counted here is told.
        clock: seconds.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self.ttft = self._histogram("time_to_first_token_seconds", "time to first token", _SECONDS)
        self.itl = self._histogram("inter_token_latency_seconds", "time per output token", _FINE_SECONDS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "time of a whole request", _SECONDS)
        self.prompt = self._histogram("request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self.output = self._histogram("request_generation_tokens", "new tokens of a request", _TOKENS)
        self.accepted = self._counter("request_accepted", "requests that the engine took")
        self._success = self._labelled("request_success", "samples by why they ended", "finished_reason")
        self._failure = self._labelled("request_failure", "accepted requests that failed, by code", "reason")
        self._http = self._labelled("http_requests", "HTTP requests", "path", "status")
        self._http_open = Gauge(
            f"{PREFIX}http_requests_open",
            "HTTP requests in progress",
            ["model_name"],
            registry=self._registry,
        ).labels(model_name)
        self._http_open.set(0)
        self._registry.register(_EngineCollector(model_name, stats))

    def watch(self, requests: Sequence[GenerateRequest]) -> RequestWatch:
        """Begin to watch requests that the engine took."""
        self.accepted.inc(len(requests))
        return RequestWatch(self, requests)

    def finished(self, reason: str) -> None:
        """Count the end of a sample."""
        self._success.labels(self._model_name, reason).inc()

    def failed(self, reason: str) -> None:
        """Count a request that was accepted and failed."""
        self._failure.labels(self._model_name, reason).inc()

    def http_begins(self) -> None:
        """Count an HTTP request in."""
        self._http_open.inc()

    def http_ends(self, path: str, status: int) -> None:
        """Count an HTTP request out.

        Args:
            path: as its route is declared, so that there are few.
            status: 0 if nothing was answered.
        """
        self._http_open.dec()
        self._http.labels(self._model_name, path, str(status)).inc()

    def page(self) -> bytes:
        """Give all metrics in Prometheus' text form. Waits for the engine's next step."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> PrometheusHistogram:
        made = PrometheusHistogram(
            PREFIX + name, text, ["model_name"], registry=self._registry, buckets=tuple(buckets)
        )
        return made.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled(name, text).labels(self._model_name)

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name", *labels], registry=self._registry)


class RequestWatch:
    """Watch the requests of one batch.

    Invariant: each request has exactly one end: its last chunk, a failure, or that nobody wanted it any more.
    """

    def __init__(self, metrics: Metrics, requests: Sequence[GenerateRequest]) -> None:
        self._metrics = metrics
        self._requests = requests
        self._started_s = metrics.clock()
        self._last_s: dict[tuple[int, int], float] = {}

    def chunk(self, index: int, chunk: OutputChunk, now_s: float) -> bool:
        """Take in one chunk of a request, and when it came; tell whether it brought a sample's first tokens."""
        metrics = self._metrics
        key = index, chunk.sample_index
        before_s = self._last_s.get(key)
        is_first = before_s is None and bool(chunk.token_ids)
        if is_first:
            metrics.ttft.observe(now_s - self._started_s)
        elif before_s is not None and chunk.token_ids:
            metrics.itl.observe((now_s - before_s) / len(chunk.token_ids))
        if chunk.token_ids:
            self._last_s[key] = now_s
        if chunk.finish_reason is not None:
            metrics.finished(chunk.finish_reason.value)
        if chunk.usage is not None:
            metrics.e2e.observe(now_s - self._started_s)
            metrics.prompt.observe(chunk.usage.prompt_tokens)
            metrics.output.observe(chunk.usage.output_tokens)
        return is_first

    def failed(self, error: BaseException | None) -> None:
        """Take in one request's failure; None: it was given up."""
        self._metrics.failed("aborted" if error is None else failure_of(error).code or "failed")
        self._metrics.e2e.observe(self._metrics.clock() - self._started_s)


class _EngineCollector:
    """Read the engine's counters for one scrape."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Give nothing: the registry then asks for no values while it is put together."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Give the engine's metrics."""
        try:
            stats = self._stats()
        except EngineStopped:
            yield self._gauge("engine_up", "1 while the engine takes requests", 0)
            return
        yield self._gauge("engine_up", "1 while the engine takes requests", 1)
        yield from self._load(stats)
        yield from self._tokens(stats)
        yield from self._cache(stats)
        yield from self._grammar(stats)

    def _load(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "sequences in the engine's steps", stats.num_running)
        yield self._gauge("num_requests_waiting", "sequences that wait", stats.num_waiting)
        yield self._counter("num_preemptions", "sequences that gave up their pages", stats.num_preemptions)
        yield self._counter("engine_steps", "steps of the engine", stats.num_steps)
        yield self._counter("engine_step_tokens", "tokens computed in steps", stats.num_step_tokens)
        yield self._times("engine_step_seconds", "times of steps", stats.step_s)
        yield self._times("request_queue_time_seconds", "times from submission to admission", stats.wait_s)

    def _tokens(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "prompt tokens of finished requests", stats.prompt_tokens)
        yield self._counter("generation_tokens", "new tokens of finished requests", stats.output_tokens)
        yield self._counter(
            "prompt_tokens_cached", "prompt tokens of finished requests that were cached", stats.cached_tokens
        )
        yield self._counter(
            "computed_tokens",
            "positions that went through the model, finished requests",
            stats.computed_tokens,
        )
        yield self._counter(
            "forced_tokens", "new tokens that constraints forced, finished requests", stats.forced_tokens
        )

    def _cache(self, stats: EngineStats) -> Iterator[Metric]:
        cache = stats.cache
        hits = cache.num_shared_tokens + cache.num_copied_tokens + cache.num_forked_tokens
        yield self._counter(
            "prefix_cache_queries", "prompt tokens looked up in the cache", cache.num_lookup_tokens
        )
        yield self._counter("prefix_cache_hits", "prompt tokens found in the cache", hits)
        used = 1 - cache.num_free_pages / cache.num_pages if cache.num_pages else 0.0
        yield self._gauge("kv_cache_usage_perc", "share of pages in use or cached, 0 to 1", used)
        yield self._gauge(
            "kv_cache_waste_perc", "share of empty slots in pages that are not free", cache.kv_waste
        )
        pages = {"free": cache.num_free_pages, "cached": cache.num_cached_pages, "held": cache.num_held_pages}
        yield self._gauges(
            "kv_pages", "pages that are free, in the prefix cache, and of these held by scopes",
            "state", [((name,), float(count)) for name, count in pages.items()],
        )  # fmt: skip
        evicted = {"room": 0, "cleared": 0, **cache.evicted_pages}
        family = self._family(CounterMetricFamily, "evicted_pages", "pages that left the cache", "reason")
        for reason, count in evicted.items():
            family.add_metric([self._model_name, reason], count)
        yield family

    def _grammar(self, stats: EngineStats) -> Iterator[Metric]:
        grammar, compiled = stats.grammar, stats.grammar.compilations
        family = self._family(
            CounterMetricFamily, "grammar_lookups", "constraints asked for, by what came of it", "result"
        )
        counts = {
            "cached": compiled.num_cached,
            "compiled": compiled.num_compiled,
            "refused": compiled.num_refused,
        }
        for result, count in counts.items():
            family.add_metric([self._model_name, result], count)
        yield family
        yield self._times("grammar_compile_seconds", "times of compilations", compiled.compile_s)
        yield self._times("grammar_mask_seconds", "times to fill a mask", grammar.mask_s)
        yield self._gauge("grammar_cache_bytes", "memory of compiled constraints", compiled.num_bytes)
        yield self._counter("grammar_dead_ends", "sequences with no token left", grammar.num_dead_ends)
        yield self._counter("grammar_retries", "finished values that were taken back", grammar.num_retries)

    # -- families -------------------------------------------------------------------------------------------

    def _family(
        self, kind: type[CounterMetricFamily], name: str, text: str, *labels: str
    ) -> CounterMetricFamily:
        return kind(PREFIX + name, text, labels=["model_name", *labels])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _gauges(self, name: str, text: str, label: str, samples: Samples) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for values, value in samples:
            family.add_metric([self._model_name, *values], value)
        return family

    def _times(self, name: str, text: str, times: Histogram) -> Metric:
        """Give a histogram of powers of two; its sum is not known."""
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        seen, buckets = 0, []
        for index, count in enumerate(times.counts):
            seen += count
            is_last = index == len(times.counts) - 1
            buckets.append(("+Inf" if is_last else str(times.smallest_s * 2.0**index), float(seen)))
        family.add_metric([self._model_name], buckets=buckets, sum_value=None)
        return family
