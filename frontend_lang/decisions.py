"""Questions about one input, each answered by one row of logits: what is asked, and what the odds say.

A question is a short text behind the transcript, and its answers are labels; the label's next-token probabilities
decide. Nothing of it stays in the transcript.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from frontend_lang.backends import InvalidRequest

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Question(Generic[T_co]):
    """A question with a fixed set of answers.

    Attributes:
        text: what the model reads, up to where its answer begins.
        labels: the text of each answer, distinct.
        values: what each means.
    """

    text: str
    labels: tuple[str, ...]
    values: tuple[T_co, ...]


@dataclass(frozen=True, slots=True)
class Decision(Generic[T_co]):
    """The answer to a question.

    Attributes:
        value: the likeliest answer, the first of equals.
        probabilities: of each answer among the answers; they add up to 1.
        label_mass: how likely the model was to give one of the answers at all, 0 to 1: where it is small, the
            question was not understood.
    """

    value: T_co
    probabilities: Mapping[Any, float]
    label_mass: float

    @property
    def probability(self) -> float:
        """Give the probability of `value`."""
        return self.probabilities[self.value]

    @property
    def mean(self) -> float:
        """Give the expected value; of answers that are numbers (a score), or bools."""
        return math.fsum(float(value) * weight for value, weight in self.probabilities.items())


Decisions = Mapping[str, Decision[Any]]


def predicate(question: str) -> Question[bool]:
    """Ask a question of yes or no."""
    return Question(f"{_text(question)}\nAnswer yes or no.", ("yes", "no"), (True, False))


def choice(question: str, options: Sequence[str]) -> Question[str]:
    """Ask which of 2 to 26 options it is; they are shown with letters."""
    options = _distinct("options", options, most=26)
    lines = [f"{letter}) {option}" for letter, option in zip(string.ascii_uppercase, options, strict=False)]
    text = f"{_text(question)}\n" + "\n".join(lines) + "\nAnswer with a letter."
    return Question(text, tuple(string.ascii_uppercase[: len(options)]), tuple(options))


def score(question: str, levels: Sequence[int] | range = range(1, 6)) -> Question[int]:
    """Ask for one of 2 to 26 numbers; `Decision.mean` is the expected one."""
    numbers = _distinct("levels", levels, most=26)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise InvalidRequest("levels must be whole numbers", parameter="levels", value=levels)
    labels = tuple(map(str, numbers))
    text = f"{_text(question)}\nAnswer with a number: {', '.join(labels)}."
    return Question(text, labels, tuple(numbers))


def decided(question: Question[T], logprobs: Sequence[float]) -> Decision[T]:
    """Make a decision of the natural-log probabilities of a question's labels, in order. Pure."""
    most = max(logprobs)
    weights = [math.exp(logprob - most) for logprob in logprobs]
    whole = math.fsum(weights)
    probabilities = {value: weight / whole for value, weight in zip(question.values, weights, strict=True)}
    best = question.values[max(range(len(logprobs)), key=logprobs.__getitem__)]
    mass = min(math.exp(most) * whole, 1.0)
    return Decision(best, MappingProxyType(probabilities), mass)


def split_labels(sequences: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Give the tokens that all labels begin with, and what is left of each. Pure.

    Tokenizers that split " 7" into a space and a digit make all labels begin alike.
    """
    common: list[int] = []
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return tuple(common), [sequence[len(common) :] for sequence in sequences]


def checked_questions(questions: Mapping[str, Question[Any]]) -> Mapping[str, Question[Any]]:
    """Give a read-only copy; raises InvalidRequest unless it names at least one question."""
    if not isinstance(questions, Mapping) or not questions:
        raise InvalidRequest("questions must be a dict of questions", parameter="questions", value=questions)
    for name, question in questions.items():
        if not isinstance(question, Question):
            raise InvalidRequest(
                f"{name!r} must be predicate(...), choice(...) or score(...), got {type(question).__name__}",
                parameter="questions",
                value=question,
            )
    return MappingProxyType(dict(questions))


def _text(question: str) -> str:
    if not isinstance(question, str) or not question.strip():
        raise InvalidRequest(
            f"a question must be text, got {question!r}", parameter="question", value=question
        )
    return question.strip()


def _distinct(name: str, items: Sequence[T], *, most: int) -> list[T]:
    if isinstance(items, str) or not isinstance(items, Sequence) or not 2 <= len(items) <= most:
        raise InvalidRequest(f"{name} must be a list of 2 to {most}", parameter=name, value=items)
    if len(set(items)) != len(items):
        raise InvalidRequest(f"{name} must be distinct", parameter=name, value=items)
    return list(items)
