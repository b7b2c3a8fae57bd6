"""Constraints are read in other processes, where a hostile one costs no more than its limits.

Engines' objects cannot cross processes, so a worker does all that needs no vocabulary (`prepare`), tries the result out
over a vocabulary of bytes, and hands over plain data. What is left to do here is the engine's build, whose time the
worker has measured.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from typing import IO, Any

from radixrt import errors
from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarKind, GrammarSpec
from radixrt.errors import EngineError, EngineStopped, GrammarTooCostly, RequestError, UnsupportedGrammar
from radixrt.grammar.prepared import NO_MARKS, Marks, Prepared
from radixrt.grammar.regex_cost import num_atoms

READY = b"ready\n"
MEMORY_STATUS = 77  # of a worker that was over its memory
QUICK_MS = 500
_WALL_FACTOR = 6  # a busy machine gives a process only a part of a core
_MIN_WALL_S = 3.0  # and lets it wait for its turn
_MAX_START_S = 60.0
_MAX_END_S = 10.0  # a process that writes no more has ended, but for its status
_CHUNK_BYTES = 1 << 16
_FROM_OTHERS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)  # no process sends these to itself
_OUT_OF_MEMORY = b"memory allocation of"  # an engine's last words

_MAX_PLAIN_CHARACTERS = 20_000
_MAX_PLAIN_ATOMS = 2_000
_MAX_PLAIN_SPLITS = 40
_SPLITS = re.compile(
    r'"(?:not|if|oneOf|unevaluated\w+|dependen\w+|propertyNames|patternProperties|contains|m..Properties)"\s*:'
)
_NUMBER_OF_REPEATS = re.compile(r"\{\d{0,9},?\d{3,}|(?:~|\.\.)\s*\d{3,}")


def is_plainly_small(spec: GrammarSpec) -> bool:
    """Tell whether a constraint is cheap by its looks: short, with few case splits and no large repeats. Pure.

    A list of choices is: an automaton of them is linear in the text.
    """
    if spec.kind in (GrammarKind.CHOICE, GrammarKind.JSON_OBJECT):
        return True
    if spec.kind == GrammarKind.REGEX:
        return num_atoms(spec.text) <= _MAX_PLAIN_ATOMS
    if spec.kind == GrammarKind.STRUCTURAL:
        return len(spec.text) <= _MAX_PLAIN_CHARACTERS and all(map(is_plainly_small, _contents(spec)))
    return (
        len(spec.text) <= _MAX_PLAIN_CHARACTERS
        and len(_SPLITS.findall(spec.text)) <= _MAX_PLAIN_SPLITS
        and not _NUMBER_OF_REPEATS.search(spec.text)
    )


def _contents(spec: GrammarSpec) -> list[GrammarSpec]:
    """Give the constraints inside the tags; the whole where they cannot be read."""
    try:
        tags = spec.payload()["tags"]
        return [GrammarSpec(GrammarKind(tag["kind"]), tag["text"], tag["whitespace"]) for tag in tags]
    except (ValueError, RecursionError, TypeError, KeyError, RequestError):
        return [GrammarSpec(GrammarKind.LARK, spec.text)]


class CompileWorkers:
    """Two workers, so that what looks small never waits for what does not.

    The looks may deceive: what takes the quick one longer than QUICK_MS goes to the other. Owns both; `close` ends
    them. Thread-safe.
    """

    def __init__(self, config: GrammarConfig) -> None:
        self._quick = CompileWorker(config, max_ms=min(QUICK_MS, config.max_grammar_compile_ms))
        self._patient = CompileWorker(config, max_ms=config.max_grammar_compile_ms)

    def warm(self) -> None:
        """Start the quick one if it does not run; does not wait until it is ready."""
        self._quick.warm()

    def prepare(self, spec: GrammarSpec, marks: Marks = NO_MARKS) -> Prepared:
        """Do `radixrt.grammar.compile.prepare` in a worker. Raises: as `CompileWorker.prepare`."""
        if is_plainly_small(spec):
            try:
                return self._quick.prepare(spec, marks)
            except (_OutOfTime, _NoAnswer):
                pass  # it looked smaller than it is
            finally:
                self._quick.warm()  # if it had to die: the next one finds another ready
        try:
            return self._patient.prepare(spec, marks)
        except _OutOfTime as error:
            raise GrammarTooCostly(str(error), parameter="grammar") from None
        except _NoAnswer as error:
            raise EngineError(str(error)) from None

    def close(self) -> None:
        """End both."""
        self._quick.close()
        self._patient.close()


class _NoAnswer(EngineError):
    """A process gave no answer, although it had CPU time left."""


class _OutOfTime(Exception):
    """A constraint took all the CPU time it may have."""


@dataclass(frozen=True, slots=True)
class _End:
    """How a process ended instead of giving an answer.

    Attributes:
        status: as `subprocess.Popen.returncode`; None: it did not end, and no answer came.
        last_words: the end of what it wrote to its standard error.
        was_ready: it had come so far that it could be asked.
    """

    status: int | None
    last_words: bytes
    was_ready: bool

    @property
    def was_killed(self) -> bool:
        return self.status in _FROM_OTHERS

    @property
    def is_out_of_memory(self) -> bool:
        return self.status == MEMORY_STATUS or _OUT_OF_MEMORY in self.last_words


class CompileWorker:
    """One worker process: started when first needed, used by one caller at a time, started anew after a death.

    Owns the process; `close` ends it, and so does forgetting the worker. Thread-safe.
    """

    def __init__(self, config: GrammarConfig, *, max_ms: int) -> None:
        """Args: max_ms: CPU time that one constraint may take."""
        self._config = config
        self._max_ms = max_ms
        self._wall_s = max(_WALL_FACTOR * max_ms / 1000, _MIN_WALL_S)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None  # its standard error
        self._end: weakref.finalize[Any, Any] | None = None  # ends the process, once
        self._is_ready = False
        self._is_new = True  # it has given no answer yet
        self._is_closed = False

    @property
    def process_id(self) -> int | None:
        """Give the process id, None while no process runs."""
        process = self._process
        return None if process is None else process.pid

    def warm(self) -> None:
        """Start the process if it does not run. Cost: milliseconds; it becomes ready while others go on."""
        if self._process is None:  # one that is busy is warm
            with self._lock:
                self._start()

    def prepare(self, spec: GrammarSpec, marks: Marks = NO_MARKS) -> Prepared:
        """Do `radixrt.grammar.compile.prepare` in the process, and try out there what it gives.

        Raises:
            _OutOfTime: it took more than `max_ms` of CPU time.
            _NoAnswer: none came in time, although it had taken less.
            GrammarTooCostly: it is over another limit.
            UnsupportedGrammar: it made the process end itself.
            RequestError: what `prepare` raises.
            EngineError: an accident that says nothing about the constraint.
        """
        request = {"spec": asdict(spec), "marks": asdict(marks), "max_ms": self._max_ms}
        with self._lock:
            answer = self._ask(json.dumps(request).encode() + b"\n")
        if isinstance(answer, _End):
            raise self._error(answer)
        if "error" in answer:
            kind = getattr(errors, answer["error"])
            raise kind(answer["text"], parameter=answer["parameter"], value=answer["value"])
        return Prepared.from_json(answer["prepared"])

    def close(self) -> None:
        """End the process, and start none again."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()  # whoever waits for its answer holds the lock
        with self._lock:
            self._stop()

    def _error(self, end: _End) -> Exception:
        """Say what happened to a process that gave no answer."""
        if not end.was_ready:
            error = EngineError("the process that reads constraints does not start; try again")
            error.__cause__ = EngineError(end.last_words.decode("utf-8", "replace"))  # not for clients
            return error
        if end.status is None:
            return _NoAnswer(
                f"no answer about the constraint came within {self._wall_s:g} s, although it had not used its "
                f"{self._max_ms} ms of CPU time: the machine is too busy; try again"
            )
        if end.status == -signal.SIGPROF:
            return _OutOfTime(
                f"the constraint needs more than {self._max_ms} ms (max_grammar_compile_ms) to compile"
            )
        if end.is_out_of_memory:
            return GrammarTooCostly(
                f"the constraint needs more than {self._config.max_grammar_memory_bytes} bytes "
                "(max_grammar_memory_bytes) to compile",
                parameter="grammar",
            )
        if end.was_killed:
            return EngineError("the process that reads constraints was killed twice; try again")
        if end.status < 0:
            name = signal.Signals(-end.status).name
            return UnsupportedGrammar(
                f"the constraint is not supported: the grammar engine ends its process on it ({name})",
                parameter="grammar",
            )
        words = end.last_words.decode("utf-8", "replace").strip()
        name = words.rpartition("\n")[2].partition(":")[0]
        reason = name if name.isidentifier() else f"status {end.status}"
        error = EngineError(f"the process that reads constraints failed ({reason})")
        error.__cause__ = EngineError(words)  # not for clients: it holds paths
        return error

    def _ask(self, request: bytes) -> dict[str, Any] | _End:
        """Send one request and wait for the answer.

        Once more if the process was dead, or ends before it is ready, or is killed by others, or runs out of memory
        that may be its past's.
        """
        end = _End(-signal.SIGKILL, b"", was_ready=False)
        for _ in range(2):
            self._start()
            word = READY if self._is_ready else self._first_word()
            self._is_ready = word == READY
            if not self._is_ready:  # a Ctrl-C for its group, or a lack of memory: it may pass
                end = self._ended(is_late=word is None)
                continue
            is_new = self._is_new
            try:
                line = self._exchange(request)
            except BaseException:  # Ctrl-C: an answer that nobody read must not become the next one's
                self._stop()
                raise
            if line:
                self._is_new = False
                found: dict[str, Any] = json.loads(line)
                return found
            end = self._ended(is_late=line is None)
            if not (end.was_killed or (end.is_out_of_memory and not is_new)):
                break
        return end

    def _exchange(self, request: bytes) -> bytes | None:
        """Give the line that answers a request, b"" if the process died, None if it is late."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        return _read_line(process, self._wall_s)

    def _ended(self, *, is_late: bool) -> _End:
        """Give how the process ended; end it if it goes on, as one that is late does."""
        process, words = self._process, self._words
        assert process is not None
        assert words is not None
        try:
            status: int | None = process.wait(timeout=0 if is_late else _MAX_END_S)
        except subprocess.TimeoutExpired:
            status = None
        words.seek(max(0, words.seek(0, os.SEEK_END) - _CHUNK_BYTES))
        last_words, was_ready = words.read(), self._is_ready
        self._stop()
        return _End(status, last_words, was_ready)

    def _start(self) -> None:
        if self._is_closed:
            raise EngineStopped("the engine was closed")
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "radixrt.grammar.worker_process", json.dumps(asdict(self._config))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
        )
        self._end = weakref.finalize(self, _kill, process, self._words, os.getpid())

    def _first_word(self) -> bytes | None:
        """Give READY once the process is, b"" if it ends instead, None if it takes too long."""
        assert self._process is not None
        return _read_line(self._process, _MAX_START_S)

    def _stop(self) -> None:
        self._process, self._words, self._is_ready, self._is_new = None, None, False, True
        if self._end is not None:
            self._end()


def _kill(process: subprocess.Popen[bytes], words: IO[bytes], starter: int) -> None:
    """End a process, unless we are a fork of the one that started it: there it is somebody else's."""
    if os.getpid() != starter:
        return  # waiting for its end would take as long as our parent lives
    process.kill()
    process.communicate()
    words.close()


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """Give the next line of a process, b"" if it died, None if it is late."""
    assert process.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    line = bytearray()
    while not line.endswith(b"\n"):  # it writes no line before it is asked
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([process.stdout], [], [], left_s)[0]:
            return None
        chunk = os.read(process.stdout.fileno(), _CHUNK_BYTES)
        if not chunk:
            return b""
        line += chunk
    return bytes(line)
