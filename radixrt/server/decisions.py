"""Questions about one input -> prompts that share all but their ends, and one row of logits each -> probabilities.

A question ends with its options under one-token labels ("A", "B", ...), or asks for Yes or No. The answer's
probabilities are the model's own for the labels' tokens as the first token of its answer, scaled to sum to 1.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from radixrt.errors import InvalidRequest
from radixrt.server.answers import dump
from radixrt.server.bodies_decisions import (
    Choice,
    Content,
    DecisionBody,
    InputTextPart,
    Predicate,
    Question,
    Score,
)
from radixrt.text.tokenizer import Tokenizer

YES_NO = (("Yes", "No"), ("yes", "no"), ("Y", "N"))
_ROLES = {"developer": "system"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One question as the engine gets it.

    Attributes:
        prompt_ids: the input, then the question, up to where the answer begins.
        label_ids: the token of each possible answer, in order.
    """

    question: Question
    prompt_ids: tuple[int, ...]
    label_ids: tuple[int, ...]


def asked(tokenizer: Tokenizer, body: DecisionBody) -> list[Asked]:
    """Encode the questions. Takes a text's length of time.

    Raises:
        InvalidRequest: no chat template, or too many options for this model's one-token labels.
    """
    if tokenizer.chat is None:
        raise InvalidRequest("this model has no chat template, which decisions need", parameter="model")
    history = _history(body)
    made: list[Asked] = []
    most = max((len(_options(item)) for item in body.questions), default=0)
    labels = list(itertools.islice(_labels(tokenizer), most))
    for index, question in enumerate(body.questions):
        place = f"questions/{index}"
        options = _options(question)
        if len(options) > len(labels):
            raise InvalidRequest(
                f"{place}: this model's vocabulary has labels for {len(labels)} options, got {len(options)}",
                parameter=place,
            )
        named = _yes_no(tokenizer) if isinstance(question, Predicate) else labels[: len(options)]
        text = _text(question.instructions, place) + "\n" + _asking(options, [label for label, _ in named])
        pieces = tokenizer.chat.render(_with_question(history, text), add_generation_prompt=True)
        made.append(
            Asked(question, tuple(tokenizer.encode_pieces(pieces)), tuple(token_id for _, token_id in named))
        )
    return made


def answer(question: Question, logprobs: Sequence[float]) -> dict[str, Any]:
    """Give a question's answer from its labels' log-probabilities. Pure."""
    shares = _softmax(logprobs)
    if isinstance(question, Predicate):
        return {"type": "predicate", "name": question.name, "probability": shares[0]}
    best = max(range(len(shares)), key=shares.__getitem__)
    if isinstance(question, Choice):
        return {
            "type": "choice",
            "name": question.name,
            "choice": question.choices[best].value,
            "confidence": shares[best],
            "probabilities": [
                {"value": option.value, "probability": share}
                for option, share in zip(question.choices, shares, strict=True)
            ],
        }
    return {
        "type": "score",
        "name": question.name,
        "score": sum(value * share for value, share in enumerate(shares, 1)),
        "confidence": shares[best],
        "probabilities": [
            {"label": level.label, "value": value, "probability": share}
            for value, (level, share) in enumerate(zip(question.levels, shares, strict=True), 1)
        ],
    }


def num_shared(prompts: Sequence[tuple[int, ...]]) -> int:
    """Give how many tokens all prompts begin with alike. Pure."""
    first, last = min(prompts), max(prompts)
    limit = min(len(first), len(last))
    return next((at for at in range(limit) if first[at] != last[at]), limit)


def _softmax(logprobs: Sequence[float]) -> list[float]:
    largest = max(logprobs)
    weights = [math.exp(value - largest) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


def _history(body: DecisionBody) -> list[dict[str, str]]:
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return [
        {"role": _ROLES.get(item.role, item.role), "content": _text(item.content, f"input/{index}")}
        for index, item in enumerate(body.input)
    ]


def _with_question(history: Sequence[dict[str, str]], text: str) -> list[dict[str, str]]:
    """Put the question into the last message if it is the user's, else behind it: templates want turns."""
    if history[-1]["role"] != "user":
        return [*history, {"role": "user", "content": text}]
    last = history[-1]["content"]
    return [*history[:-1], {"role": "user", "content": f"{last}\n\n{text}" if last else text}]


def _text(content: Content, place: str) -> str:
    if isinstance(content, str):
        text = content
    else:
        text = "\n".join(
            part.text if isinstance(part, InputTextPart) else dump(part.data) for part in content
        )
    if not text.strip():
        raise InvalidRequest(f"{place}: there must be some text", parameter=place)
    return text


def _options(question: Question) -> list[str]:
    """Give the options as lines of text; none for a predicate."""
    if isinstance(question, Predicate):
        return []
    if isinstance(question, Score):
        return [_option(level.label, level.description) for level in question.levels]
    values = [
        str(item.value).lower() if isinstance(item.value, bool) else item.value for item in question.choices
    ]
    kinds = [(type(item.value), item.value) for item in question.choices]
    if len(set(kinds)) != len(kinds):
        raise InvalidRequest("choices must be distinct", parameter="questions")
    return [_option(value, item.description) for value, item in zip(values, question.choices, strict=True)]


def _option(text: str, description: str | None) -> str:
    return f"{text}: {description}" if description else text


def _asking(options: Sequence[str], labels: Sequence[str]) -> str:
    if not options:
        return f"Answer with {labels[0]} or {labels[1]} only."
    lines = [f"{label}. {option}" for label, option in zip(labels, options, strict=True)]
    return "\n".join([*lines, "Answer with the letter of one option only."])


def _yes_no(tokenizer: Tokenizer) -> list[tuple[str, int]]:
    for pair in YES_NO:
        ids = [tokenizer.encode_continuation(word) for word in pair]
        if all(len(item) == 1 for item in ids):
            return [(word, item[0]) for word, item in zip(pair, ids, strict=True)]
    raise InvalidRequest("this model's vocabulary has no token for yes and no", parameter="model")


def _labels(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Give labels that are one token each, the shortest first."""
    letters = string.ascii_uppercase
    for text in (
        *letters,
        *map("".join, itertools.product(letters, letters)),
        *string.ascii_lowercase,
        *string.digits,
    ):
        ids = tokenizer.encode_continuation(text)
        if len(ids) == 1:
            yield text, ids[0]
