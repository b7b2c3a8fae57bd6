"""The constraint options of `gen`: what the runtime must enforce, and how the text becomes a value.

`schema=` asks for JSON text, `type=` for the plain text of one scalar; both give a typed value.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin
from uuid import UUID

from pydantic import TypeAdapter

from frontend_lang.backends import GrammarSpec, InvalidRequest
from frontend_lang.schemas import NO_SCHEMA, TypeSchema, first_line, portable

T_co = TypeVar("T_co", covariant=True)

CONSTRAINTS = ("regex", "choices", "schema", "type", "grammar")

_INT = r"-?(?:0|[1-9][0-9]{0,17})"
_FLOAT = r"-?(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,15})?"
_MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = r"(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = rf"(?:[1-9][0-9]{{3}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"  # every day of 1000 to 9999 and no other
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_HEX = "[0-9a-f]"

_SCALARS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: (_INT, int),
    float: (_FLOAT, float),
    Decimal: (_FLOAT, Decimal),
    bool: ("true|false", "true".__eq__),
    date: (_DATE, date.fromisoformat),
    time: (_TIME, time.fromisoformat),
    datetime: (rf"{_DATE}T{_TIME}", datetime.fromisoformat),
    UUID: (f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}", UUID),
}


@dataclass(frozen=True, slots=True)
class Reader(Generic[T_co]):
    """How the text of a call becomes its value; `read` raises ValueError when it does not."""

    read: Callable[[str], T_co]


Constraint = tuple[GrammarSpec | None, Reader[Any] | None]


def constraint_of(options: Mapping[str, Any]) -> Constraint:
    """Give the grammar and the reader that the constraint options ask for. Pure.

    Raises:
        InvalidRequest: more than one constraint, or one of the wrong type.
    """
    given = [name for name in CONSTRAINTS if options.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequest(
            f"gen takes one constraint, got {' and '.join(given)}",
            parameter=given[1],
            value=options[given[1]],
        )
    match given, options:
        case ["regex"], {"regex": pattern}:
            return GrammarSpec.regex(pattern), None
        case ["choices"], {"choices": choices}:
            return GrammarSpec.choice(choices), None
        case ["schema"], {"schema": schema}:
            return schema_constraint(schema)
        case ["type"], {"type": kind}:
            return _scalar_constraint(kind)
        case ["grammar"], {"grammar": GrammarSpec() as grammar}:
            return grammar, None
        case ["grammar"], {"grammar": str() as text}:
            return GrammarSpec.lark(text), None
        case ["grammar"], {"grammar": other}:
            raise InvalidRequest(
                f"grammar must be Lark text or a GrammarSpec, got {type(other).__name__}",
                parameter="grammar",
                value=other,
            )
    return None, None


def schema_constraint(schema: object) -> Constraint:
    """Constrain to JSON that is valid for a type or a JSON Schema; the value is an instance, or plain JSON data.

    Args:
        schema: a Pydantic model, TypedDict, dataclass, or any other type Pydantic knows (`list[Model]`): objects hold
            its own fields only, unless it allows others; or a JSON Schema as a dict, which is taken as it is.
    Raises:
        InvalidRequest: neither.
    """
    if isinstance(schema, Mapping):
        return GrammarSpec.json_schema(copy.deepcopy(dict(schema))), Reader(json.loads)
    is_type = isinstance(schema, type) or get_origin(schema) is not None
    try:
        if not is_type:
            raise TypeError("not a type")
        adapter: TypeAdapter[Any] = TypeAdapter(portable(schema))
        json_schema = adapter.json_schema(schema_generator=TypeSchema)
    except NO_SCHEMA as error:
        raise InvalidRequest(
            "schema must be a Pydantic model, TypedDict, dataclass or other type of JSON data, or a JSON Schema as a "
            f"dict, got {schema!r:.80}: {first_line(error)}",
            parameter="schema",
            value=schema,
        ) from None
    return GrammarSpec.json_schema(json_schema), Reader(adapter.validate_json)


def _scalar_constraint(kind: Any) -> Constraint:
    """Constrain to the plain text of one scalar, without quotes."""
    if kind is str:
        return None, None
    if kind in _SCALARS:
        pattern, read = _SCALARS[kind]
        return GrammarSpec.regex(pattern), Reader(read)
    members: Sequence[Any] = ()
    if get_origin(kind) is Literal:
        members = get_args(kind)
        texts = [_plain(member) for member in members]
    elif isinstance(kind, type) and issubclass(kind, Enum):
        members = list(kind)
        texts = [_plain(member.value) for member in members]
    if not members:
        raise InvalidRequest(
            "type must be str, int, float, Decimal, bool, date, time, datetime, UUID, an Enum or a Literal, "
            f"got {kind!r:.80}; schema= takes every other type, as JSON",
            parameter="type",
            value=kind,
        )
    return GrammarSpec.choice(texts), Reader(dict(zip(texts, members, strict=True)).__getitem__)


def _plain(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "none"
        case Enum():
            return _plain(value.value)
        case str() | int() | float():
            return str(value)
    raise InvalidRequest(
        f"each value of an Enum or Literal must be text, a number, a bool or None, got {value!r}",
        parameter="type",
        value=value,
    )


def healed_grammar(grammar: GrammarSpec | None, healed: str) -> GrammarSpec | None:
    """Give the constraint on a text that must begin with `healed` and go on under `grammar`. Pure.

    Raises:
        InvalidRequest: the constraint is a schema or a grammar.
    """
    if not healed:
        return grammar
    if grammar is None:
        return GrammarSpec.regex(f"{_escaped(healed)}(?s:.*)")
    if grammar.kind == "regex":
        return GrammarSpec.regex(f"{_escaped(healed)}(?:{grammar.text})")
    if grammar.kind == "choice":
        return GrammarSpec.choice([healed + choice for choice in grammar.payload()])
    raise InvalidRequest(
        "heal takes no schema or grammar: put a space or newline before the call instead",
        parameter="heal",
        value=True,
    )


def check_can_heal(grammar: GrammarSpec | None) -> None:
    """Raise InvalidRequest unless a call with this constraint can be healed. Pure."""
    healed_grammar(grammar, "x")


def _escaped(text: str) -> str:
    """Give a regular expression for exactly this text. Pure."""
    return re.sub(r"([\\.^$*+?{}\[\]|()-])", r"\\\1", text)
