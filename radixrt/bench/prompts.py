"""Fixed prompts, as token ids, for runs of a whole engine: every arm and every peer gets the same ones.

The text is made of words, not of random ids: a model that reads sense writes answers of a usual shape.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Ids = list[int]
Encode = Callable[[str], Ids]

PEOPLE = ("retired sailor", "young nurse", "jazz pianist", "bridge builder", "goat farmer", "maths teacher")
SUBJECTS = ("the Moon", "whales", "old roads", "bread", "glaciers", "the violin", "chess", "volcanoes")
TURNS = (
    "Tell me something about {}.",
    "Give three short facts about it.",
    "Which of them is the most surprising, and why?",
    "Put our talk into one sentence.",
)
SENTENCES = (
    "A farmer has {} rows of {} trees and sells every apple for {} cents.",
    "The train leaves at {} past {} and reaches the sea {} minutes later.",
    "Of {} boxes, {} hold red pens and {} hold blue ones.",
    "She read {} pages on Monday, {} on Tuesday and the last {} on Sunday.",
    "A tank of {} litres loses {} litres an hour and gains {} from the rain.",
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["engineer", "teacher", "doctor", "farmer", "artist"]},
        "active": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "occupation", "active", "tags", "address"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much of each workload is run."""

    num_few_shot: int
    num_branches: int
    num_calls: int
    num_values: int
    num_chats: int
    num_turns: int
    num_agent_requests: int


SIZES = {
    "small": Size(
        num_few_shot=16,
        num_branches=4,
        num_calls=2,
        num_values=8,
        num_chats=4,
        num_turns=2,
        num_agent_requests=24,
    ),
    "full": Size(
        num_few_shot=64,
        num_branches=8,
        num_calls=4,
        num_values=32,
        num_chats=8,
        num_turns=4,
        num_agent_requests=233,
    ),
}


class Prompts:
    """Give the prompts of every workload.

    Args:
        encode: text -> ids, without special tokens of its own.
        chat: one message of a user -> the ids of the whole prompt.
        num_ids: ids below this are used for what has no text.
    """

    def __init__(self, encode: Encode, *, chat: Encode) -> None:
        self._encode = encode
        self._chat = chat
        self._draw = random.Random(0)
        self._ids: Ids = []

    def text(self, num_tokens: int) -> Ids:
        """Give a run of text that was not given before. Changes: what comes next."""
        while len(self._ids) < num_tokens:
            sentence = self._draw.choice(SENTENCES).format(*(self._draw.randrange(2, 90) for _ in range(3)))
            self._ids += self._encode(sentence + "\n")
        taken, self._ids = self._ids[:num_tokens], self._ids[num_tokens:]
        return taken

    def sharing(self, num_prompts: int, *, num_shared: int, num_own: int) -> list[Ids]:
        """Give prompts that begin alike."""
        shared = self.text(num_shared)
        return [shared + self.text(num_own) for _ in range(num_prompts)]

    def values(self, num_prompts: int) -> tuple[list[Ids], dict[str, Any]]:
        """Give prompts that ask for a person as JSON, and the schema."""
        texts = [
            f"Invent a {PEOPLE[i % len(PEOPLE)]}, number {i}. Answer with one JSON object with the keys name, age, "
            "occupation, active, tags (one to three short strings) and address (city, zip of 5 digits)."
            for i in range(num_prompts)
        ]
        return [self._chat(text) for text in texts], PERSON

    def turns(self, num_chats: int, num_turns: int) -> list[list[Ids]]:
        """Give, by chat, the ids that each turn adds to what was said."""
        return [
            [self._chat(TURNS[turn].format(SUBJECTS[chat % len(SUBJECTS)])) for turn in range(num_turns)]
            for chat in range(num_chats)
        ]


def rounds_of(parents: Sequence[int | None]) -> list[list[int]]:
    """Put requests into rounds: each one a round after its parent. Pure."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + 1)
    return [
        [i for i, depth in enumerate(depths) if depth == level]
        for level in range(max(depths, default=-1) + 1)
    ]
