"""A process that tries constraints out first, so that a hostile one can cost no more than its limits.

Engines' objects cannot cross processes, so the worker only vets: it compiles and fills a few masks over a vocabulary
of bytes, then forgets the result. What it takes is compiled again by the process that needs it, at a known cost.
"""

from __future__ import annotations

import json
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import IO, Any

from radixrt import errors
from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarKind, GrammarSpec
from radixrt.errors import EngineError, GrammarTooCostly, RequestError
from radixrt.grammar.regex_cost import num_atoms

_NUM_MASKS = 24
_WALL_FACTOR = 6  # a busy machine gives a process only a part of a core
_MAX_START_S = 60.0
_MAX_END_S = 0.2
_MAX_PLAIN_CHARACTERS = 20_000
_MAX_PLAIN_ATOMS = 2_000
_MAX_PLAIN_SPLITS = 40
_SPLITS = re.compile(
    r'"(?:not|if|oneOf|unevaluated\w+|dependen\w+|propertyNames|patternProperties|contains|m..Properties)"\s*:'
)
# Beyond 64 bits an engine may end its process (llguidance 1.9.1 did): better the worker than the server.
_LARGE_NUMBER = re.compile(r"[0-9]{16}|[0-9][eE][+]?[0-9]{2}")
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
        and not _LARGE_NUMBER.search(spec.text)
    )


def _contents(spec: GrammarSpec) -> list[GrammarSpec]:
    """Give the constraints inside the tags; the whole where they cannot be read."""
    try:
        tags = spec.payload()["tags"]
        return [GrammarSpec(GrammarKind(tag["kind"]), tag["text"], tag["whitespace"]) for tag in tags]
    except (ValueError, RecursionError, TypeError, KeyError, RequestError):
        return [GrammarSpec(GrammarKind.LARK, spec.text)]


class CompileWorker:
    """One worker process: started when first needed, used by one caller at a time, started anew after a death.

    Owns the process; `close` ends it. Thread-safe.
    """

    def __init__(self, config: GrammarConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int | None:
        """Give the process id, None while no process runs."""
        return None if self._process is None else self._process.pid

    def vet(self, spec: GrammarSpec) -> None:
        """Raise what compiling raises; return if the constraint is within the limits.

        Raises:
            GrammarTooCostly: the worker died or took longer than max_grammar_compile_ms of CPU time.
            RequestError: what `radixrt.grammar.compile` raises.
        """
        request = asdict(spec)
        with self._lock:
            answer = self._ask(json.dumps(request).encode() + b"\n")
        if answer is None:
            raise GrammarTooCostly(
                f"the constraint needs more than {self._config.max_grammar_compile_ms} ms (max_grammar_compile_ms) "
                f"or {self._config.max_grammar_memory_bytes} bytes (max_grammar_memory_bytes) to compile",
                parameter="grammar",
            )
        if "error" in answer:
            kind = getattr(errors, answer["error"])
            raise kind(answer["text"], parameter=answer["parameter"], value=answer["value"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _ask(self, request: bytes) -> dict[str, Any] | None:
        """Send one request; None if there is no answer."""
        timeout_s = _WALL_FACTOR * self._config.max_grammar_compile_ms / 1000
        was_killed = False
        for _ in range(2):  # once more if it died while idle, or if somebody else killed it
            if self._process is None or self._process.poll() is not None:
                self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                line = _read_line(process, timeout_s)
            except BrokenPipeError:
                self._stop()
                continue
            except BaseException:  # Ctrl-C: an answer that nobody read must not become the next one's
                self._stop()
                raise
            if line:
                found: dict[str, Any] = json.loads(line)
                return found
            was_killed = _exit_status(process) == -signal.SIGKILL
            self._stop()
            if not was_killed:
                return None  # too slow, or over its limits
        if was_killed:
            raise EngineError("the process that tries out large constraints was killed twice; try again")
        return None

    def _start(self) -> None:
        self._stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "radixrt.grammar.worker", json.dumps(asdict(self._config))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if _read_line(self._process, _MAX_START_S) != b"ready\n":
            self._stop()
            raise errors.EngineStopped("the process that compiles constraints does not start")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Give the status of a process that may be ending, None if it goes on."""
    try:
        return process.wait(timeout=_MAX_END_S)
    except subprocess.TimeoutExpired:
        return None


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Give the next line of a process, b"" if it died or is late."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        return b""
    return process.stdout.readline()


def serve(requests: IO[bytes], answers: IO[bytes], config: GrammarConfig) -> None:
    """Answer requests, one line each, until there are no more. Runs in the worker process."""
    from radixrt.grammar.probe import probe  # it needs the engines, which this module's users load anyway

    seconds = config.max_grammar_compile_ms / 1000
    answers.write(b"ready\n")
    answers.flush()
    for line in requests:
        request = json.loads(line)
        spec = GrammarSpec(**{**request, "kind": GrammarKind(request["kind"])})
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, whatever runs
        answer: dict[str, Any] = {}
        try:
            probe(spec, config, num_masks=_NUM_MASKS)
        except RequestError as error:
            answer = {
                "error": type(error).__name__,
                "text": str(error),
                "parameter": error.parameter,
                "value": repr(error.value)[:200],
            }
        except MemoryError:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _limit_memory(num_bytes: int) -> None:
    """Let this process grow by so many bytes, no more."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        now = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Run the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    config = GrammarConfig(**json.loads(sys.argv[1]))
    import radixrt.grammar.probe  # noqa: F401  # before the limit: what is loaded does not count

    _limit_memory(config.max_grammar_memory_bytes)
    serve(sys.stdin.buffer, sys.stdout.buffer, config)


if __name__ == "__main__":
    main()
