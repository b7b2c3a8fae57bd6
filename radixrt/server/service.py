"""What all routes share: the engine, the options, the threads, and how a body becomes engine requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from fastapi import Request
from starlette.types import Scope

from radixrt.config import ServerConfig
from radixrt.engine import Engine
from radixrt.errors import InvalidRequest, RequestError, UnknownModel
from radixrt.explain import PrefixReport
from radixrt.server.bodies import CallBody
from radixrt.server.constraints import Constraint
from radixrt.server.errors import pointed
from radixrt.server.gate import Load, Visit, visit_of
from radixrt.server.reading import BodyType, parse_body, read_json
from radixrt.server.resuming import Shelf
from radixrt.server.retention import Retention, parse_ttl_s
from radixrt.server.running import Batch, left_s
from radixrt.server.scopes import OpenScopes
from radixrt.server.security import KeyRing, NamespaceRule, Tenant
from radixrt.server.tool_plan import ArgumentSchemas
from radixrt.server.tracing import note_first_token, route_of
from radixrt.server.watching import Metrics, RequestWatch
from radixrt.text.tool_forms import ToolForm
from radixrt.types import GenerateRequest, Namespace, OutputChunk, SamplingParams

T = TypeVar("T")
NUM_TEXT_THREADS = 4
NUM_GRAMMAR_THREADS = 4
DEFAULT_TTL_S = 1800
LONG_TTL_S = 86_400
URGENT_TIERS = ("priority", "fast")
LARGE_BODY_BYTES = 1 << 16  # a larger one is parsed in a thread
SHORT_BODY_BYTES = (
    1 << 11
)  # to encode its text takes about a millisecond; the way to a thread and back, a quarter of one


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request is run under, besides its prompt and sampling.

    Attributes:
        deadline_s: when it must be done, by time.perf_counter; it counts from the request's arrival.
    """

    namespace: Namespace
    priority: int
    latency_class: Literal["latency", "throughput"]
    label: str
    owner: str
    scope_id: int | None
    deadline_s: float

    def request(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, logprob_start: int = 0
    ) -> GenerateRequest:
        """Give the engine's request, with the time that is left to it.

        Raises:
            DeadlineExceeded: none is.
        """
        return GenerateRequest(
            tuple(prompt_ids),
            sampling,
            self.namespace,
            priority=self.priority,
            latency_class=self.latency_class,
            logprob_start=logprob_start,
            label=self.label,
            owner=self.owner,
            scope_id=self.scope_id,
            timeout_s=left_s(self.deadline_s),
        )


class Service:
    """One engine behind HTTP. Used by the event loop's thread; owns its helper threads.

    Attributes:
        model_name: the one name that requests may ask for.
        created_s: when it began, in seconds since 1970.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.keys = KeyRing.load(config)
        self.rule = NamespaceRule.of(config, num_keys=len(self.keys))
        self.load = Load(config.max_requests)
        self.retention = Retention(lambda ttl_s: engine.scope(ttl_s=ttl_s), clock=time.monotonic)
        self.scopes = OpenScopes(lambda ttl_s: engine.scope(ttl_s=ttl_s), clock=time.monotonic)
        self._shelves: dict[str, Shelf] = {}
        self.model_name = config.served_model_name or Path(engine.config.options.model.model).name
        self.created_s = int(time.time())
        self.metrics = Metrics(self.model_name, engine.stats)
        self.argument_schemas = ArgumentSchemas(engine.grammars.get)
        self._text_threads = ThreadPoolExecutor(NUM_TEXT_THREADS, "radixrt-text")
        self._grammar_threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, "radixrt-grammar")
        self._warming = self._text_threads.submit(engine.tokenizer.warm)

    def count(self, scope: Scope, visit: Visit) -> Callable[[], None]:
        """Count an HTTP request; give what counts its end."""
        self.metrics.http_begins()
        return lambda: self.metrics.http_ends(route_of(scope), visit.status)

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """Give how the model writes tool calls; None: in a form that is not known here.

        Found out when first asked for, which runs the model's template: ask in a thread.
        """
        return ToolForm.of(self.engine.tokenizer, self.config.tool_format)

    async def warmed(self) -> None:
        """Wait until the tokenizer is warm: that holds the interpreter's lock for long, so nobody shall be served yet."""
        await asyncio.wait([asyncio.wrap_future(self._warming)])

    async def body(self, request: Request, kind: type[BodyType]) -> BodyType:
        """Read a request's body within the limits."""
        config = self.config
        raw = await read_json(request, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
        visit_of(request.scope).num_body_bytes = len(raw)
        if len(raw) > LARGE_BODY_BYTES:
            return await self.in_thread(lambda: parse_body(raw, kind))
        return parse_body(raw, kind)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what may take long off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, work)

    async def on_text(self, visit: Visit, work: Callable[[], T]) -> T:
        """Encode text: at once if the body was short, else in a thread. Not for templates, which may take any time."""
        if visit.num_body_bytes <= SHORT_BODY_BYTES and self.engine.tokenizer.is_warm:
            return work()
        return await self.in_thread(work)

    async def start(
        self, visit: Visit, requests: Sequence[GenerateRequest], *, constraint: Constraint | None = None
    ) -> Batch:
        """Submit a visit's requests; an error about the constraint names the place where the client wrote it."""
        try:
            return await Batch.start(
                self.engine.submit,
                requests,
                mailbox=self.engine.mailbox(),
                deadline_s=visit.deadline_s,
                executor=self._grammar_threads,
                watch=lambda: _Watch(self.metrics.watch(requests)),
            )
        except RequestError as error:
            if constraint is None:
                raise
            raise pointed(error, constraint.pointer) from None

    def shelf(self, tenant: Tenant) -> Shelf:
        """Give the tenant's resumable streams."""
        config = self.config
        if tenant.name not in self._shelves:
            self._shelves[tenant.name] = Shelf(max_bytes=config.resume_bytes, keep_s=config.resume_s)
        return self._shelves[tenant.name]

    def shown(self, report: PrefixReport) -> PrefixReport:
        """Give a report without what other tenants wrote: text that is cached and the label of an eviction."""
        if len(self.keys) <= 1:
            return report
        is_own = self.rule.mode != "shared"
        label = None if report.evicted_for is None else ""
        return replace(report, cached_text=report.cached_text if is_own else "", evicted_for=label)

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModel unless the name is this server's model's (or none was said)."""
        if name is not None and name != self.model_name:
            raise UnknownModel(
                f"there is no model {name!r} here; this server has {self.model_name!r}",
                parameter="model",
                value=name,
            )

    def terms(self, visit: Visit, body: CallBody, *, has_breakpoint: bool = False) -> Terms:
        """Give what a request runs under. Changes: the visit has a deadline from now on."""
        options, cache = body.radixrt, body.prompt_cache_options
        is_private = cache is not None and cache.mode == "explicit" and not has_breakpoint
        namespace = self.rule.namespace(visit.tenant, label=body.prompt_cache_key, is_private=is_private)
        ttl_s = self._ttl_s(body, has_breakpoint=has_breakpoint)
        visit.deadline_s = visit.started_s + min(
            options.timeout_s or self.config.max_request_s, self.config.max_request_s
        )
        latency_class = options.latency_class or ("throughput" if body.service_tier == "flex" else "latency")
        return Terms(
            namespace=namespace,
            priority=(body.priority or 0) + (body.service_tier in URGENT_TIERS),
            latency_class=latency_class,
            label=options.label or "",
            owner=visit.tenant.name,
            scope_id=None
            if ttl_s is None or is_private
            else self.retention.scope_id(visit.tenant.name, namespace, ttl_s=ttl_s),
            deadline_s=visit.deadline_s,
        )

    def _ttl_s(self, body: CallBody, *, has_breakpoint: bool) -> int | None:
        """Give how long the prompt shall be kept, None for no longer than others."""
        ttl = body.prompt_cache_options.ttl if body.prompt_cache_options is not None else None
        if ttl is not None:
            seconds = parse_ttl_s(ttl)
            if not 0 < seconds <= self.config.max_retention_s:
                raise InvalidRequest(
                    f"prompt_cache_options/ttl must be above 0 and at most {self.config.max_retention_s} s, "
                    f"got {ttl}",
                    parameter="prompt_cache_options/ttl",
                    value=ttl,
                )
            return seconds
        if body.prompt_cache_retention == "24h":
            return min(LONG_TTL_S, self.config.max_retention_s)
        return min(DEFAULT_TTL_S, self.config.max_retention_s) if has_breakpoint else None

    def room(self, num_prompt_tokens: int) -> int:
        """Give the most new tokens that fit after a prompt, at least 1 (the engine refuses what does not fit)."""
        config = self.engine.config
        return max(min(config.max_context, config.num_kv_tokens) - num_prompt_tokens, 1)

    def fitted(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Give the sampling with max_tokens cut to what fits; for a max_tokens that the client did not write."""
        room = min(sampling.max_tokens, self.room(num_prompt_tokens))
        return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))

    def close(self) -> None:
        """End the threads, the resumable streams and the scopes."""
        self.scopes.close_all()
        self.retention.close_all()
        for shelf in self._shelves.values():
            shelf.close()
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Watch:
    """Counts a batch's chunks, and tells its span of the first one."""

    counts: RequestWatch

    def chunk(self, index: int, chunk: OutputChunk, at_s: float) -> None:
        if self.counts.chunk(index, chunk, at_s):
            note_first_token(time.perf_counter() - at_s)

    def failed(self, error: BaseException | None) -> None:
        self.counts.failed(error)


def service_of(request: Request) -> Service:
    """Give the app's service."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def arrival(request: Request) -> tuple[Service, Visit]:
    """Give what every route begins with: the service, and the request as the gate saw it."""
    return service_of(request), visit_of(request.scope)
