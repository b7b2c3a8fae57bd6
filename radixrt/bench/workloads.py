"""Workloads for the simulator: frozen requests, generated from a seed without any data.

Generated token ids are consecutive integers that are never used twice, so that two prompts share exactly what they
were meant to share and nothing by accident. Independent requests come at their time; a dependent one (the next turn
of a chat, a child in a tree) comes when the one before it has ended.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from radixrt.errors import InvariantViolation
from radixrt.types import DEFAULT_NAMESPACE, Namespace

MIN_LIMIT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload, with the output that it will get.

    Attributes:
        arrival_s: when it comes, in seconds from the start; with a parent, seconds after the parent's end.
        prompt_ids: at least one token.
        output_ids: may be empty (the model ends at once).
        label: call site, for the prediction of output lengths.
        parent: index of the request that must have ended, or None.
    """

    arrival_s: float
    prompt_ids: array[int]
    output_ids: array[int]
    label: str = ""
    namespace: Namespace = DEFAULT_NAMESPACE
    parent: int | None = None

    @property
    def max_tokens(self) -> int:
        """The limit its caller gave, who does not know the output: the next power of two above its length."""
        return 1 << max(len(self.output_ids), MIN_LIMIT_TOKENS - 1).bit_length()

    @property
    def num_max_total(self) -> int:
        """The longest it can become."""
        return len(self.prompt_ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order; parents stand before their children.

    Attributes:
        pool_tokens: a pool in which the order of requests matters, None = as many as the machine has.
    """

    name: str
    requests: tuple[SimRequest, ...]
    pool_tokens: int | None = None

    def first(self, num_requests: int) -> Workload:
        """Give the first requests only. Pure."""
        return replace(self, requests=self.requests[:num_requests])

    def fitting(self, num_tokens: int) -> Workload:
        """Leave out requests that could become longer than num_tokens, and those that follow on them. Pure."""
        places: dict[int, int] = {}
        kept: list[SimRequest] = []
        for index, request in enumerate(self.requests):
            parent = request.parent
            if request.num_max_total <= num_tokens and (parent is None or parent in places):
                places[index] = len(kept)
                kept.append(replace(request, parent=None if parent is None else places[parent]))
        return replace(self, requests=tuple(kept))

    def check(self) -> None:
        """Raise InvariantViolation unless prompts have tokens and parents stand before their children."""
        for index, request in enumerate(self.requests):
            if not request.prompt_ids:
                raise InvariantViolation(f"request {index} has no prompt")
            if request.parent is not None and not 0 <= request.parent < index:
                raise InvariantViolation(f"request {index} follows on request {request.parent}")


class FreshTokens:
    """Give runs of token ids that were never given before. Invariant: ids are below 2**31."""

    def __init__(self) -> None:
        self._next_id = 0

    def take(self, num_tokens: int) -> array[int]:
        """Give num_tokens new ids."""
        start, self._next_id = self._next_id, self._next_id + num_tokens
        return array("i", range(start, self._next_id))


def few_shot(
    *,
    num_tasks: int = 16,
    num_questions: int = 25,
    num_shared_tokens: int = 1000,
    pool_tokens: int = 12_000,
    seed: int = 0,
) -> Workload:
    """Questions of several tasks in mixed order, all there at once; a task's questions share its examples.

    The pool holds the examples of about half of the tasks.
    """
    draw, fresh = random.Random(seed), FreshTokens()
    examples = [fresh.take(num_shared_tokens) for _ in range(num_tasks)]
    tasks = [task for task in range(num_tasks) for _ in range(num_questions)]
    draw.shuffle(tasks)
    requests = tuple(
        SimRequest(
            0.0,
            examples[task] + fresh.take(draw.randint(30, 120)),
            fresh.take(draw.randint(20, 150)),
            label=f"task {task}",
        )
        for task in tasks
    )
    return Workload("few_shot", requests, pool_tokens)


def tree_of_thought(
    *,
    num_trees: int = 12,
    branching: int = 3,
    depth: int = 4,
    num_root_tokens: int = 600,
    pool_tokens: int = 32_000,
    seed: int = 0,
) -> Workload:
    """Trees whose nodes go on with their parent's prompt, its output and an instruction of their own.

    The pool holds a fifth of their distinct tokens, about two whole trees.
    """
    draw, fresh = random.Random(seed), FreshTokens()
    requests: list[SimRequest] = []
    level: list[int | None] = [None] * num_trees
    for height in range(depth + 1):
        below: list[int | None] = []
        for parent in level:
            for _ in range(branching if height else 1):
                before = array("i")
                if parent is not None:
                    before = requests[parent].prompt_ids + requests[parent].output_ids
                own = fresh.take(draw.randint(20, 40) if height else num_root_tokens)
                output = fresh.take(draw.randint(40, 120))
                below.append(len(requests))
                requests.append(SimRequest(0.0, before + own, output, label=f"depth {height}", parent=parent))
        level = below
    return Workload("tree", tuple(requests), pool_tokens)


def multi_turn(
    *,
    num_chats: int = 64,
    num_turns: int = 6,
    num_system_tokens: int = 200,
    chats_per_s: float = 8.0,
    pool_tokens: int = 40_000,
    seed: int = 0,
) -> Workload:
    """Chats under one system prompt; every turn goes on with all that was said, after a pause to read."""
    draw, fresh = random.Random(seed), FreshTokens()
    system = fresh.take(num_system_tokens)
    requests: list[SimRequest] = []
    starts = _poisson(draw, num_chats, chats_per_s)
    places: list[int | None] = [None] * num_chats
    for turn in range(num_turns):
        for chat in range(num_chats):
            parent = places[chat]
            before = system
            if parent is not None:
                before = requests[parent].prompt_ids + requests[parent].output_ids
            places[chat] = len(requests)
            requests.append(
                SimRequest(
                    starts[chat] if parent is None else draw.expovariate(1.0),
                    before + fresh.take(draw.randint(40, 200)),
                    fresh.take(draw.randint(60, 200)),
                    label=f"turn {turn}",
                    parent=parent,
                )
            )
    return Workload("multi_turn", tuple(requests), pool_tokens)


def zipf(
    *,
    num_groups: int = 60,
    num_requests: int = 1000,
    requests_per_s: float = 32.0,
    pool_tokens: int = 40_000,
    seed: int = 0,
) -> Workload:
    """Groups with a shared prefix each, the r-th most popular one asked for in proportion to 1 / r."""
    draw, fresh = random.Random(seed), FreshTokens()
    prefixes = [fresh.take(draw.randint(500, 1500)) for _ in range(num_groups)]
    weights = [1 / rank for rank in range(1, num_groups + 1)]
    requests = tuple(
        SimRequest(
            at_s,
            prefixes[group] + fresh.take(draw.randint(30, 150)),
            fresh.take(draw.randint(20, 120)),
            label=f"group {group}",
        )
        for at_s, group in zip(
            _poisson(draw, num_requests, requests_per_s),
            draw.choices(range(num_groups), weights=weights, k=num_requests),
            strict=True,
        )
    )
    return Workload("zipf", requests, pool_tokens)


def no_sharing(
    *, num_requests: int = 400, requests_per_s: float = 30.0, pool_tokens: int = 40_000, seed: int = 0
) -> Workload:
    """Prompts that have nothing in common, more than the machine can serve at once."""
    draw, fresh = random.Random(seed), FreshTokens()
    requests = tuple(
        SimRequest(
            at_s, fresh.take(draw.randint(200, 1500)), fresh.take(draw.randint(10, 150)), label="alone"
        )
        for at_s in _poisson(draw, num_requests, requests_per_s)
    )
    return Workload("no_sharing", requests, pool_tokens)


def burst(
    *, num_requests: int = 64, num_shared_tokens: int = 1500, num_own_tokens: int = 40, seed: int = 0
) -> Workload:
    """Requests with one new prefix, all there at once."""
    draw, fresh = random.Random(seed), FreshTokens()
    shared = fresh.take(num_shared_tokens)
    requests = tuple(
        SimRequest(0.0, shared + fresh.take(num_own_tokens), fresh.take(draw.randint(8, 64)), label="burst")
        for _ in range(num_requests)
    )
    return Workload("burst", requests)


def _poisson(draw: random.Random, num_events: int, events_per_s: float) -> Sequence[float]:
    """Give the times of events that come independently of each other."""
    now_s, times = 0.0, []
    for _ in range(num_events):
        now_s += draw.expovariate(events_per_s)
        times.append(now_s)
    return times


GENERATED: dict[str, Callable[[], Workload]] = {
    "few_shot": few_shot,
    "tree": tree_of_thought,
    "multi_turn": multi_turn,
    "zipf": zipf,
    "no_sharing": no_sharing,
    "burst": burst,
}
