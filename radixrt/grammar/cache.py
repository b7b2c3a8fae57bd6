"""Compiled constraints, shared between requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarSpec
from radixrt.errors import RequestError
from radixrt.grammar.compile import DEFAULT_LIMITS, check_size, compile_for
from radixrt.grammar.matcher import CompiledGrammar
from radixrt.grammar.vocabulary import GrammarVocabulary
from radixrt.grammar.worker import CompileWorker, is_plainly_small
from radixrt.text.tokenizer import Tokenizer

_FAILURE_BYTES = 4096  # what a remembered failure counts for


class GrammarCache:
    """Compile each constraint once; keep the most recently used ones within a limit of bytes. Thread-safe.

    Equal constraints that arrive together are compiled by the first, the others wait for it. A refusal is
    remembered like a grammar; an error that is not the caller's fault is not.

    Invariant: num_bytes <= config.grammar_cache_bytes after every `get`, unless compilations are under way.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int | None = None, config: GrammarConfig = DEFAULT_LIMITS
    ) -> None:
        self.vocabulary = GrammarVocabulary(tokenizer, vocab_size=vocab_size)
        self._config = config
        self._worker = CompileWorker(config)
        self._lock = threading.Lock()
        self._entries: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        """Give the compiled constraint; compile it if it is not there.

        Raises: what `radixrt.grammar.compile` raises.
        """
        with self._lock:
            entry = self._entries.get(spec)
            is_mine = entry is None
            if entry is None:
                entry = self._entries[spec] = Future()
            self._entries.move_to_end(spec)
        if is_mine:
            self._fill(spec, entry)
        error = entry.exception()
        if isinstance(error, RequestError):
            # A new error each time: one that is raised again and again collects the frames of all its callers.
            raise type(error)(str(error), parameter=error.parameter, value=error.value)
        grammar = entry.result()
        self._shrink()
        return grammar

    def close(self) -> None:
        """End the process that tries out large constraints, if one was started."""
        self._worker.close()

    @property
    def num_bytes(self) -> int:
        """Give the bytes of all entries now."""
        with self._lock:
            return sum(map(_num_bytes, self._entries.values()))

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _fill(self, spec: GrammarSpec, entry: Future[CompiledGrammar]) -> None:
        try:
            check_size(spec, self._config)
            if not is_plainly_small(spec):
                self._worker.vet(spec)
            entry.set_result(compile_for(spec, self.vocabulary, self._config))
        except BaseException as error:
            entry.set_exception(error)  # those who wait must learn of it, whatever it is
            if not isinstance(error, RequestError):
                with self._lock:
                    del self._entries[spec]
                raise
        finally:
            self._shrink()

    def _shrink(self) -> None:
        """Drop the least recently used finished entries until the limit holds."""
        with self._lock:
            num_bytes = sum(map(_num_bytes, self._entries.values()))
            for spec, entry in list(self._entries.items()):
                if num_bytes <= self._config.grammar_cache_bytes:
                    break
                if entry.done():
                    num_bytes -= _num_bytes(entry)
                    del self._entries[spec]


def _num_bytes(entry: Future[CompiledGrammar]) -> int:
    if not entry.done():
        return 0
    return _FAILURE_BYTES if entry.exception() is not None else entry.result().num_bytes
