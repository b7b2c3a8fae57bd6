"""Recorded workloads: JSON lines that tell their own format by their fields.

| fields | what it is |
|---|---|
| timestamp (ms), input_length, output_length, hash_ids | a trace; each hash id stands for a run of 512 tokens |
| timestamp (us), input, output, session_id | calls of agents: real prompts; a call follows on its session's last |
| question, answer | few-shot questions: the first NUM_SHOTS of the first file are the examples |

A trace of Mooncake (arXiv:2407.00079) has the first form; logs of LMCache's agent traces the second.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from radixrt.bench.workloads import FreshTokens, SimRequest, Workload
from radixrt.config import DEFAULT_MODEL, home_folder
from radixrt.errors import InvalidRequest

RUN_TOKENS = 512
NUM_SHOTS = 8
AGENT_POOL_TOKENS = 12_000  # about four of the longest prompts
FEW_SHOT_POOL_TOKENS = 16_000
Encode = Callable[[str], "array[int]"]


def read_workload(path: Path, *, max_requests: int | None = None) -> Workload:
    """Read a file of JSON lines, or all *.jsonl files of a folder.

    Args:
        max_requests: how many are read at most, None = all.
    Raises:
        InvalidRequest: no such file, a broken line (names it), or fields of no known format.
    """
    files = [(file, list(_lines(file, max_requests))) for file in _files(path)]
    first = next((lines[0] for _, lines in files if lines), {})
    if "hash_ids" in first:
        workload = _trace(path, [line for _, lines in files for line in lines], max_requests)
    elif {"input", "output", "session_id"} <= first.keys():
        workload = _agents([lines for _, lines in files], default_encode())
    elif {"question", "answer"} <= first.keys():
        workload = _few_shot(files, default_encode())
    else:
        raise InvalidRequest(
            f"a trace needs the fields timestamp, input_length, output_length and hash_ids, got {sorted(first)}",
            parameter="trace",
            value=str(path),
        )
    return workload if max_requests is None else workload.first(max_requests)


def default_encode() -> Encode:
    """Give the default model's encoder if its files are here, else one token per byte."""
    folder = home_folder() / "models" / DEFAULT_MODEL
    if (folder / "tokenizer.json").is_file():
        from radixrt.text.tokenizer import Tokenizer  # loaded only by workloads of text

        tokenizer = Tokenizer.from_folder(folder)
        return lambda text: array("i", tokenizer.encode(text))
    return encode_bytes


def encode_bytes(text: str) -> array[int]:
    """Give one token per byte. Pure."""
    return array("i", list(text.encode()))


def _files(path: Path) -> Sequence[Path]:
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise InvalidRequest(
            f"trace must be a file of JSON lines or a folder of them, got {path}", parameter="trace"
        )
    return files


def _lines(file: Path, max_requests: int | None) -> Iterator[Mapping[str, Any]]:
    with file.open(encoding="utf-8") as stream:
        for number, text in enumerate(stream, start=1):
            if max_requests is not None and number > max_requests + NUM_SHOTS:
                return
            try:
                line = json.loads(text)
            except ValueError as error:
                raise InvalidRequest(f"{file}, line {number}: {error}", parameter="trace") from None
            if not isinstance(line, dict):
                raise InvalidRequest(f"{file}, line {number}: not a JSON object", parameter="trace")
            yield line


def _trace(path: Path, lines: Sequence[Mapping[str, Any]], max_requests: int | None) -> Workload:
    fresh = FreshTokens()
    runs: dict[int, array[int]] = {}
    requests = []
    for number, line in enumerate(lines[:max_requests], start=1):
        try:
            num_tokens, num_outputs = int(line["input_length"]), int(line["output_length"])
            hash_ids, at_s = list(line["hash_ids"]), float(line["timestamp"]) / 1000
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{path}, line {number}: {error!r}", parameter="trace") from None
        if not 0 < num_tokens <= len(hash_ids) * RUN_TOKENS or num_outputs < 0:
            raise InvalidRequest(
                f"{path}, line {number}: {len(hash_ids)} hash ids for {num_tokens} tokens", parameter="trace"
            )
        prompt: array[int] = array("i")
        for hash_id in hash_ids[: -(-num_tokens // RUN_TOKENS)]:
            run = runs.get(hash_id)
            if run is None:
                run = runs[hash_id] = fresh.take(RUN_TOKENS)
            prompt += run
        requests.append(SimRequest(at_s, prompt[:num_tokens], fresh.take(num_outputs), label="trace"))
    requests.sort(key=lambda request: request.arrival_s)
    return Workload(path.stem, tuple(requests))


def _agents(sessions: Sequence[Sequence[Mapping[str, Any]]], encode: Encode) -> Workload:
    """Let all sessions start at once; a session's next call comes when its last one has ended.

    Prompts are encoded as they stand in the log; calls without a prompt are left out.
    """
    calls: list[tuple[int, int, Mapping[str, Any]]] = []  # (turn, session, call): all first calls stand first
    for session_index, lines in enumerate(_by_session(sessions)):
        ordered = sorted((line for line in lines if line["input"]), key=lambda line: int(line["timestamp"]))
        calls += [(turn, session_index, line) for turn, line in enumerate(ordered)]
    calls.sort(key=lambda call: call[:2])
    last: dict[int, int] = {}
    requests: list[SimRequest] = []
    for _, session_index, line in calls:
        parent = last.get(session_index)
        last[session_index] = len(requests)
        requests.append(
            SimRequest(0.0, encode(line["input"]), encode(line["output"]), label="agent", parent=parent)
        )
    return Workload("agents", tuple(requests), AGENT_POOL_TOKENS)


def _by_session(files: Sequence[Sequence[Mapping[str, Any]]]) -> Sequence[list[Mapping[str, Any]]]:
    sessions: dict[str, list[Mapping[str, Any]]] = {}
    for lines in files:
        for line in lines:
            sessions.setdefault(str(line["session_id"]), []).append(line)
    return list(sessions.values())


def _few_shot(files: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]], encode: Encode) -> Workload:
    """Ask questions behind NUM_SHOTS solved ones, all at once.

    The solved ones come from a file whose name begins with "train", else from the head of the first file.
    """
    ordered = sorted(files, key=lambda item: not item[0].name.startswith("train"))
    solved = ordered[0][1][:NUM_SHOTS]
    asked = [line for _, lines in ordered[1:] for line in lines] or list(ordered[0][1][NUM_SHOTS:])
    head = "".join(f"Question: {line['question']}\nAnswer: {line['answer']}\n\n" for line in solved)
    requests = tuple(
        SimRequest(
            0.0, encode(f"{head}Question: {line['question']}\nAnswer:"), encode(line["answer"]), label="gsm8k"
        )
        for line in asked
    )
    return Workload("gsm8k", requests, FEW_SHOT_POOL_TOKENS)
