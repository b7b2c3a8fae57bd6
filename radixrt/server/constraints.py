"""Constraints as clients write them -> GrammarSpec."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from radixrt.errors import InvalidRequest
from radixrt.server.bodies import ConstrainedBody, ResponseFormat, StructuredOutputs
from radixrt.types import GrammarSpec

Whitespace = Literal["compact", "flexible"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint and where it stood in the body, as a JSON Pointer: errors name that place."""

    spec: GrammarSpec
    pointer: str


def constraint_of(body: ConstrainedBody) -> Constraint | None:
    """Give the constraint of a request.

    Raises:
        InvalidRequest: more than one, or one of a wrong form.
    """
    found = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
    ]
    if body.regex is not None:
        found.append(Constraint(GrammarSpec.regex(body.regex), "regex"))
    if body.ebnf is not None:
        raise InvalidRequest(
            "ebnf is not supported yet; use structured_outputs.grammar (Lark)", parameter="ebnf"
        )
    if len(found) > 1:
        names = " and ".join(item.pointer for item in found[:2])
        raise InvalidRequest(f"a request takes one constraint, got {names}", parameter=found[1].pointer)
    return found[0] if found else None


def _of_response_format(wanted: ResponseFormat | None) -> list[Constraint]:
    if wanted is None:
        return []
    if wanted.type != "json_schema":
        if wanted.json_schema is not None:
            raise InvalidRequest(
                f"json_schema needs type json_schema, got {wanted.type}",
                parameter="response_format/json_schema",
            )
        return (
            [Constraint(GrammarSpec.json_object(), "response_format")] if wanted.type == "json_object" else []
        )
    if wanted.json_schema is None:
        raise InvalidRequest(
            "response_format/json_schema is missing", parameter="response_format/json_schema"
        )
    schema = wanted.json_schema.schema_
    pointer = "response_format/json_schema/schema"
    if schema is None:
        raise InvalidRequest(f"{pointer} is missing", parameter=pointer)
    return [Constraint(_json_schema(schema, pointer, "compact"), pointer)]


def _of_structured_outputs(wanted: StructuredOutputs | None) -> list[Constraint]:
    if wanted is None:
        return []
    place = "structured_outputs"
    whitespace: Whitespace = "flexible" if wanted.disable_any_whitespace is False else "compact"
    found: list[Constraint] = []
    if wanted.json_ is not None:
        schema = _parsed(wanted.json_) if isinstance(wanted.json_, str) else wanted.json_
        found.append(Constraint(_json_schema(schema, f"{place}/json", whitespace), f"{place}/json"))
    if wanted.regex is not None:
        found.append(Constraint(GrammarSpec.regex(wanted.regex), f"{place}/regex"))
    if wanted.choice is not None:
        found.append(Constraint(GrammarSpec.choice(wanted.choice), f"{place}/choice"))
    if wanted.grammar is not None:
        found.append(Constraint(GrammarSpec.lark(_lark(wanted.grammar)), f"{place}/grammar"))
    if wanted.json_object:
        found.append(Constraint(GrammarSpec.json_object(), f"{place}/json_object"))
    if not found:
        raise InvalidRequest(
            "structured_outputs needs one of json, regex, choice, grammar, json_object", parameter=place
        )
    return found


def _json_schema(schema: Any, pointer: str, whitespace: Whitespace) -> GrammarSpec:
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{pointer} must be a JSON Schema: an object or a boolean", parameter=pointer)
    return GrammarSpec.json_schema(schema, whitespace=whitespace)


def _parsed(text: str) -> Any:
    """Parse a schema that came as JSON text; the text was not seen by the depth check of the body."""
    from radixrt.server.reading import check_depth

    pointer = "structured_outputs/json"
    try:
        check_depth(text.encode())
        return json.loads(text)
    except ValueError:
        raise InvalidRequest(f"{pointer} must be a JSON Schema or its text", parameter=pointer) from None


def _lark(text: str) -> str:
    """Give a Lark grammar without the empty options line that guidance writes in front of it."""
    first, _, rest = text.lstrip().partition("\n")
    return rest if first.replace(" ", "") == "%llguidance{}" else text
