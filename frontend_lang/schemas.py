"""From Python types to the JSON Schema that a model's text is held to."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from typing import Any, get_args, get_origin

import typing_extensions
from pydantic import PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import core_schema

# What Pydantic raises for a type that is no JSON data, or whose annotations name nothing.
NO_SCHEMA = (TypeError, NameError, PydanticSchemaGenerationError, PydanticUserError)


class TypeSchema(GenerateJsonSchema):
    """Write the schema of a type so that a text holds the type's own fields and no others.

    Pydantic drops a key that a class does not know, so a model that writes one has said something nobody reads. A
    class that allows extra keys keeps them. What cannot be written down is left out without a warning.
    """

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """Say nothing."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return _closed(super().model_schema(schema))

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return _closed(super().dataclass_schema(schema))

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        return _closed(super().typed_dict_schema(schema))


def first_line(error: Exception) -> str:
    """Give the first line of an error's text: Pydantic adds links. Pure."""
    return str(error).partition("\n")[0]


def _closed(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Forbid unknown keys where nothing is said of them. Pure."""
    if schema.get("type") != "object" or "additionalProperties" in schema:
        return schema
    return {**schema, "additionalProperties": False}


_MARKS = (typing.Required, typing.NotRequired)


def portable(annotation: Any) -> Any:
    """Rebuild TypedDicts of `typing` as those of typing_extensions, which Pydantic needs before Python 3.12.

    Those inside of dataclasses and models stay as they are.
    """
    return _rebuilt(annotation, {})


def _rebuilt(annotation: Any, known: dict[Any, Any]) -> Any:
    """Rebuild an annotation; `known` holds the TypedDicts of it that have been begun, as they may name themselves."""
    if typing_extensions.is_typeddict(annotation):
        if annotation not in known:
            _rebuild_dict(annotation, known)
        return known[annotation]
    arguments = get_args(annotation)
    if not arguments or dataclasses.is_dataclass(annotation):
        return annotation
    parts = tuple(_rebuilt(argument, known) for argument in arguments)
    origin = get_origin(annotation)
    if parts == arguments or origin is None:
        return annotation
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, parts)
    return origin[parts]


def _rebuild_dict(annotation: Any, known: dict[Any, Any]) -> None:
    """Put a TypedDict like `annotation` into `known`."""
    make: Any = typing_extensions.TypedDict
    new = make(annotation.__name__, {})
    known[annotation] = new
    fields: dict[str, Any] = {}
    required = set(annotation.__required_keys__)
    for name, hint in typing.get_type_hints(annotation, include_extras=True).items():
        mark = get_origin(hint)
        if mark in _MARKS:  # which Python does not see inside of quoted annotations
            (hint,) = get_args(hint)
            (required.add if mark is typing.Required else required.discard)(name)
        fields[name] = _rebuilt(hint, known)
    new.__annotations__ = fields
    new.__required_keys__ = frozenset(required)
    new.__optional_keys__ = frozenset(fields.keys() - required)
    new.__doc__, new.__module__ = annotation.__doc__, annotation.__module__
    if "__pydantic_config__" in vars(annotation):
        new.__pydantic_config__ = annotation.__pydantic_config__
