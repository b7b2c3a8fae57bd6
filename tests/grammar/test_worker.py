"""The processes that read constraints: what they hand over, and that their deaths cost one constraint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarSpec, StructuralTag
from radixrt.errors import EngineError, EngineStopped, GrammarTooCostly, UnsupportedGrammar
from radixrt.grammar import CompiledGrammar, GrammarCache
from radixrt.grammar.compile import build, compile_for, marks_of, prepare
from radixrt.grammar.vocabulary import GrammarVocabulary
from radixrt.grammar.worker import _MAX_START_S, CompileWorker, CompileWorkers, is_plainly_small
from tests.grammar.test_laws import SPECS
from tests.support.threads import wait_until
from tests.support.tokenizers import byte_tokenizer
from tests.support.workers import stop

TOKENIZER = byte_tokenizer(extra=("name", '":"'))
VOCABULARY = GrammarVocabulary(TOKENIZER)
CONFIG = GrammarConfig()
FINE = GrammarSpec.json_schema({"type": "integer"})

# Python runs this in every process that has its folder in PYTHONPATH: the engine does what the title of a schema says.
ACCIDENTS = """
import os, signal, sys, time
import llguidance

real = llguidance.LLMatcher

class Engine:
    def __call__(self, *arguments, **options):
        return real(*arguments, **options)

    def __getattr__(self, name):
        return getattr(real, name)

    num_read = 0

    def grammar_from_json_schema(self, text, **options):
        self.num_read += 1
        if "please be full when old" in text and self.num_read > 2:  # it has read one before it was ready
            raise MemoryError
        if "please abort" in text:
            os.abort()
        if "please linger" in text:  # between the end of what it writes and its own
            os.close(1)
            time.sleep(0.5)
            os.abort()
        if "please leave the bounds" in text:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "please ask for all memory" in text:
            sys.stderr.write("memory allocation of 99999999999 bytes failed\\n")
            sys.stderr.flush()
            os.abort()
        if "please be killed" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "please stumble" in text:
            raise KeyError("stumbled")
        if "please sleep" in text:
            time.sleep(600)
        return real.grammar_from_json_schema(text, **options)

llguidance.LLMatcher = Engine()
"""


def titled(title: str) -> GrammarSpec:
    return GrammarSpec.json_schema({"enum": [7, title]})


def slow_spec(number: int) -> GrammarSpec:
    return GrammarSpec.json_schema({"enum": [f"word {number} {index}" for index in range(20_000)]})


@pytest.fixture
def worker() -> Iterator[CompileWorker]:
    worker = CompileWorker(CONFIG, max_ms=CONFIG.max_grammar_compile_ms)
    yield worker
    worker.close()
    assert worker.process_id is None


@pytest.fixture
def accidents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileWorkers]:
    """Give workers whose engine has accidents."""
    (tmp_path / "sitecustomize.py").write_text(ACCIDENTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    workers = CompileWorkers(GrammarConfig(max_grammar_compile_ms=500))
    yield workers
    workers.close()


# -- what is handed over -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers() -> Iterator[CompileWorkers]:
    workers = CompileWorkers(CONFIG)
    yield workers
    workers.close()


def masks(grammar: CompiledGrammar) -> list[bytes]:
    """Give the masks along the walk that always takes the last token."""
    matcher, row, found = grammar.start(), np.zeros((VOCABULARY.vocab_size + 31) // 32, dtype=np.int32), []
    for _ in range(20):
        matcher.fill_mask(row)
        found.append(row.tobytes())
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not allowed.size or not matcher.accept(int(allowed[-1])):
            break
    return found


@pytest.mark.parametrize("name", SPECS)
def test_what_a_worker_hands_over_is_what_this_process_would_find(workers: CompileWorkers, name: str) -> None:
    spec = SPECS[name]
    here = prepare(spec, marks_of(spec, VOCABULARY), CONFIG)
    there = workers.prepare(spec, marks_of(spec, VOCABULARY))
    assert there.as_json() == here.as_json()
    one, other = compile_for(spec, VOCABULARY, CONFIG), build(spec, there, VOCABULARY)
    assert masks(one) == masks(other)
    assert one.report == other.report


def test_nothing_is_read_in_the_process_that_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_here(*_: object) -> None:
        raise AssertionError("read in this process")

    monkeypatch.setattr(sys.modules["radixrt.grammar.compile"], "_prepared", read_here)
    with pytest.raises(AssertionError, match="read in this process"):
        compile_for(FINE, VOCABULARY, CONFIG)
    cache = GrammarCache(TOKENIZER)
    for spec in SPECS.values():
        grammar = cache.get(spec)
        assert grammar.start().closing_run(100) is not None or spec == SPECS["ambiguous lark"]
    cache.close()


def test_control_tokens_keep_their_ids_on_the_way() -> None:
    tag = StructuralTag("<|im_start|>call ", GrammarSpec.regex("[a-z]{2}"), "<|im_start|>")
    spec = GrammarSpec.structural([tag], triggers=["<|im_start|>"], min_tags=1)
    cache = GrammarCache(TOKENIZER)
    matcher = cache.get(spec).start()
    control_id = VOCABULARY.control_ids["<|im_start|>"]
    for token_id in [*b"free text", control_id, *b"call ab", control_id]:
        assert matcher.accept(token_id)
    assert matcher.is_accepting
    cache.close()


def test_a_judge_from_a_worker_follows_the_draft_of_the_schema() -> None:
    cache = GrammarCache(TOKENIZER)
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "number",
        "maximum": 3,
        "exclusiveMaximum": True,
    }
    grammar = cache.get(GrammarSpec.json_schema(schema))
    assert grammar.check("2.5")
    assert not grammar.check("3")
    cache.close()


# -- deaths and limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "error", "text"),
    [
        ("please abort", UnsupportedGrammar, r"ends its process on it \(SIGABRT\)"),
        ("please linger", UnsupportedGrammar, r"ends its process on it \(SIGABRT\)"),
        ("please leave the bounds", UnsupportedGrammar, r"ends its process on it \(SIGSEGV\)"),
        ("please ask for all memory", GrammarTooCostly, "max_grammar_memory_bytes"),
        ("please be killed", EngineError, "killed twice"),
        ("please stumble", EngineError, r"failed \(KeyError\)$"),
        ("please sleep", EngineError, "too busy"),
    ],
)
def test_an_accident_is_told_as_what_it_was_and_the_next_one_is_served(
    accidents: CompileWorkers, title: str, error: type[Exception], text: str
) -> None:
    accidents.prepare(FINE)
    with pytest.raises(error, match=text) as caught:
        accidents.prepare(titled(title))
    assert type(caught.value) is error
    assert accidents.prepare(FINE).grammar


def test_memory_that_others_took_is_not_blamed_on_a_constraint(accidents: CompileWorkers) -> None:
    accidents.prepare(FINE)
    first = accidents._quick.process_id
    assert accidents.prepare(titled("please be full when old")).grammar
    assert accidents._quick.process_id not in (None, first)


def test_a_crash_costs_one_constraint_and_is_remembered(
    accidents: CompileWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = GrammarCache(TOKENIZER)
    num_started = 0
    start = subprocess.Popen.__init__

    def counted(self: object, *args: object, **options: object) -> None:
        nonlocal num_started
        num_started += 1
        start(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(subprocess.Popen, "__init__", counted)
    neighbours = [GrammarSpec.json_schema({"const": number}) for number in range(12)]
    answers: list[bool] = []

    def ask() -> None:
        answers.extend(cache.get(spec).check(spec.text[-2]) for spec in neighbours)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(3):
        with pytest.raises(UnsupportedGrammar, match="SIGABRT"):
            cache.get(titled("please abort"))
    thread.join()
    assert len(answers) == len(neighbours)
    assert num_started == 2  # the second after the only crash
    cache.close()


def test_a_worker_that_takes_too_long_is_ended_and_started_anew() -> None:
    workers = CompileWorkers(GrammarConfig(max_grammar_compile_ms=10))
    try:
        with pytest.raises(GrammarTooCostly, match=r"more than 10 ms \(max_grammar_compile_ms\)"):
            workers.prepare(slow_spec(0))
        assert workers.prepare(GrammarSpec.regex("a")).automaton is not None
    finally:
        workers.close()


def test_what_looks_smaller_than_it_is_gets_the_time_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.grammar.worker.QUICK_MS", 10)
    monkeypatch.setattr("radixrt.grammar.worker.is_plainly_small", lambda _: True)
    workers = CompileWorkers(CONFIG)
    try:
        assert workers.prepare(slow_spec(3)).grammar
    finally:
        workers.close()


def test_small_constraints_do_not_wait_for_large_ones(workers: CompileWorkers) -> None:
    large = GrammarSpec.json_schema({"enum": [f"word {index}" for index in range(2_000)]})
    order: list[str] = []
    workers.prepare(FINE)
    assert not is_plainly_small(large)
    reads_large = stop(workers._patient)

    def ask() -> None:
        workers.prepare(large)
        order.append("large")

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(workers._patient._lock.locked)
    workers.prepare(FINE)
    order.append("small")
    os.kill(reads_large, signal.SIGCONT)
    thread.join()
    assert order == ["small", "large"]


def test_a_worker_killed_in_mid_compile_is_asked_once_more(worker: CompileWorker) -> None:
    worker.prepare(FINE)
    first = stop(worker)
    killer = threading.Timer(0.05, os.kill, (first, signal.SIGKILL))
    killer.start()
    assert worker.prepare(slow_spec(1)).grammar
    killer.join()
    assert worker.process_id not in (None, first)


def test_an_interrupted_question_does_not_answer_the_next_one(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupt(BaseException):
        pass

    def interrupted(*_: object) -> bytes:
        raise Interrupt

    worker.prepare(FINE)
    with monkeypatch.context() as patch:
        patch.setattr("radixrt.grammar.worker._read_line", interrupted)
        with pytest.raises(Interrupt):
            worker.prepare(GrammarSpec.json_schema({"not": {"uniqueItems": True}, "enum": list(range(9000))}))
    assert worker.prepare(FINE).grammar  # the refusal of the other one must not come here


def test_a_worker_that_died_while_idle_is_not_noticed(worker: CompileWorker) -> None:
    worker.prepare(FINE)
    assert worker.process_id is not None
    os.kill(worker.process_id, signal.SIGKILL)
    time.sleep(0.3)
    assert worker.prepare(FINE).grammar


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGSEGV])
def test_a_worker_that_ends_before_it_is_ready_is_started_once_more(
    worker: CompileWorker, number: signal.Signals
) -> None:
    worker.warm()
    first = worker.process_id
    assert first is not None
    os.kill(first, number)
    assert worker.prepare(FINE).grammar
    assert worker.process_id != first


def test_a_worker_that_never_starts_is_told_as_an_accident_and_may_start_later(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("radixrt.grammar.worker.sys.executable", "/bin/false")
        with pytest.raises(EngineError, match="does not start") as caught:
            worker.prepare(FINE)
    assert not isinstance(caught.value, EngineStopped)  # the engine lives
    assert worker.prepare(FINE).grammar


def test_a_worker_that_takes_too_long_to_start_is_not_waited_for_once_more(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr("radixrt.grammar.worker.sys.executable", str(sleeper))
    monkeypatch.setattr("radixrt.grammar.worker._MAX_START_S", 0.1)
    monkeypatch.setattr("radixrt.grammar.worker._MAX_END_S", 30.0)
    started_s = time.monotonic()
    with pytest.raises(EngineError, match="does not start"):
        worker.prepare(FINE)
    assert time.monotonic() - started_s < 30


def test_a_closed_worker_answers_nobody_and_starts_nothing() -> None:
    worker = CompileWorker(CONFIG, max_ms=CONFIG.max_grammar_compile_ms)
    worker.prepare(FINE)
    stop(worker)
    closer = threading.Timer(0.05, worker.close)
    closer.start()
    with pytest.raises(EngineStopped):
        worker.prepare(slow_spec(4))
    closer.join()
    assert worker.process_id is None
    with pytest.raises(EngineStopped):
        worker.warm()


def test_a_worker_says_what_compiling_would_say(worker: CompileWorker) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        worker.prepare(GrammarSpec.json_schema({"items": {"uniqueItems": True}}))
    assert caught.value.parameter == "/items/uniqueItems"


def test_memory_is_limited() -> None:
    large = GrammarSpec.json_schema({"enum": [f"{number} word" for number in range(60_000)]})
    workers = CompileWorkers(GrammarConfig(max_grammar_memory_bytes=1 << 24))
    try:
        with pytest.raises(GrammarTooCostly, match="max_grammar_memory_bytes"):
            workers.prepare(large)
    finally:
        workers.close()


def test_a_build_that_would_take_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.grammar.probe.MAX_BUILD_S", 0.0)
    from radixrt.grammar.probe import try_out

    with pytest.raises(GrammarTooCostly, match="to build"):
        try_out(FINE, prepare(FINE, marks_of(FINE, VOCABULARY), CONFIG))


def test_a_forgotten_worker_leaves_no_process() -> None:
    worker = CompileWorker(CONFIG, max_ms=CONFIG.max_grammar_compile_ms)
    worker.prepare(FINE)
    process_id = worker.process_id
    assert process_id is not None
    assert Path(f"/proc/{process_id}").exists()
    del worker
    assert not Path(f"/proc/{process_id}").exists()


def test_warming_starts_one_process_and_waits_for_nothing() -> None:
    cache = GrammarCache(TOKENIZER)
    worker = cache._workers._quick
    cache.warm()
    assert not worker._is_ready  # nobody has waited until it said so
    first, started_s = stop(worker), time.monotonic()
    cache.warm()
    assert time.monotonic() - started_s < _MAX_START_S / 2
    os.kill(first, signal.SIGCONT)
    assert cache.get(FINE).check("1")
    assert worker.process_id == first
    cache.close()


FORKED = """
import os, sys
from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarSpec
from radixrt.grammar.worker import CompileWorker

worker = CompileWorker(GrammarConfig(), max_ms=5000)
worker.prepare(GrammarSpec.regex("a"))
first = worker.process_id
for use in (lambda: None, worker.close, lambda: worker.prepare(GrammarSpec.regex("b"))):
    child = os.fork()
    if child == 0:
        use()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
worker.prepare(GrammarSpec.regex("c"))
assert worker.process_id == first, "a fork ended the process of its parent"
"""


def test_a_fork_ends_while_its_parent_lives_and_leaves_it_its_worker() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)
