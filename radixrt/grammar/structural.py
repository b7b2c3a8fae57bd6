"""Tagged texts: free text, then a trigger, then a constrained part.

    text:  free text | trigger + rest of begin | content | end | free text | ...

Everything becomes one grammar of the engine. Free text up to and with a trigger is one lexeme that ends at the first
trigger; control tokens end any lexeme, since text never holds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarKind, GrammarSpec, StructuralTag, check_choices
from radixrt.errors import InvalidRequest, RequestError, UnsupportedGrammar, first_line
from radixrt.grammar.matcher import Enforcement
from radixrt.grammar.prepared import Marks, Prepared
from radixrt.grammar.regex_cost import check_regex, whole_match
from radixrt.grammar.schema.compile import prepare_schema, shortest_match, string_hints
from radixrt.grammar.schema.front import ParsedSchema
from radixrt.grammar.vocabulary import engine_name, split_names

_NUMBER_CHARACTERS = frozenset("0123456789.eE+-")
_VALUE_CHARACTERS = frozenset('{["tfn-0123456789 \t\r\n')
_MAX_OPENERS = 8
_MAX_ENDERS = 64
_MAX_ENDER_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class _Control:
    """A control token, by its name."""

    name: str


Mark = tuple[str | _Control, ...]  # pieces of text and control tokens


def prepare_structural(spec: GrammarSpec, marks: Marks, config: GrammarConfig) -> Prepared:
    """Write a tagged text as one grammar.

    Raises:
        InvalidRequest: the text of the constraint is not what `GrammarSpec.structural` writes.
        GrammarTooCostly, UnsupportedGrammar: a part is over a limit or cannot be told from what follows it.
    """
    structure = _Structure.read(spec)
    writer = _Writer(structure, _controls(structure, marks), config)
    grammar = writer.write()
    return Prepared(
        grammar=grammar,
        keywords=writer.keywords,
        hints=tuple(dict.fromkeys(hint for parsed in writer.schemas for hint in string_hints(parsed))),
        openers=writer.openers(),
        num_openers=structure.min_tags,
        enders=writer.enders(),
        controls=writer.controls,
    )


@dataclass(frozen=True, slots=True)
class _Structure:
    """The arguments of `GrammarSpec.structural`, checked."""

    tags: tuple[StructuralTag, ...]
    triggers: tuple[str, ...]
    min_tags: int
    max_tags: int | None
    free_text: bool
    separator: str

    @classmethod
    def read(cls, spec: GrammarSpec) -> _Structure:
        try:
            value = spec.payload()
            tags = tuple(
                StructuralTag(
                    tag["begin"],
                    GrammarSpec(GrammarKind(tag["kind"]), tag["text"], tag["whitespace"]),
                    tag["end"],
                )
                for tag in value["tags"]
            )
            options = {name: value[name] for name in ("min_tags", "max_tags", "free_text", "separator")}
            triggers = tuple(value["triggers"])
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"a structural constraint must be written by GrammarSpec.structural: {first_line(error)}",
                parameter="grammar",
                value=spec.text[:200],
            ) from error
        GrammarSpec.structural(tags, triggers=triggers, **options)  # checks them
        return cls(tags, tuple(dict.fromkeys(triggers)), **options)


def _controls(structure: _Structure, marks: Marks) -> tuple[str, ...]:
    """Give the control tokens that the texts name; refuse those that would end the sequence."""
    texts = [structure.separator, *(part for tag in structure.tags for part in (tag.begin, tag.end))]
    for name in marks.ends:
        if any(name in text for text in texts):
            raise UnsupportedGrammar(
                f"the token {name!r} ends a sequence and cannot stand in a tag", parameter="tags", value=name
            )
    joined = "\n".join(texts)
    return tuple(name for name in marks.controls if name and name in joined)


class _Writer:
    """Writes the engine's grammar: a Lark part for the frame, a JSON Schema part for each such content.

    Attributes:
        keywords: JSON Pointer -> enforcement, of all contents.
        schemas: of the contents that are JSON.
        controls: names of the control tokens in the marks.
    """

    def __init__(self, structure: _Structure, controls: tuple[str, ...], config: GrammarConfig) -> None:
        self.controls = controls
        self._structure = structure
        self._config = config
        self._parts: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._contents: dict[tuple[GrammarSpec, Mark], str] = {}
        self.keywords: dict[str, Enforcement] = {"": "mask"}
        self.schemas: list[ParsedSchema] = []

    def write(self) -> str:
        """Give the grammar in the engine's own format.

        Raises: what `prepare_structural` raises.
        """
        structure = self._structure
        self._check_ends()
        tails = [self._tail(index, tag) for index, tag in enumerate(structure.tags)]
        begins = [self._split(tag.begin) for tag in structure.tags]
        limit = "" if structure.max_tags is None else str(structure.max_tags)
        if structure.free_text:
            lines = [f"start: unit{{{structure.min_tags},{limit}}} TEXT", *self._units(begins, tails)]
        else:
            lines = self._joined(begins, tails)
        lark = "\n".join([*lines, *self._lines, ""])
        return json.dumps({"grammars": [{"name": "frame", "lark_grammar": lark}, *self._parts]})

    def openers(self) -> tuple[str, ...]:
        """Give texts that begin tags, where free text needs some."""
        structure = self._structure
        if not (structure.free_text and structure.min_tags):
            return ()
        return tuple(sorted((tag.begin for tag in structure.tags), key=len)[:_MAX_OPENERS])

    def enders(self) -> tuple[str, ...]:
        """Give texts that end a tag from somewhere inside it."""
        found: dict[str, None] = {}
        for tag in self._structure.tags:
            if tag.grammar.kind is GrammarKind.REGEX and len(found) < _MAX_ENDERS:
                text = (shortest_match(tag.grammar.text) or "")[-_MAX_ENDER_CHARACTERS:]
                found |= dict.fromkeys(text[start:] + tag.end for start in range(len(text), -1, -1))
        return tuple(found)[:_MAX_ENDERS]

    # -- the frame --------------------------------------------------------------------------------------

    def _units(self, begins: Sequence[Mark], tails: Sequence[str]) -> list[str]:
        """Give the rules for free text with one tag after it, one per trigger, and for free text."""
        triggers = [self._split(trigger) for trigger in self._structure.triggers]
        for trigger, mark in zip(self._structure.triggers, triggers, strict=True):
            if any(isinstance(part, _Control) for part in mark[1:]):
                raise UnsupportedGrammar(
                    f"the control token in the trigger {trigger!r} must be its beginning",
                    parameter="triggers",
                    value=trigger,
                )
        # Text must not spell a control token that begins a trigger: a reader could not tell it from the token.
        first = dict.fromkeys(mark[0] for mark in triggers)
        controls = [part for part in first if isinstance(part, _Control)]
        texts = [str(mark[0]) for mark in triggers if isinstance(mark[0], str)]
        lines, units = [], []
        for index, text in enumerate(texts):
            lines.append(f"lead{index}[lazy]: BEFORE {_literal(text)}")
            group = [(_after(begin, text), tail) for begin, tail in zip(begins, tails, strict=True) if begin[0] == text or _after(begin, text)]  # fmt: skip
            units.append(f"lead{index} ({self._choice(group)})")
        for control in controls:
            wanted = [mark for mark in triggers if mark[0] == control]
            group = [
                (begin[1:], tail)
                for begin, tail in zip(begins, tails, strict=True)
                if any(_starts_with(begin, mark) for mark in wanted)
            ]
            units.append(f"TEXT {engine_name(control.name)} ({self._choice(group)})")
        lines.append(f"unit: {' | '.join(units)}")
        names = [control.name for control in controls]
        lines.append(f"BEFORE: {_text_without(names)}")
        lines.append(f"TEXT: {_text_without([*names, *texts])}")
        return lines

    def _joined(self, begins: Sequence[Mark], tails: Sequence[str]) -> list[str]:
        """Give the rules for tags with separators between them."""
        structure = self._structure
        lines = [f"tag: {self._choice(list(zip(begins, tails, strict=True)))}"]
        most = "" if structure.max_tags is None else str(structure.max_tags - 1)
        more = (
            f"({_symbols(self._split(structure.separator))} tag){{{max(structure.min_tags - 1, 0)},{most}}}"
        )
        start = "tag" if structure.max_tags == 1 else f"tag {more}"
        return [f"start: {start}" if structure.min_tags else f'start: ({start}) | ""', *lines]

    def _choice(self, group: Sequence[tuple[Mark, str]]) -> str:
        """Give the alternatives, begun by marks that can be told apart."""
        marks = [mark for mark, _ in group]
        for index, mark in enumerate(marks):
            for other_index, other in enumerate(marks):
                if index != other_index and _starts_with(other, mark):
                    self._check_prefix(mark, other, group[index][1])
        return " | ".join(f"{_symbols(mark)} {tail}" for mark, tail in group)

    def _check_prefix(self, mark: Mark, other: Mark, tail: str) -> None:
        """Raise if a content after `mark` could be read as more of `other`."""
        rest = _text_of(other)[len(_text_of(mark)) :]
        is_control = bool(rest) and isinstance(_cut(other, mark)[0], _Control)
        if not rest or not (is_control or (tail.startswith("@") and rest[0] not in _VALUE_CHARACTERS)):
            raise UnsupportedGrammar(
                f"the tags that begin with {_text_of(mark)!r} and {_text_of(other)!r} after their trigger "
                "cannot be told apart",
                parameter="tags",
                value=_text_of(other),
            )

    # -- the tags ---------------------------------------------------------------------------------------

    def _tail(self, index: int, tag: StructuralTag) -> str:
        """Give the symbols of a tag's content and end; contents that are equal are written once."""
        end = self._split(tag.end)
        is_json = tag.grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
        key = tag.grammar, () if is_json else end
        try:
            if is_json:
                if key not in self._contents:
                    self._contents[key] = self._json(index, tag.grammar)
                return f"{self._contents[key]} {_symbols(end)}"
            if key not in self._contents:
                self._contents[key] = self._lexeme(tag.grammar, end)
            return self._contents[key]
        except RequestError as error:
            raise type(error)(
                f"in the tag {tag.begin!r}: {error}", parameter=error.parameter, value=error.value
            ) from None

    def _json(self, index: int, spec: GrammarSpec) -> str:
        parsed, grammar = prepare_schema(spec, self._config)
        name = f"g{len(self._parts)}"
        [part] = json.loads(grammar)["grammars"]
        self._parts.append({"name": name, "json_schema": part["json_schema"]})
        self.schemas.append(parsed)
        self.keywords |= {f"/tags/{index}/grammar{place}": how for place, how in parsed.keywords.items()}
        return f"@{name}"

    def _lexeme(self, spec: GrammarSpec, end: Mark) -> str:
        """Write content and the text of the end that touches it as one lexeme; it ends as soon as it can."""
        if spec.kind is GrammarKind.CHOICE:
            choices = spec.payload()
            check_choices(choices)
            pattern = "|".join(re.escape(choice) for choice in choices)
        else:
            check_regex(spec.text, self._config)
            pattern = whole_match(spec.text)
        grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
        if is_error:
            reason = " ".join(str(messages[0]).split())[:300] if messages else "unknown reason"
            raise UnsupportedGrammar(
                f"the regular expression is not supported: {reason}", parameter="grammar", value=pattern[:200]
            )
        name = f"c{len(self._contents)}"
        body = f"/(?:{_slashed(pattern)})/"
        if isinstance(end[0], str):
            self._lines.append(f"{name}[lazy]: {body} {_literal(end[0])}")
            return f"{name} {_symbols(end[1:])}"
        self._lines.append(f"{name.upper()}: {body}")
        return f"{name.upper()} {_symbols(end)}"

    def _check_ends(self) -> None:
        """Raise if a number at the end of a content could take what follows it for more digits."""
        structure = self._structure
        after = [structure.separator] if structure.separator else [tag.begin for tag in structure.tags]
        for tag in structure.tags:
            if tag.grammar.kind is not GrammarKind.JSON_SCHEMA or not _may_be_number(tag.grammar):
                continue
            following = [tag.end] if tag.end else ["0"] if structure.free_text else after
            if any(text[:1] in _NUMBER_CHARACTERS for text in following):
                raise UnsupportedGrammar(
                    f"what follows the number in the tag {tag.begin!r} could be read as more of it: give it an end "
                    "that begins with another character",
                    parameter="tags",
                    value=tag.end,
                )

    # -- marks ------------------------------------------------------------------------------------------

    def _split(self, text: str) -> Mark:
        names = frozenset(self.controls)
        return tuple(_Control(part) if part in names else part for part in split_names(text, self.controls))


def _text_of(mark: Mark) -> str:
    return "".join(part if isinstance(part, str) else part.name for part in mark)


def _symbols(mark: Mark) -> str:
    return " ".join(_literal(part) if isinstance(part, str) else engine_name(part.name) for part in mark)


def _starts_with(mark: Mark, beginning: Mark) -> bool:
    """Tell whether a mark begins with another one. Pure."""
    if not beginning:
        return True
    *whole, last = beginning
    if len(mark) < len(beginning) or list(mark[: len(whole)]) != whole:
        return False
    candidate = mark[len(whole)]
    if isinstance(last, str) and isinstance(candidate, str):
        return candidate.startswith(last)
    return candidate == last


def _cut(mark: Mark, beginning: Mark) -> Mark:
    """Take a beginning off a mark. Pure."""
    if not beginning:
        return mark
    rest = mark[len(beginning) :]
    last, candidate = beginning[-1], mark[len(beginning) - 1]
    if isinstance(last, str) and isinstance(candidate, str) and len(candidate) > len(last):
        return (candidate[len(last) :], *rest)
    return rest


def _after(begin: Mark, text: str) -> Mark:
    """Give what follows a trigger of plain text in a mark; () if it does not begin so, or nothing follows. Pure."""
    return _cut(begin, (text,)) if _starts_with(begin, (text,)) else ()


def _may_be_number(spec: GrammarSpec) -> bool:
    try:
        kinds = spec.payload().get("type", "number")
    except (ValueError, RecursionError, AttributeError):
        return True  # malformed ones are refused when they are read; true is any value
    # A type that is none is refused later, too.
    return kinds in ("number", "integer") or (
        isinstance(kinds, list) and ("number" in kinds or "integer" in kinds)
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _text_without(words: Sequence[str]) -> str:
    """Give the terminal for any text in which no word occurs."""
    anything = "/(?s:.*)/"
    if not words:
        return anything
    return f"{anything} & ~({anything} ({' | '.join(map(_literal, words))}) {anything})"


def _slashed(pattern: str) -> str:
    """Write a regular expression between slashes. Pure."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")
