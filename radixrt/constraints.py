"""Constraints as callers write them: frozen, checked once, hashable, plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from radixrt.errors import InvalidRequest

MAX_CHOICES = 10_000
MAX_GRAMMAR_CHARACTERS = 1 << 20
MAX_TAGS = 512
MAX_TAG_COUNT = 128
MAX_TAG_CHARACTERS = 1024

Whitespace = Literal["compact", "flexible", "none"]
OnUnsupported = Literal["refuse", "check"]


class GrammarKind(StrEnum):
    """The constraint languages."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    EBNF = "ebnf"
    STRUCTURAL = "structural"


_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
_TAG_KINDS = (*_JSON_KINDS, GrammarKind.REGEX, GrammarKind.CHOICE)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint as the caller wrote it; hashable, so that equal constraints compile once.

    Attributes:
        kind: language of `text`.
        text: JSON text of the schema (key order kept), of the list of choices or of the tags; the regex; the grammar.
        whitespace: JSON only. "compact": none but one optional space after ":" and ","; "flexible":
            any JSON whitespace, at most 20 characters in a row; "none": none, so that most tokens are forced.
        on_unsupported: JSON Schema only. "refuse": a keyword that masks cannot enforce is an error; "check": the
            finished value is validated as well, and what fails is sampled anew (see `GrammarSpec.json_schema`).
    """

    kind: GrammarKind
    text: str
    whitespace: Whitespace = "compact"
    on_unsupported: OnUnsupported = "refuse"

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GrammarKind):
            raise InvalidRequest(
                f"kind must be a GrammarKind, got {self.kind!r}", parameter="kind", value=self.kind
            )
        _check_text("grammar", self.text)
        _check_option("whitespace", self.whitespace, ("compact", "flexible", "none"))
        _check_option("on_unsupported", self.on_unsupported, ("refuse", "check"))
        if self.whitespace != "compact" and self.kind not in _JSON_KINDS:
            raise InvalidRequest(
                f"whitespace belongs to JSON, not to the kind {self.kind}",
                parameter="whitespace",
                value=self.whitespace,
            )
        if self.on_unsupported != "refuse" and self.kind is not GrammarKind.JSON_SCHEMA:
            raise InvalidRequest(
                f"on_unsupported belongs to json_schema, not to the kind {self.kind}",
                parameter="on_unsupported",
                value=self.on_unsupported,
            )

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | bool,
        *,
        whitespace: Whitespace = "compact",
        on_unsupported: OnUnsupported = "refuse",
    ) -> GrammarSpec:
        """Constrain to JSON values valid under a JSON Schema (a dict, True or False).

        Args:
            on_unsupported: "check" takes schemas with keywords that no mask can enforce: those are checked on the
                finished value, and an answer that fails is sampled anew from where it could still become valid.
        """
        if not isinstance(schema, Mapping | bool):
            raise InvalidRequest(
                f"schema must be a mapping or a boolean, got {type(schema).__name__}",
                parameter="grammar",
                value=schema,
            )
        return cls(GrammarKind.JSON_SCHEMA, _dump(schema), whitespace, on_unsupported)

    @classmethod
    def json_object(cls) -> GrammarSpec:
        """Constrain to any JSON object."""
        return cls(GrammarKind.JSON_OBJECT, "{}")

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Constrain to strings that a regular expression matches as a whole."""
        _check_text("regex", pattern)
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> GrammarSpec:
        """Constrain to one of several strings (1 to 10,000, distinct, not empty)."""
        check_choices(choices)
        return cls(GrammarKind.CHOICE, _dump(list(choices)))

    @classmethod
    def lark(cls, text: str) -> GrammarSpec:
        """Constrain by a Lark grammar whose start rule is `start`."""
        _check_text("lark", text)
        return cls(GrammarKind.LARK, text)

    @classmethod
    def ebnf(cls, text: str) -> GrammarSpec:
        """Constrain by a grammar in llama.cpp's GBNF whose start rule is `root`."""
        _check_text("ebnf", text)
        return cls(GrammarKind.EBNF, text)

    @classmethod
    def structural(
        cls,
        tags: Sequence[StructuralTag],
        *,
        triggers: Sequence[str],
        min_tags: int = 0,
        max_tags: int | None = None,
        free_text: bool = True,
        separator: str = "",
    ) -> GrammarSpec:
        """Constrain parts of a text: tool calls between free text.

        Free text is text in which no trigger occurs. A trigger must go on as one of the tags whose `begin` starts with
        it: the rest of `begin`, the content, `end`; then free text or another tag follow.

        Args:
            triggers: each tag's `begin` must start with one of them; none may contain another. May be empty
                without free text.
            min_tags: the text is not complete before so many tags.
            max_tags: no trigger may occur after so many tags; None = any number.
            free_text: False: nothing but tags.
            separator: stands between two tags; only without free text.
        """
        _check_structure(
            tags, triggers, min_tags=min_tags, max_tags=max_tags, free_text=free_text, separator=separator
        )
        value = {
            "tags": [
                {
                    "begin": tag.begin,
                    "kind": tag.grammar.kind,
                    "text": tag.grammar.text,
                    "whitespace": tag.grammar.whitespace,
                    "end": tag.end,
                }
                for tag in tags
            ],
            "triggers": list(triggers),
            "min_tags": min_tags,
            "max_tags": max_tags,
            "free_text": free_text,
            "separator": separator,
        }
        return cls(GrammarKind.STRUCTURAL, _dump(value))

    def payload(self) -> Any:
        """Give the JSON value of a schema, of the list of choices or of the tags."""
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A constrained part of a text: `begin`, then what `grammar` allows, then `end`.

    `begin` and `end` may hold names of the tokenizer's control tokens, which stand for those tokens; names that
    the vocabulary does not have as control tokens are plain characters.

    Attributes:
        begin: not empty.
        grammar: of the kind json_schema, json_object, regex or choice.
        end: may be empty after JSON only. A regex or choice ends at the first place where `end` can follow.
    """

    begin: str
    grammar: GrammarSpec
    end: str

    def __post_init__(self) -> None:
        _check_mark("begin", self.begin, is_optional=False)
        if not isinstance(self.grammar, GrammarSpec) or self.grammar.kind not in _TAG_KINDS:
            kind = self.grammar.kind if isinstance(self.grammar, GrammarSpec) else type(self.grammar).__name__
            raise InvalidRequest(
                f"the grammar of a tag must be a json_schema, json_object, regex or choice, got {kind}",
                parameter="grammar",
                value=self.grammar,
            )
        if self.grammar.on_unsupported != "refuse":
            raise InvalidRequest(
                'the grammar of a tag must have on_unsupported="refuse"',
                parameter="on_unsupported",
                value=self.grammar.on_unsupported,
            )
        _check_mark("end", self.end, is_optional=self.grammar.kind in _JSON_KINDS)


def _dump(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"grammar must be plain JSON data: {error}", parameter="grammar", value=type(value).__name__
        ) from None
    _check_text("grammar", text)
    return text


def _check_option(parameter: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        names = " or ".join(f'"{name}"' for name in allowed)
        raise InvalidRequest(f"{parameter} must be {names}, got {value!r}", parameter=parameter, value=value)


def _check_text(parameter: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{parameter} must be a string, got {type(text).__name__}", parameter=parameter, value=text
        )
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"{parameter} must have at most {MAX_GRAMMAR_CHARACTERS} characters, got {len(text)}",
            parameter=parameter,
            value=len(text),
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{parameter} must be valid Unicode (it holds a lone surrogate)", parameter=parameter
        ) from None


def _check_mark(parameter: str, text: object, *, is_optional: bool) -> None:
    _check_text(parameter, text)
    least = 0 if is_optional else 1
    if not least <= len(str(text)) <= MAX_TAG_CHARACTERS:
        raise InvalidRequest(
            f"{parameter} must have {least} to {MAX_TAG_CHARACTERS} characters, got {len(str(text))}",
            parameter=parameter,
            value=text,
        )


def check_choices(choices: object) -> None:
    """Raise InvalidRequest unless `choices` is a list of distinct, non-empty strings. Pure."""
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise InvalidRequest("choices must be a list of strings", parameter="choices", value=choices)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(
            f"choices must hold 1 to {MAX_CHOICES} strings, got {len(choices)}",
            parameter="choices",
            value=len(choices),
        )
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidRequest(
                f"each choice must be a non-empty string, got {choice!r}", parameter="choices", value=choice
            )
    if len(set(choices)) != len(choices):
        raise InvalidRequest("choices must be distinct", parameter="choices", value=list(choices))


def _check_structure(
    tags: object,
    triggers: object,
    *,
    min_tags: object,
    max_tags: object,
    free_text: object,
    separator: object,
) -> None:
    """Raise InvalidRequest unless the arguments of `GrammarSpec.structural` go together. Pure."""
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not 1 <= len(tags) <= MAX_TAGS:
        raise InvalidRequest(f"tags must be a list of 1 to {MAX_TAGS} tags", parameter="tags", value=tags)
    for tag in tags:
        if not isinstance(tag, StructuralTag):
            raise InvalidRequest(
                f"each tag must be a StructuralTag, got {type(tag).__name__}", parameter="tags", value=tag
            )
    if not isinstance(free_text, bool):
        raise InvalidRequest(
            f"free_text must be True or False, got {free_text!r}", parameter="free_text", value=free_text
        )
    _check_count("min_tags", min_tags, 0)
    if max_tags is not None:
        _check_count("max_tags", max_tags, max(1, int(str(min_tags))))
    _check_mark("separator", separator, is_optional=True)
    if separator and free_text:
        raise InvalidRequest(
            "separator needs free_text=False: between tags there is free text",
            parameter="separator",
            value=separator,
        )
    _check_triggers([tag.begin for tag in tags], triggers, needs_one=free_text)


def _check_count(parameter: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_TAG_COUNT:
        raise InvalidRequest(
            f"{parameter} must be a whole number in [{low}, {MAX_TAG_COUNT}], got {value!r}",
            parameter=parameter,
            value=value,
        )


def _check_triggers(begins: list[str], triggers: object, *, needs_one: bool) -> None:
    if isinstance(triggers, str) or not isinstance(triggers, Sequence) or (needs_one and not triggers):
        raise InvalidRequest("triggers must be a list of strings", parameter="triggers", value=triggers)
    for trigger in triggers:
        _check_mark("triggers", trigger, is_optional=False)
        if not any(begin.startswith(trigger) for begin in begins):
            raise InvalidRequest(
                f"the trigger {trigger!r} begins no tag", parameter="triggers", value=trigger
            )
        if inner := [other for other in triggers if other != trigger and other in trigger]:
            raise InvalidRequest(
                f"the trigger {trigger!r} holds the trigger {inner[0]!r}, which would come first",
                parameter="triggers",
                value=trigger,
            )
    for begin in begins:
        if triggers and not any(begin.startswith(trigger) for trigger in triggers):
            raise InvalidRequest(f"no trigger begins the tag {begin!r}", parameter="triggers", value=begin)
