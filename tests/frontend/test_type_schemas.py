"""What a Python type asks of a model's text: its own fields and no others."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, NotRequired, Required, TypedDict

import pytest
from pydantic import BaseModel, ConfigDict, RootModel
from pydantic.dataclasses import dataclass as pydantic_dataclass

from frontend_lang import gen
from radixrt import InvalidRequest


class Inner(BaseModel):
    x: int


class Model(BaseModel):
    inner: Inner
    more: dict[str, Inner]
    kind: Literal["a", "b"] = "a"


class Node(BaseModel):
    children: list["Node"] = []


@dataclass
class Data:
    x: int
    y: str = "y"


class Typed(TypedDict, total=False):
    x: int


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    x: int


@pydantic_dataclass(config=ConfigDict(extra="allow"))
class OpenData:
    x: int


class Anything(RootModel[dict[str, Any]]):
    pass


def schema_of(kind):
    return json.loads(gen("x", 9, schema=kind).grammar.text)


def objects_with_fields(schema):
    """Give every part of a schema that names fields."""
    if isinstance(schema, list):
        return [found for item in schema for found in objects_with_fields(item)]
    if not isinstance(schema, dict):
        return []
    inner = [found for item in schema.values() for found in objects_with_fields(item)]
    return [*inner, schema] if isinstance(schema.get("properties"), dict) and "type" in schema else inner


@pytest.mark.parametrize("kind", [Model, Node, Data, Typed, list[Model], Inner | Data])
def test_a_text_of_a_type_has_no_keys_that_the_type_does_not_know(kind):
    found = objects_with_fields(schema_of(kind))
    assert found
    assert all(part["additionalProperties"] is False for part in found)


@pytest.mark.parametrize("kind", [Open, OpenData, Anything, dict[str, Any]])
def test_a_type_that_allows_other_keys_keeps_them(kind):
    assert schema_of(kind)["additionalProperties"] is True


def test_a_schema_of_the_caller_is_taken_as_it_is():
    given = {"type": "object", "properties": {"x": {"type": "integer"}}}
    assert schema_of(given) == given


def test_a_default_that_is_no_json_says_nothing_on_the_terminal():
    class Odd(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        x: Any = object()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "default" not in schema_of(Odd)["properties"]["x"]


class NotJson(BaseModel):
    call: Callable[[], int]


@pytest.mark.parametrize("kind", [NotJson, Callable[[], int], FunctionType])
def test_types_that_cannot_be_written_are_refused_in_one_line(kind):
    with pytest.raises(InvalidRequest, match="schema must be a Pydantic model") as caught:
        gen("x", 9, schema=kind)
    assert "\n" not in str(caught.value)


class Tree(TypedDict):
    """A tree."""

    value: int
    children: "NotRequired[list[Tree]]"


class Part(Tree, total=False):
    inner: Required[Tree]
    more: str


class OpenDict(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    x: int


def test_a_typed_dict_of_typing_keeps_what_it_says():
    call = gen("x", 99, schema=Part)
    schema = json.loads(call.grammar.text)
    assert set(schema["required"]) == {"value", "inner"}
    tree = schema["$defs"]["Tree"]
    assert (tree["required"], tree["description"]) == (["value"], "A tree.")
    assert tree["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    value = {"value": 1, "inner": {"value": 2, "children": [{"value": 3}]}}
    assert call.reader.read(json.dumps(value)) == value
    for wrong in ({"value": 1}, {"value": 1, "inner": {"value": 2, "children": [{}]}}):
        with pytest.raises(ValueError, match="validation error"):
            call.reader.read(json.dumps(wrong))
    assert schema_of(OpenDict)["additionalProperties"] is True
