"""The constraint options of `gen`: what the runtime must enforce, and how the text becomes a value."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from frontend_lang.backends import GrammarSpec, InvalidRequest

CONSTRAINTS = ("regex", "choices", "schema", "grammar")


@dataclass(frozen=True, slots=True)
class Schema:
    """How JSON text becomes a value: a validated instance of `model`, else plain JSON data."""

    model: type[BaseModel] | None = None

    def value(self, text: str) -> Any:
        """Parse the text.

        Raises:
            ValueError: not valid JSON, or not valid for the model (pydantic.ValidationError).
        """
        return json.loads(text) if self.model is None else self.model.model_validate_json(text)


def constraint_of(options: Mapping[str, Any]) -> tuple[GrammarSpec | None, Schema | None]:
    """Give the grammar and the schema that the constraint options ask for. Pure.

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
            return _schema(schema)
        case ["grammar"], {"grammar": GrammarSpec() as grammar}:
            return grammar, None
        case ["grammar"], {"grammar": other}:
            raise InvalidRequest(
                f"grammar must be a GrammarSpec, e.g. GrammarSpec.lark(...), got {type(other).__name__}",
                parameter="grammar",
                value=other,
            )
    return None, None


def _schema(schema: object) -> tuple[GrammarSpec, Schema]:
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return GrammarSpec.json_schema(schema.model_json_schema()), Schema(schema)
    if isinstance(schema, Mapping):
        return GrammarSpec.json_schema(copy.deepcopy(dict(schema))), Schema()
    raise InvalidRequest(
        f"schema must be a Pydantic model class or a JSON Schema as a dict, got {type(schema).__name__}",
        parameter="schema",
        value=schema,
    )
