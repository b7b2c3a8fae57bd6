"""Compiled constraints, shared between requests."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future
from dataclasses import replace

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarSpec
from radixrt.errors import RequestError
from radixrt.grammar.compile import DEFAULT_LIMITS, build, check_size, marks_of
from radixrt.grammar.counters import CompileStats
from radixrt.grammar.matcher import CompiledGrammar
from radixrt.grammar.vocabulary import GrammarVocabulary
from radixrt.grammar.worker import CompileWorkers
from radixrt.text.tokenizer import Tokenizer

_FAILURE_BYTES = 4096  # what a remembered failure counts for


class GrammarCache:
    """Compile each constraint once; keep the most recently used ones within a limit of bytes. Thread-safe.

    Equal constraints that arrive together are compiled by the first, the others wait for it. A refusal is
    remembered like a grammar; an error that is not the caller's fault is not.

    Each owner has a share: over the limit, whoever holds most gives up what it used longest ago, so that nobody can
    flush another's.

    Invariant: the bytes of all entries, each as of its last `get`, are at most config.grammar_cache_bytes, unless
    compilations are under way. (Entries grow by their masks; a hit looks at the one entry only.)
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int | None = None, config: GrammarConfig = DEFAULT_LIMITS
    ) -> None:
        self.vocabulary = GrammarVocabulary(tokenizer, vocab_size=vocab_size)
        self._config = config
        self._workers = CompileWorkers(config)
        self._lock = threading.Lock()
        self._entries: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._owners: dict[GrammarSpec, str] = {}  # who had each compiled; same keys as _entries
        self._sizes: Counter[GrammarSpec] = Counter()  # bytes of each entry when it was last used
        self._num_bytes = 0  # their sum: a hit must not look at every entry
        self._stats = CompileStats()

    def get(self, spec: GrammarSpec, *, owner: str = "") -> CompiledGrammar:
        """Give the compiled constraint; compile it if it is not there.

        Args:
            owner: whose share of the memory it counts for if it is compiled now.

        Raises: what `radixrt.grammar.compile` raises.
        """
        with self._lock:
            entry = self._entries.get(spec)
            is_mine = entry is None
            if entry is None:
                entry = self._entries[spec] = Future()
                self._owners[spec] = owner
            else:
                self._stats = replace(self._stats, num_cached=self._stats.num_cached + 1)
            self._entries.move_to_end(spec)
        if is_mine:
            self._fill(spec, entry)
        error = entry.exception()
        if isinstance(error, RequestError):
            raise _fresh(error)
        grammar = entry.result()
        self._measure(spec, entry)
        return grammar

    def warm(self) -> None:
        """Start the process that reads constraints, so that the first one finds it ready. Cost: milliseconds.

        A server does. Without it the first constraint waits some 0.4 s; who never has one pays nothing.
        """
        self._workers.warm()

    def close(self) -> None:
        """End the processes that read constraints, if any was started; new constraints raise EngineStopped."""
        self._workers.close()

    @property
    def num_bytes(self) -> int:
        """Give the bytes of all entries now."""
        with self._lock:
            return sum(map(_num_bytes, self._entries.values()))

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def stats(self) -> CompileStats:
        """Give what happened since the start, and what is held now."""
        with self._lock:
            return replace(self._stats, num_bytes=self._num_bytes, num_entries=len(self._entries))

    def _fill(self, spec: GrammarSpec, entry: Future[CompiledGrammar]) -> None:
        started = time.perf_counter()
        try:
            check_size(spec, self._config)
            self._workers.warm()
            _ = self.vocabulary.llguidance_tokenizer  # the first time it is built while the process starts
            prepared = self._workers.prepare(spec, marks_of(spec, self.vocabulary))
            entry.set_result(build(spec, prepared, self.vocabulary))
        except RequestError as error:
            entry.set_exception(_fresh(error))
        except BaseException as error:
            entry.set_exception(error)  # those who wait must learn of it, whatever it is
            with self._lock:
                self._drop(spec)
            raise
        finally:
            self._count(entry, time.perf_counter() - started)
            self._measure(spec, entry)

    def _count(self, entry: Future[CompiledGrammar], seconds: float) -> None:
        is_refused = entry.exception() is not None
        with self._lock:
            now = self._stats
            self._stats = replace(
                now,
                num_compiled=now.num_compiled + (not is_refused),
                num_refused=now.num_refused + is_refused,
                compile_s=now.compile_s.plus(seconds),
            )

    def _measure(self, spec: GrammarSpec, entry: Future[CompiledGrammar]) -> None:
        """Take in how large an entry is now, and make room if that is too much."""
        num_bytes = _num_bytes(entry)
        with self._lock:
            if spec in self._entries:
                self._num_bytes += num_bytes - self._sizes[spec]
                self._sizes[spec] = num_bytes
            is_over = self._num_bytes > self._config.grammar_cache_bytes
        if is_over:
            self._shrink()

    def _shrink(self) -> None:
        """Drop finished entries of those who hold most, least recently used first, until the limit holds."""
        with self._lock:
            held: Counter[str] = Counter()
            for spec, num_bytes in self._sizes.items():
                held[self._owners[spec]] += num_bytes
            while held.total() > self._config.grammar_cache_bytes:
                owner = max(held, key=held.__getitem__)
                oldest = next(
                    spec
                    for spec, entry in self._entries.items()
                    if self._owners[spec] == owner and entry.done()
                )
                held[owner] -= self._sizes[oldest]
                self._drop(oldest)

    def _drop(self, spec: GrammarSpec) -> None:
        """Forget an entry (the lock is held)."""
        self._entries.pop(spec, None)  # another thread may have made room meanwhile
        self._owners.pop(spec, None)
        self._num_bytes -= self._sizes.pop(spec, 0)


def _fresh(error: RequestError) -> RequestError:
    """Give the same error without the frames of its callers: one that is kept, or raised again, would collect them."""
    return type(error)(str(error), parameter=error.parameter, value=error.value)


def _num_bytes(entry: Future[CompiledGrammar]) -> int:
    if not entry.done():
        return 0
    return _FAILURE_BYTES if entry.exception() is not None else entry.result().num_bytes
