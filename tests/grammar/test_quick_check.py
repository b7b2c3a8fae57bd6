"""The fast check of schemas never takes one that breaks the rules of its draft."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import jsonschema
import pytest

from radixrt.grammar.schema.quick_check import is_plainly_valid

DRAFTS: dict[int, Any] = {
    4: jsonschema.Draft4Validator,
    6: jsonschema.Draft6Validator,
    7: jsonschema.Draft7Validator,
    2019: jsonschema.Draft201909Validator,
    2020: jsonschema.Draft202012Validator,
}
NAMES = sorted(
    {
        name
        for draft in DRAFTS.values()
        for name in [*draft.META_SCHEMA.get("properties", {}), *draft.VALIDATORS]
        if name != "$ref"
    }
)
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 3, 0.5, 1.0, "", "object", "x#y", [], ["a"], ["string"], [1], {}, {"a": 1}),
    *({"a": {}}, [{}], [True], {"a": True}, {"a": ["b"]}, [[]], {"a": []}, {"type": "nothing"}, ["a", "a"]),
]
GOOD: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}, "required": ["a"]},
    {"anyOf": [{"enum": [1, "a"]}, {"not": {"const": 2}}], "title": "t", "unknown": [1]},
    {"items": {"$ref": "#/definitions/a"}, "definitions": {"a": {"multipleOf": 2, "minimum": -1}}},
    {"additionalProperties": False, "patternProperties": {"^a": {"maxItems": 2, "uniqueItems": True}}},
]


def is_valid(schema: Any, draft: int) -> bool:
    faults = DRAFTS[draft](DRAFTS[draft].META_SCHEMA).iter_errors(schema)
    return all(fault.validator == "uniqueItems" for fault in faults)


def changed(draw: random.Random, schema: Any) -> Any:
    """Put something into a random place of a schema."""
    schema = copy.deepcopy(schema)
    places = [schema]
    for node in places:
        places += [
            item
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
    node = draw.choice(places)
    if isinstance(node, dict):
        node[draw.choice(NAMES)] = copy.deepcopy(draw.choice(JUNK))
    else:
        node.append(copy.deepcopy(draw.choice(JUNK)))
    return schema


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("schema", GOOD, ids=json.dumps)
def test_plain_schemas_are_taken(schema: Any, draft: int) -> None:
    assert is_plainly_valid(schema, draft)
    assert is_valid(schema, draft)


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_is_taken_keeps_the_rules(draft: int) -> None:
    draw = random.Random(draft)
    num_taken, num_invalid = 0, 0
    for name in NAMES:
        for junk in JUNK:
            schema = {name: junk}
            assert not is_plainly_valid(schema, draft) or is_valid(schema, draft), (draft, schema)
    for _ in range(600):
        schema = draw.choice(GOOD)
        for _ in range(draw.randrange(1, 4)):
            schema = changed(draw, schema)
        is_taken, is_right = is_plainly_valid(schema, draft), is_valid(schema, draft)
        assert is_right or not is_taken, (draft, schema)
        num_taken, num_invalid = num_taken + is_taken, num_invalid + (not is_right)
    assert num_taken > 20
    assert num_invalid > 20
