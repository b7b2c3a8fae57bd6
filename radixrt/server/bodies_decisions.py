"""The body of /v1/decisions: one input, many questions about it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixrt.server.bodies import Breakpoint, CacheOptions, Label, Name, RuntimeOptions
from radixrt.server.reading import Body


class InputTextPart(Body):
    """A text part of the input, or of a question."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class InputJsonPart(Body):
    """A JSON part of the input: shown to the model as JSON text."""

    type: Literal["input_json"]
    data: (
        Annotated[dict[str, Any], Field(max_length=10_000)]
        | Annotated[list[dict[str, Any]], Field(max_length=10_000)]
    )


Part = Annotated[InputTextPart | InputJsonPart, Field(discriminator="type")]
Content = str | Annotated[list[Part], Field(max_length=1024)]


class InputMessage(Body):
    """A message of the input."""

    type: Literal["message"] = "message"
    role: Literal["user", "developer", "system", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class ChoiceOption(Body):
    """One option; a string and a boolean with the same text differ."""

    value: bool | str
    description: str | None = None


class Level(Body):
    """One level of a scale."""

    label: str
    description: str | None = None


class Predicate(Body):
    """How likely is it that a statement about the input is true?"""

    type: Literal["predicate"]
    instructions: Content
    name: Name | None = None


class Choice(Body):
    """Which of the options?"""

    type: Literal["choice"]
    instructions: Content
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=255)]
    name: Name | None = None


class Score(Body):
    """Where on the scale, whose levels are given in rising order?"""

    type: Literal["score"]
    instructions: Content
    levels: Annotated[list[Level], Field(min_length=2, max_length=255)]
    name: Name | None = None


Question = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionBody(Body):
    """Questions about one input; answers come in the order of the questions."""

    model: Name | None = None
    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=1024)]
    questions: Annotated[list[Question], Field(min_length=1, max_length=400)]
    prompt_cache_key: Label | None = None
    prompt_cache_options: CacheOptions | None = None
    safety_identifier: Label | None = None
    radixrt: RuntimeOptions = RuntimeOptions()
