"""What a worker process of `CompileWorker` does: answer requests, one line each, until there are no more."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import IO, Any

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarKind, GrammarSpec
from radixrt.errors import RequestError
from radixrt.grammar.compile import prepare
from radixrt.grammar.prepared import Marks
from radixrt.grammar.probe import try_out
from radixrt.grammar.worker import MEMORY_STATUS, READY

# Prepared and tried out before the first request: what is loaded and cached at first use then is.
_FIRST = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}, "b": {"enum": [1]}}}


def serve(requests: IO[bytes], answers: IO[bytes], config: GrammarConfig) -> None:
    """Answer requests until there are no more."""
    answers.write(READY)
    answers.flush()
    for line in requests:
        request = json.loads(line)
        # The timer's signal ends the process, whatever runs.
        signal.setitimer(signal.ITIMER_PROF, request["max_ms"] / 1000)
        try:
            answer = _answer(request, config)
        except MemoryError:
            os._exit(MEMORY_STATUS)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _answer(request: dict[str, Any], config: GrammarConfig) -> dict[str, Any]:
    spec = GrammarSpec(**{**request["spec"], "kind": GrammarKind(request["spec"]["kind"])})
    marks = Marks(**{name: tuple(names) for name, names in request["marks"].items()})
    try:
        prepared = prepare(spec, marks, config)
        try_out(spec, prepared)
        return {"prepared": prepared.as_json()}
    except RequestError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "parameter": error.parameter,
            "value": repr(error.value)[:200],
        }


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
    first = GrammarSpec.json_schema(_FIRST)
    try_out(first, prepare(first, Marks(), GrammarConfig()))
    _limit_memory(config.max_grammar_memory_bytes)  # what is loaded by now does not count
    serve(sys.stdin.buffer, sys.stdout.buffer, config)


if __name__ == "__main__":
    main()
