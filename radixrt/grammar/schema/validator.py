"""The judge of finished values: jsonschema, with no access to the network."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import jsonschema
import referencing
from jsonschema import validators
from jsonschema.protocols import Validator

from radixrt.errors import InvalidRequest
from radixrt.grammar.schema.keywords import FORMATS

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


@dataclass(frozen=True, slots=True)
class SchemaValidator:
    """A schema under the rules of its draft. Immutable."""

    validator: Validator

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
            found = draft(draft.META_SCHEMA).iter_errors(schema)
            fault = next((fault for fault in found if fault.validator != "uniqueItems"), None)
            if fault is None:
                return cls(
                    draft(schema, registry=referencing.Registry(), format_checker=_format_checker(draft))
                )
            faults.append(fault)
        place = "".join(
            f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in faults[0].absolute_path
        )
        raise InvalidRequest(
            f"not a JSON Schema at {place or 'its root'}: {faults[0].message[:500]}",
            parameter=place,
            value=faults[0].instance,
        )

    @property
    def draft(self) -> int:
        """Give the draft that decides: 4, 6, 7, 2019 or 2020."""
        return _NUMBERS[type(self.validator)]

    def judge(self, text: str) -> bool | None:
        """Tell whether a text is JSON and valid; None when a pattern is none that Python can match."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return False
        try:
            return bool(self.validator.is_valid(value))
        except re.error:
            return None


def _format_checker(draft: Any) -> jsonschema.FormatChecker:
    """Give the draft's own checks of the formats that masks enforce."""
    checker = jsonschema.FormatChecker(())
    checker.checkers = {
        name: check for name, check in draft.FORMAT_CHECKER.checkers.items() if name in FORMATS
    }
    return checker


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
