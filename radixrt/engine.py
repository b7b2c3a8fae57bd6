"""Engine and AsyncEngine: the loop of five verbs in its own thread, and the doors to it.

    submit -> inbox -> [ plan -> build -> forward -> sample -> commit ] -> delivery -> reader

The loop itself is in loop.py; here are the checks of a request and the ways to wait for its output.
"""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import torch

from radixrt.asking import Prompt, as_prompts, as_sampling, check_ids
from radixrt.config import EngineConfig, home_folder
from radixrt.delivery import Deliver, Delivery, OutputCollector
from radixrt.errors import InvalidRequest, NeverFits, PromptTooLong
from radixrt.exec.assembly import make_runner, resolve_overlap
from radixrt.exec.resolve import ResolvedConfig, resolve
from radixrt.explain import PrefixReport
from radixrt.grammar.cache import GrammarCache
from radixrt.grammar.matcher import CompiledGrammar
from radixrt.kv.cache import PrefixCache
from radixrt.kv.store import KVStore
from radixrt.loop import EngineLoop, Scope, Ticket
from radixrt.mailbox import Mailbox
from radixrt.metrics import EngineStats
from radixrt.model.catalog import resolve as resolve_model
from radixrt.model.kept_spec import load_spec
from radixrt.model.loader import AnyDecoder, load_model
from radixrt.model.native import NativeDecoder
from radixrt.sched.constraint import Constraint, Judge
from radixrt.sched.scheduler import Scheduler
from radixrt.sched.sequence import Sequence
from radixrt.streams import ChunkStream, stream_chunks, whole_output
from radixrt.text.tokenizer import Tokenizer
from radixrt.types import (
    DEFAULT_NAMESPACE,
    GenerateRequest,
    GenerationOutput,
    Namespace,
    OutputChunk,
    SamplingParams,
)

DEFAULT_SCOPE_TTL_S = 600.0


class Engine:
    """Generate text with a model over a radix prefix cache.

    Args:
        model: catalog name, hub id, local folder or .gguf file.
        options: any field of `EngineConfig`'s sections by its name, e.g. page_size=16.
    Attributes: tokenizer; config: resolved; grammars: the compiled constraints.
    Raises:
        InvalidRequest: unknown option or bad value. UnknownModel, ModelLoadError: the model.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = str(model)
        config = EngineConfig.load(options)
        folder = resolve_model(config.model.model, home=home_folder(), show_progress=True)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.config: ResolvedConfig = resolve(
            config,
            folder=folder,
            spec=load_spec(folder, kept_in=home_folder() / "specs"),
            num_tokenizer_ids=self.tokenizer.vocab_size,
        )
        resolved = self.config
        decoder = _load(resolved)
        store = KVStore(resolved.layout, num_pages=resolved.num_pages, device=resolved.device)
        self._runner = make_runner(decoder, store, resolved)
        overlap = resolve_overlap(config.sched, self._runner)
        self._cache = PrefixCache(
            resolved.num_pages,
            page_size=config.kv.page_size,
            is_enabled=config.kv.prefix_cache,
            eviction=config.kv.eviction,
        )
        self.grammars = GrammarCache(self.tokenizer, vocab_size=resolved.num_token_ids, config=config.grammar)
        self._seeds = random.Random(config.sched.seed)
        self._arrivals = itertools.count()
        scheduler = Scheduler(self._cache, config.sched)
        self._loop = EngineLoop(self._runner, self._cache, scheduler, overlap=overlap)

    # -- requests ---------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, deliver: Deliver) -> Ticket:
        """Start a request.

        Args:
            deliver: gets every OutputChunk, the last one with `usage`, or one exception; called in the engine's
                thread, must return soon.
        Raises:
            RequestError: the request breaks a rule; nothing was started.
            DeadlineExceeded: compiling its constraint took all its time.
            EngineStopped: the engine is closed or died.
        """
        return self._submit(self._checked(request), deliver)

    def mailbox(self) -> Mailbox:
        """Give the running event loop's mailbox, for `stream_chunks` and `whole_output`; the same one every time."""
        return self._loop.mailbox()

    def _submit(self, request: GenerateRequest, deliver: Deliver) -> Ticket:
        """Start a request that `request` or `_checked` gave."""
        grammar = request.sampling.grammar
        constraint = None
        if grammar is not None:
            began_s = time.monotonic()
            compiled = self.grammars.get(grammar, owner=request.owner)
            request = request.after(time.monotonic() - began_s)
            judge = self._judge(compiled) if compiled.report.checked else None
            constraint = Constraint.begin(
                compiled.start(),
                room=request.sampling.max_tokens,
                judge=judge,
                forces=self.config.options.grammar.forced_runs,
            )
        seed = request.sampling.seed
        if seed is None:
            seed = self._seeds.getrandbits(64)
        sequences: list[Sequence] = []
        for sample_index in range(request.sampling.n):
            sequences.append(
                Sequence(
                    request,
                    arrival=next(self._arrivals),
                    seed=seed,
                    eos_ids=frozenset(self.tokenizer.eos_ids),
                    sample_index=sample_index,
                    leader=sequences[0] if sequences else None,
                    constraint=None if constraint is None else constraint.fork(),
                )
            )
        return self._loop.submit(Delivery(request, sequences, self.tokenizer, deliver))

    def _judge(self, grammar: CompiledGrammar) -> Judge:
        return lambda token_ids: grammar.check(self.tokenizer.decode(token_ids))

    # The overloads overlap because a str is also a sequence of str; the first one wins, at run time too.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        namespace: Namespace = ...,
        scope: Scope | None = ...,
        label: str = ...,
    ) -> GenerationOutput: ...
    @overload
    def generate(
        self,
        prompt: Seq[Prompt],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        namespace: Namespace = ...,
        scope: Scope | None = ...,
        label: str = ...,
    ) -> list[GenerationOutput]: ...
    def generate(
        self,
        prompt: Prompt | Seq[Prompt],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        scope: Scope | None = None,
        label: str = "",
    ) -> GenerationOutput | list[GenerationOutput]:
        """Generate for one prompt (text or token ids) or for a list of prompts, order kept.

        Args:
            namespace: whose prefix cache to use.
            scope: keeps the prompts and outputs cached while it is open.
            label: call site, for reports and learned output lengths.
        Raises:
            RequestError: a request breaks a rule; no request of the list is started.
            EngineError: the first failure, in order, after all have ended.
        """
        prompts, is_batch = as_prompts(prompt)
        requests = [
            self.request(item, params, namespace=namespace, scope=scope, label=label)
            for item, params in zip(prompts, as_sampling(sampling, len(prompts)), strict=True)
        ]
        handles = self._start(requests)
        try:
            outputs = [handle.done.get() for handle in handles]
        finally:
            for handle in handles:
                handle.ticket.abort()  # those that are not done, on Ctrl-C
        for output in outputs:
            if isinstance(output, BaseException):
                raise output
        results = [output for output in outputs if isinstance(output, GenerationOutput)]
        return results if is_batch else results[0]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> ChunkStream:
        """Give a request's chunks as they come; closing or dropping the iterator aborts the request."""
        self._check_thread()
        items: queue.SimpleQueue[OutputChunk | BaseException] = queue.SimpleQueue()
        request = self.request(prompt, sampling, namespace=namespace)
        return ChunkStream(items, self._submit(request, items.put))

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        scope: Scope | None = None,
        label: str = "",
    ) -> GenerateRequest:
        """Encode a prompt into a request, checked as `submit` checks it."""
        if scope is not None and not (isinstance(scope, Scope) and scope.belongs_to(self._loop)):
            raise InvalidRequest("scope must be one of this engine", parameter="scope", value=scope)
        request = GenerateRequest(
            self._encode(prompt),
            SamplingParams() if sampling is None else sampling,
            namespace,
            label=label,
            scope_id=None if scope is None else scope.scope_id,
        )
        return self._checked(request)

    def _start(self, requests: Seq[GenerateRequest]) -> list[_Handle]:
        self._check_thread()
        handles: list[_Handle] = []
        try:
            for request in requests:
                done: queue.SimpleQueue[GenerationOutput | BaseException] = queue.SimpleQueue()
                collector = OutputCollector(request.prompt_ids, num_samples=request.sampling.n)
                handles.append(_Handle(done, self._submit(request, collector.deliver_to(done.put))))
        except BaseException:
            for handle in handles:
                handle.ticket.abort()
            raise
        return handles

    def _check_thread(self) -> None:
        if self._loop.is_own_thread:
            raise RuntimeError("generate and stream would wait for the thread they are called in; use submit")

    # -- checks of a request ------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        token_ids: Any = prompt  # whatever the caller gave
        if isinstance(token_ids, Seq) and not isinstance(token_ids, bytes | bytearray):
            return tuple(token_ids)
        raise InvalidRequest(
            f"prompt must be text or token ids, got {type(prompt).__name__}", parameter="prompt", value=prompt
        )

    def _check_prompt(self, prompt_ids: Seq[int]) -> None:
        if not prompt_ids:
            raise InvalidRequest("prompt must have at least one token", parameter="prompt", value="")
        check_ids("prompt", prompt_ids, self.config.num_token_ids)

    def _checked(self, request: GenerateRequest) -> GenerateRequest:
        """Give the request with max_tokens cut to the context, or raise the RequestError it deserves."""
        prompt_ids, sampling = request.prompt_ids, request.sampling
        num_ids = self.config.num_token_ids
        self._check_prompt(prompt_ids)
        check_ids("logit_bias", tuple(sampling.logit_bias), num_ids)
        check_ids("stop_token_ids", sampling.stop_token_ids, num_ids)
        check_ids("logprob_token_ids", sampling.logprob_token_ids, num_ids)
        check_ids("shown_token_ids", sampling.shown_token_ids, self.tokenizer.vocab_size)
        num_left = self.config.max_context - len(prompt_ids)
        if num_left < 1:
            raise PromptTooLong(
                f"prompt must leave room for one token in the context of {self.config.max_context}, "
                f"got {len(prompt_ids)} tokens",
                parameter="prompt",
                value=len(prompt_ids),
            )
        if not 0 <= request.logprob_start < len(prompt_ids):
            raise InvalidRequest(
                f"logprob_start must be in [0, {len(prompt_ids)}), got {request.logprob_start}",
                parameter="logprob_start",
                value=request.logprob_start,
            )
        if request.logprob_start and sampling.prompt_logprobs is None:
            raise InvalidRequest(
                "logprob_start needs prompt_logprobs", parameter="logprob_start", value=request.logprob_start
            )
        max_tokens = min(sampling.max_tokens, num_left)
        # A sampled last token is never computed; one that the grammar forces may be.
        num_most = len(prompt_ids) + max_tokens - (sampling.grammar is None)
        if not self._cache.fits_ever(num_most):
            raise NeverFits(
                f"prompt and max_tokens must fit the pool of {self.config.num_kv_tokens} tokens, got {num_most}",
                parameter="max_tokens",
                value=sampling.max_tokens,
            )
        if max_tokens != sampling.max_tokens:
            request = replace(request, sampling=replace(sampling, max_tokens=max_tokens))
        return request

    # -- questions --------------------------------------------------------------------------------------

    def explain(self, prompt: Prompt, *, namespace: Namespace = DEFAULT_NAMESPACE) -> PrefixReport:
        """Say how much of a prompt is cached now, what differs where it stops, and what was evicted."""
        token_ids = self._encode(prompt)
        self._check_prompt(token_ids)
        found, now_s = self._loop.explain(namespace, token_ids)
        return PrefixReport.build(found, token_ids, tokenizer=self.tokenizer, now_s=now_s)

    def scope(self, *, ttl_s: float = DEFAULT_SCOPE_TTL_S) -> Scope:
        """Open a scope: prefixes of requests that name it are the last to be evicted until it is closed.

        Args:
            ttl_s: seconds after its last use at which it ends by itself, above 0.
        """
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not ttl_s > 0:
            raise InvalidRequest(
                f"ttl_s must be a number above 0, got {ttl_s!r}", parameter="ttl_s", value=ttl_s
            )
        return self._loop.open_scope(ttl_s)

    @property
    def is_running(self) -> bool:
        """Tell whether the engine takes requests: neither closed nor dead. Never waits."""
        return self._loop.is_running

    def stats(self) -> EngineStats:
        """Give the engine's counters and its present load."""
        return self._loop.stats(self.grammars.stats())

    def clear_cache(self) -> int:
        """Forget all prefixes that no running request uses; give how many pages became free."""
        return self._loop.ask(self._cache.clear)

    def check(self) -> None:
        """Raise InvariantViolation unless every owner's invariants hold."""
        self._loop.check()

    def close(self) -> None:
        """Stop the loop; whoever still waits gets EngineStopped. Closing twice is fine."""
        self._loop.close()
        self.grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncEngine:
    """The same engine for asyncio: `await generate(...)`, `async for chunk in stream(...)`.

    Args:
        engine: an Engine to share, or the model's name; options as for Engine when it is made here.
    """

    def __init__(self, engine: Engine | str | Path | None = None, **options: Any) -> None:
        if isinstance(engine, Engine) and options:
            raise InvalidRequest(
                "options must be given to the Engine itself", parameter=next(iter(options)), value=options
            )
        self.engine = engine if isinstance(engine, Engine) else Engine(engine, **options)

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> GenerationOutput:
        """Generate for one prompt; cancelling the task aborts the request."""
        request = self.engine.request(prompt, sampling, namespace=namespace)
        return await whole_output(self.engine._submit, request, mailbox=self.engine.mailbox())

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> AsyncIterator[OutputChunk]:
        """Give a request's chunks as they come; leaving early or cancelling aborts the request."""
        request = self.engine.request(prompt, sampling, namespace=namespace)
        mailbox = self.engine.mailbox()
        async with aclosing(stream_chunks(self.engine._submit, request, mailbox=mailbox)) as chunks:
            async for chunk in chunks:
                yield chunk

    def close(self) -> None:
        """Stop the engine; whoever still waits gets EngineStopped."""
        self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(config: ResolvedConfig) -> AnyDecoder:
    """Load the model and share out the CPU's threads: all to the decoder that computes."""
    num_threads = config.num_threads
    decoder = load_model(
        config.folder,
        device=config.device,
        dtype=config.dtype,
        kernels=config.options.model.kernels,
        num_threads=num_threads,
        build_folder=home_folder() / "build",
        page_size=config.layout.page_size,
        max_context=config.max_context,
    )
    # Torch's threads go on spinning for a while after their work, on the cores that the native step needs.
    torch.set_num_threads(1 if isinstance(decoder, NativeDecoder) else num_threads)
    return decoder


@dataclass(frozen=True, slots=True)
class _Handle:
    done: queue.SimpleQueue[GenerationOutput | BaseException]
    ticket: Ticket
