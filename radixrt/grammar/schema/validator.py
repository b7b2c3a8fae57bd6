"""The judge of finished values: jsonschema, with no access to the network."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import jsonschema
import referencing
import regex  # type: ignore[import-untyped]
from jsonschema import ValidationError, validators
from jsonschema.protocols import Validator

from radixrt.config import GrammarConfig
from radixrt.errors import InvalidRequest, UnsupportedGrammar, first_line
from radixrt.grammar.regex_cost import check_regex
from radixrt.grammar.schema.keywords import FORMATS
from radixrt.grammar.schema.patterns import translated
from radixrt.grammar.schema.quick_check import is_plainly_valid
from radixrt.grammar.schema.references import escape_pointer

# Without $schema the newest draft that the schema is valid under decides.
_DRAFTS: tuple[Any, ...] = (
    jsonschema.Draft202012Validator,
    jsonschema.Draft7Validator,
    jsonschema.Draft4Validator,
)
# Any other $schema names a dialect that we do not know: its schemas are read by the standard's rules.
_DECLARED = frozenset(
    f"{draft.META_SCHEMA.get('$id') or draft.META_SCHEMA['id']}".rstrip("#") + end
    for draft in (*_DRAFTS, jsonschema.Draft6Validator, jsonschema.Draft201909Validator)
    for end in ("", "#")
)

_NUMBERS: dict[Any, int] = {
    jsonschema.Draft4Validator: 4,
    jsonschema.Draft6Validator: 6,
    jsonschema.Draft7Validator: 7,
    jsonschema.Draft201909Validator: 2019,
    jsonschema.Draft202012Validator: 2020,
}


MAX_JUDGE_S = 0.2  # of the thread's own work: what other threads do must change no answer
_NUM_TRIES = 2  # a collection of garbage may fall into one of them, and be longer than the limit
_NO_SCHEMAS = frozenset({"const", "enum", "default", "examples"})


_CLASSES = {number: draft for draft, number in _NUMBERS.items()}


def late_judge(schema: str, draft: int) -> Callable[[str], bool | None]:
    """Give the judge of a schema that is known to be one, by its text and draft; it is made when first asked."""
    made: list[SchemaValidator] = []

    def judge(text: str) -> bool | None:
        if not made:  # two threads may make it: they are alike
            made.append(SchemaValidator(_CLASSES[draft], json.loads(schema)))
        return made[0].judge(text)

    return judge


class _TooSlow(Exception):
    """The time of one judgement is over."""


class SchemaValidator:
    """A schema under the rules of its draft, judged within a limit of time. Thread-safe.

    Patterns are the caller's, and values are a model's: both can be made to take a matcher that tries all ways for
    ever. So every pattern has a timeout, and so has the whole.

    Attributes:
        is_bounded: no part of the schema escapes the limit.
    """

    def __init__(self, draft: Any, schema: Any) -> None:
        self.draft: int = _NUMBERS[draft]
        self._draft = draft
        self._lock = threading.Lock()
        self._deadline_s = 0.0
        self._patterns: dict[str, Any] = {}
        self._schema = schema
        self.is_bounded = not _has_both(schema)

    @cached_property
    def _validator(self) -> Validator:
        """Give the validator; the process that compiles needs none."""
        draft = self._draft
        keywords: dict[str, Any] = {
            name: self._timed(_RULES.get(name, rule)) for name, rule in draft.VALIDATORS.items()
        }
        for name, rule in _PATTERN_RULES.items():
            if name in keywords:
                keywords[name] = partial(rule, self._search)
        checker = _format_checker(draft)
        kind: Any = validators.extend(draft, keywords)  # type: ignore[no-untyped-call]
        made: Validator = kind(self._schema, registry=referencing.Registry(), format_checker=checker)
        return made

    @classmethod
    def build(cls, schema: Any) -> SchemaValidator:
        """Check that the schema is one. Values that repeat in enum, required or type do no harm.

        Raises:
            InvalidRequest: it breaks the rules of its draft; `parameter` is the JSON Pointer of the place.
        """
        is_declared = isinstance(schema, dict) and schema.get("$schema") in _DECLARED
        drafts = (validators.validator_for(schema),) if is_declared else _DRAFTS
        faults = []
        for draft in drafts:
            if is_plainly_valid(schema, _NUMBERS[draft]):
                return cls(draft, schema)
            found = draft(draft.META_SCHEMA).iter_errors(schema)
            fault = next((fault for fault in found if fault.validator != "uniqueItems"), None)
            if fault is None:
                return cls(draft, schema)
            faults.append(fault)
        place = "".join(
            f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in faults[0].absolute_path
        )
        raise InvalidRequest(
            f"not a JSON Schema at {place or 'its root'}: {faults[0].message[:500]}",
            parameter=place,
            value=faults[0].instance,
        )

    def check_patterns(self, config: GrammarConfig) -> None:
        """Compile all patterns, before anything is judged.

        Raises:
            GrammarTooCostly: one is over a limit of `config`.
            UnsupportedGrammar: one is no regular expression, or means something else to other readers.
        """
        for place, pattern in _patterns_in(self._schema):
            check_regex(pattern, config, parameter=place)
            try:
                self._compiled(pattern)
            except (regex.error, RecursionError, OverflowError, ValueError) as error:
                raise UnsupportedGrammar(
                    f"the pattern at {place} is no regular expression that values can be checked with: "
                    f"{first_line(error)}",
                    parameter=place,
                    value=pattern[:200],
                ) from None

    def judge(self, text: str) -> bool | None:
        """Tell whether a text is JSON and valid; None when that cannot be told: a pattern is none that Python can
        match, a number is too large, or the time is over.
        """
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return False
        if not self.is_bounded:
            return None
        validator = self._validator  # made before the clock runs
        with self._lock:
            for _ in range(_NUM_TRIES):
                self._deadline_s = time.thread_time() + MAX_JUDGE_S
                try:
                    return bool(validator.is_valid(value))
                except _TooSlow:
                    continue
                except (regex.error, re.error, RecursionError, ArithmeticError, ValueError):
                    return None
        return None

    def _timed(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give a keyword's rule that looks at the clock first."""

        def timed(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            if time.thread_time() > self._deadline_s:
                raise _TooSlow
            return rule(validator, value, instance, schema)

        return timed

    def _search(self, pattern: str, text: str) -> bool:
        """Tell whether a pattern matches somewhere, within the time that is left."""
        left_s = self._deadline_s - time.thread_time()
        if left_s <= 0:
            raise _TooSlow
        try:
            return self._compiled(pattern).search(text, timeout=left_s) is not None
        except TimeoutError:
            raise _TooSlow from None

    def _compiled(self, pattern: str) -> Any:
        if (compiled := self._patterns.get(pattern)) is None:
            compiled = self._patterns[pattern] = regex.compile(translated(pattern))
        return compiled


Search = Callable[[str, str], bool]


def _pattern(search: Search, validator: Any, value: str, instance: Any, _: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not search(value, instance):
        yield ValidationError(f"{instance!r} does not match {value!r}")


def _pattern_properties(
    search: Search, validator: Any, value: Mapping[str, Any], instance: Any, _: Any
) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        for pattern, schema in value.items():
            for key, member in instance.items():
                if search(pattern, key):
                    yield from validator.descend(member, schema, path=key, schema_path=pattern)


def _additional_properties(
    search: Search, validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for key, member in instance.items():
        if key not in schema.get("properties", {}) and not any(
            search(pattern, key) for pattern in schema.get("patternProperties", {})
        ):
            yield from validator.descend(member, value, path=key)


def _unique_items(validator: Any, value: bool, instance: Any, _: Any) -> Iterator[ValidationError]:
    """Compare by keys: jsonschema compares every pair, and misses [[1], [true], [1]]."""
    if value and validator.is_type(instance, "array") and len(set(map(_key, instance))) < len(instance):
        yield ValidationError("two items are equal")


def _key(value: Any) -> Hashable:
    """Give what equal values of JSON have in common: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    if isinstance(value, dict):
        return "object", frozenset((name, _key(member)) for name, member in value.items())
    return type(value) is bool, value


def _patterns_in(schema: Any) -> Iterator[tuple[str, str]]:
    """Give the patterns of a schema with the JSON Pointers of their places."""
    pending = [("", schema)]
    while pending:
        place, node = pending.pop()
        if isinstance(node, list):
            pending += [(f"{place}/{index}", item) for index, item in enumerate(node)]
        elif isinstance(node, dict):
            if isinstance(pattern := node.get("pattern"), str):
                yield f"{place}/pattern", pattern
            if isinstance(members := node.get("patternProperties"), dict):
                yield from ((f"{place}/patternProperties/{escape_pointer(name)}", name) for name in members)
            pending += [
                (f"{place}/{escape_pointer(name)}", item)
                for name, item in node.items()
                if name not in _NO_SCHEMAS
            ]


_RULES: dict[str, Callable[..., Iterator[ValidationError]]] = {"uniqueItems": _unique_items}
_PATTERN_RULES: dict[str, Callable[..., Iterator[ValidationError]]] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
}


def _has_both(schema: Any) -> bool:
    """Tell whether patterns may decide about unevaluated properties: jsonschema matches those without a limit."""
    names = set[str]()
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            names |= node.keys() & {"patternProperties", "unevaluatedProperties"}
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return len(names) == 2


def _format_checker(draft: Any) -> jsonschema.FormatChecker:
    """Give the draft's own checks of the formats that masks enforce."""
    checker = jsonschema.FormatChecker(())
    checker.checkers = {
        name: check for name, check in draft.FORMAT_CHECKER.checkers.items() if name in FORMATS
    }
    return checker


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
