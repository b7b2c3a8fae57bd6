"""Whole-engine runs of real shapes of work, arm against arm in turn within one run.

| workload | what it is | seconds of |
|---|---|---|
| decode, prefill | batches at a context; one prompt | one step; one prompt |
| few_shot | requests that share 1,500 tokens and add 60, 16 new each | the batch |
| fork | branches over 400 shared tokens, several calls each, every call with all that was said | all calls |
| json | requests for one schema, at most 96 tokens | the batch |
| chat | chats over several turns, 48 new tokens a turn | all turns |
| agents | recorded agent calls, session by session, in rounds | all rounds |

Prefixes are forgotten before each repetition, so that what is cached comes from the workload itself.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jsonschema

from radixrt.bench.prompts import Ids, Prompts, Size, rounds_of
from radixrt.bench.workloads import SimRequest

DECODE_STEPS = 64
MAX_JSON_TOKENS = 96
PAUSE_S = 0.5  # OpenMP threads of a peer may spin for 0.2 s after its last operation


class Arm(Protocol):
    """Something that generates: our engine under some options, or a peer.

    Every call gives its own seconds, so that talking to another process does not count."""

    def reset(self) -> None:
        """Forget cached prefixes."""

    def generate(self, prompts: Sequence[Ids], max_tokens: int | Sequence[int]) -> tuple[list[Ids], float]:
        """Run prompts together, greedily, to exactly max_tokens each; give their new ids and the seconds."""

    def generate_json(
        self, prompts: Sequence[Ids], schema: Mapping[str, Any], max_tokens: int
    ) -> tuple[list[str], float]:
        """Run prompts together, greedily, constrained by a schema; give the texts and the seconds."""

    def close(self) -> None:
        """Give back memory and processes."""


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition of a workload on an arm.

    Attributes:
        seconds: what the workload's table says.
        outputs: new ids by request, to compare arms.
        num_valid: answers that keep their schema, of `outputs`; None where nothing is constrained.
    """

    seconds: float
    outputs: list[Ids] | list[str]
    num_valid: int | None = None


Work = Callable[[Arm], Run]


def decode(prompts: Sequence[Ids], arm: Arm) -> Run:
    """Time a step of a batch: the difference of a long and a short run."""
    _, short_s = arm.generate(prompts, 1)
    arm.reset()
    outputs, long_s = arm.generate(prompts, 1 + DECODE_STEPS)
    return Run((long_s - short_s) / DECODE_STEPS, outputs)


def batch(prompts: Sequence[Ids], max_tokens: int, arm: Arm) -> Run:
    """Time prompts that come together."""
    outputs, seconds = arm.generate(prompts, max_tokens)
    return Run(seconds, outputs)


def talk(starts: Sequence[Ids], turns: Sequence[Sequence[Ids]], max_tokens: int, arm: Arm) -> Run:
    """Time conversations side by side; every call is sent with all that was said before."""
    histories = [list(start) for start in starts]
    spoken: list[Ids] = [[] for _ in starts]
    seconds = 0.0
    for turn in range(len(turns[0])):
        for history, added in zip(histories, turns, strict=True):
            history += added[turn]
        outputs, turn_s = arm.generate(histories, max_tokens)
        seconds += turn_s
        for history, own, output in zip(histories, spoken, outputs, strict=True):
            history += output
            own += output
    return Run(seconds, spoken)


def values(prompts: Sequence[Ids], schema: Mapping[str, Any], arm: Arm) -> Run:
    """Time answers that must keep a schema, and count those that do."""
    texts, seconds = arm.generate_json(prompts, schema, MAX_JSON_TOKENS)
    return Run(seconds, texts, sum(_is_valid(text, schema) for text in texts))


def _is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def recorded(requests: Sequence[SimRequest], arm: Arm) -> Run:
    """Time recorded calls, each a round after the one that it follows."""
    outputs: list[Ids] = [[] for _ in requests]
    seconds = 0.0
    for indices in rounds_of([request.parent for request in requests]):
        prompts = [list(requests[i].prompt_ids) for i in indices]
        done, round_s = arm.generate(prompts, [max(len(requests[i].output_ids), 1) for i in indices])
        seconds += round_s
        for i, output in zip(indices, done, strict=True):
            outputs[i] = output
    return Run(seconds, outputs)


def works_of(prompts: Prompts, size: Size, *, agents: Sequence[SimRequest] = ()) -> dict[str, Work]:
    """Give every workload by name. Changes: `prompts` moves on."""
    works: dict[str, Work] = {}
    for context in (64, 1024):
        for count in (1, 8, 32):
            chosen = [prompts.text(context) for _ in range(count)]
            works[f"decode_b{count}_c{context}"] = partial(decode, chosen)
    for length in (512, 2048):
        works[f"prefill_{length}"] = partial(batch, [prompts.text(length)], 1)
    shots = prompts.sharing(size.num_few_shot, num_shared=1500, num_own=60)
    works["few_shot"] = partial(batch, shots, 16)
    stem = prompts.text(400)
    calls = [[prompts.text(16) for _ in range(size.num_calls)] for _ in range(size.num_branches)]
    works["fork"] = partial(talk, [stem] * size.num_branches, calls, 32)
    works["json"] = partial(values, *prompts.values(size.num_values))
    turns = prompts.turns(size.num_chats, size.num_turns)
    works["chat"] = partial(talk, [prompts.text(120)] * size.num_chats, turns, 48)
    if agents:
        works["agents"] = partial(recorded, list(agents)[: size.num_agent_requests])
    return works


def measure_works(
    arms: Mapping[str, Arm],
    works: Mapping[str, Work],
    *,
    num_repetitions: int,
    reference: str,
    pause_s: float = PAUSE_S,
) -> dict[str, Any]:
    """Run every workload on every arm, in turn; give medians and ratios as plain JSON data.

    The first repetition of each is not counted. Before each run the machine rests for pause_s seconds, so that nobody
    pays for threads of the arm before that still spin.

    Args:
        reference: the arm that the others' seconds are divided by.
    Returns: by workload: `seconds`, `ratio` (an arm's seconds over the reference's: above 1 = slower), `num_valid`,
        and `is_equal`: whether an arm's outputs are the reference's.
    """
    measured: dict[str, Any] = {}
    for name, work in works.items():
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        last: dict[str, Run] = {}
        for repetition in range(num_repetitions + 1):
            for arm_name, arm in arms.items():
                arm.reset()
                time.sleep(pause_s)
                last[arm_name] = work(arm)
                if repetition:
                    seconds[arm_name].append(last[arm_name].seconds)
        medians = {arm: statistics.median(values) for arm, values in seconds.items()}
        measured[name] = {
            "seconds": medians,
            "all_seconds": seconds,
            "ratio": {arm: value / medians[reference] for arm, value in medians.items()},
            "is_equal": {arm: run.outputs == last[reference].outputs for arm, run in last.items()},
            "num_requests": len(last[reference].outputs),
        }
        if last[reference].num_valid is not None:
            measured[name]["num_valid"] = {arm: run.num_valid for arm, run in last.items()}
    return measured


def works_report(measured: Mapping[str, Any]) -> str:
    """Give the measurements as a table: seconds (milliseconds for a decode step), and times the first arm's. Pure."""
    works: Mapping[str, Any] = measured["workloads"]
    arms = list(next(iter(works.values()))["seconds"])
    lines = [measured["machine"]["text"], ""]
    lines.append("workload         " + "".join(f"{arm:>24}" for arm in arms))
    for name, row in works.items():
        cells = []
        for arm in arms:
            value = row["seconds"][arm]
            shown = f"{1000 * value:.1f} ms" if name.startswith("decode") else f"{value:.3f} s"
            valid = f" {row['num_valid'][arm]}/{row['num_requests']}" if "num_valid" in row else ""
            ratio = "" if arm == arms[0] else f" ({row['ratio'][arm]:.2f}x)"
            cells.append(f"{shown}{valid}{ratio}")
        lines.append(f"{name:17}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)
