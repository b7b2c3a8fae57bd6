"""Other engines to measure against, each in an environment of its own.

`drive.py` runs a driver under the peer's Python: one JSON request a line, one JSON line back. Times are taken there, so
that the way between the processes does not count.

    {"op": "generate", "prompts": [[1, 2]], "max_tokens": [16]}         -> {"outputs": [[...]], "seconds": 0.5}
    {"op": "json", "prompts": [[1, 2]], "schema": {}, "max_tokens": 96} -> {"texts": ["..."], "seconds": 0.5}
    {"op": "reset"}                                                     -> {}
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from radixrt.bench.prompts import Ids
from radixrt.errors import EngineError, InvalidRequest, suggest

FOLDER = Path(__file__).parent
DRIVERS = tuple(path.stem for path in sorted((FOLDER / "drivers").glob("*.py")))
READY = "radixrt-peer "  # before each answer: libraries write to standard output too; drive.py writes it


class PeerArm:
    """A peer in a process of its own.

    Args:
        name: a driver, e.g. "vllm_cpu".
        python: the interpreter of the environment where the peer is installed.
        model: Hugging Face folder, or what the driver says it takes.

    Raises:
        InvalidRequest: no such driver, or `python` cannot be run.
        EngineError: the peer ended, or what it answers is no answer; from every method.
    """

    def __init__(self, name: str, *, python: Path, model: Path, threads: int) -> None:
        if name not in DRIVERS:
            raise InvalidRequest(
                f"vs must be one of {', '.join(DRIVERS)}, got {name!r}.{suggest(name, DRIVERS)}",
                parameter="vs",
                value=name,
            )
        self.name = name
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # ours asks for huge pages itself
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(
                [str(python), str(FOLDER / "drive.py"), name, str(model)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",  # what libraries write is not read
                env=environment,
            )
        except OSError as error:
            raise InvalidRequest(
                f"peer-python must be a Python that can be run, got {python}: {error.strerror}",
                parameter="peer-python",
                value=str(python),
            ) from error
        try:
            self.about: dict[str, Any] = self._answer()  # the driver's first line: its versions
        except BaseException:  # an interrupt too: nobody else can close it yet
            self._process.kill()
            self._process.wait()
            raise

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(READY):
                return self._read(line.removeprefix(READY))
        raise self._ended()

    def _read(self, text: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineError(
                f"the peer {self.name} gave an answer that is not a JSON object: {text.strip()[:100]}"
            )
        return answer

    def _ended(self) -> EngineError:
        return EngineError(f"the peer {self.name} ended with exit status {self._process.wait()}")

    def reset(self) -> None:
        self._ask(op="reset")

    def generate(self, prompts: Sequence[Ids], max_tokens: int | Sequence[int]) -> tuple[list[Ids], float]:
        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        answer = self._ask(op="generate", prompts=list(prompts), max_tokens=counts)
        return answer["outputs"], answer["seconds"]

    def generate_json(
        self, prompts: Sequence[Ids], schema: Mapping[str, Any], max_tokens: int
    ) -> tuple[list[str], float]:
        answer = self._ask(op="json", prompts=list(prompts), schema=schema, max_tokens=max_tokens)
        return answer["texts"], answer["seconds"]

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
