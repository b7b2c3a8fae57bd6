"""Constraints as clients write them -> GrammarSpec."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from radixrt.constraints import GrammarSpec, OnUnsupported, StructuralTag, Whitespace
from radixrt.errors import InvalidRequest
from radixrt.server.bodies import ConstrainedBody, ResponseFormat, StructuredOutputs, Tag, TagFormat
from radixrt.server.errors import pointed
from radixrt.server.reading import check_depth, parse_body
from radixrt.server.retired import RETIRED_FIELDS

GUIDANCE_MARK = "%llguidance{}"
_CAPTURE = re.compile(r"(?m)(?<=\w)\[capture\](?=:)")


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
    _check_older(body)
    on_unsupported = body.radixrt.on_unsupported
    found = [
        *_of_response_format(body.response_format, on_unsupported),
        *_of_structured_outputs(body.structured_outputs, on_unsupported),
    ]
    if body.regex is not None:
        found.append(Constraint(GrammarSpec.regex(body.regex), "regex"))
    if body.ebnf is not None:
        found.append(Constraint(_grammar(body.ebnf, is_ebnf=True), "ebnf"))
    if len(found) > 1:
        names = " and ".join(item.pointer for item in found[:2])
        raise InvalidRequest(f"a request takes one constraint, got {names}", parameter=found[1].pointer)
    is_schema = bool(found) and found[0].spec.on_unsupported == on_unsupported
    if on_unsupported == "check" and not is_schema:
        raise InvalidRequest("on_unsupported needs a JSON Schema", parameter="radixrt/on_unsupported")
    return found[0] if found else None


def _check_older(body: ConstrainedBody) -> None:
    """Raise InvalidRequest if vLLM's older fields say anything but what structured_outputs says beside them."""
    wanted = None if body.structured_outputs is None else body.structured_outputs.grammar
    if body.guided_grammar is not None and body.guided_grammar != wanted:
        raise InvalidRequest(
            f"guided_grammar: {RETIRED_FIELDS['guided_grammar']}", parameter="guided_grammar"
        )
    if body.guided_decoding_backend is not None and body.guided_grammar is None:
        name = "guided_decoding_backend"
        raise InvalidRequest(f"{name}: {RETIRED_FIELDS[name]}", parameter=name)


def _of_response_format(wanted: ResponseFormat | None, on_unsupported: OnUnsupported) -> list[Constraint]:
    if wanted is None:
        return []
    place = "response_format"
    parts = {"json_schema": ("json_schema",), "structural_tag": ("format", "structures", "triggers")}
    for kind, names in parts.items():
        for name in names:
            if name in wanted.model_fields_set and wanted.type != kind:
                raise InvalidRequest(
                    f"{place}/{name} needs type {kind}, got {wanted.type}", parameter=f"{place}/{name}"
                )
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [Constraint(GrammarSpec.json_object(), place)]
    if wanted.type == "structural_tag":
        return [Constraint(_structural(wanted, place), place)]
    pointer = f"{place}/json_schema/schema"
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest(f"{pointer} is missing", parameter=pointer)
    return [Constraint(_json_schema(wanted.json_schema.schema_, pointer, "compact", on_unsupported), pointer)]


def _of_structured_outputs(
    wanted: StructuredOutputs | None, on_unsupported: OnUnsupported
) -> list[Constraint]:
    if wanted is None:
        return []
    place = "structured_outputs"
    whitespace: Whitespace = "flexible" if wanted.disable_any_whitespace is False else "compact"
    found: list[Constraint] = []
    if wanted.json_ is not None:
        pointer = f"{place}/json"
        schema = _parsed(wanted.json_, pointer) if isinstance(wanted.json_, str) else wanted.json_
        found.append(Constraint(_json_schema(schema, pointer, whitespace, on_unsupported), pointer))
    if wanted.regex is not None:
        found.append(Constraint(GrammarSpec.regex(wanted.regex), f"{place}/regex"))
    if wanted.choice is not None:
        found.append(Constraint(GrammarSpec.choice(wanted.choice), f"{place}/choice"))
    if wanted.grammar is not None:
        found.append(Constraint(_grammar(wanted.grammar), f"{place}/grammar"))
    if wanted.json_object:
        found.append(Constraint(GrammarSpec.json_object(), f"{place}/json_object"))
    if wanted.structural_tag is not None:
        pointer = f"{place}/structural_tag"
        try:
            given = parse_body(wanted.structural_tag.encode(), ResponseFormat)
            found.append(Constraint(_structural(given, pointer), pointer))
        except InvalidRequest as error:
            raise pointed(error, pointer, is_inner=True) from None
    if not found:
        raise InvalidRequest(
            "structured_outputs needs one of json, regex, choice, grammar, json_object, structural_tag",
            parameter=place,
        )
    return found


def _json_schema(
    schema: Any, pointer: str, whitespace: Whitespace, on_unsupported: OnUnsupported = "refuse"
) -> GrammarSpec:
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{pointer} must be a JSON Schema: an object or a boolean", parameter=pointer)
    return GrammarSpec.json_schema(schema, whitespace=whitespace, on_unsupported=on_unsupported)


def _parsed(text: str, pointer: str) -> Any:
    """Parse a schema that came as JSON text, which the depth check of the body did not see."""
    try:
        check_depth(text.encode())
        return json.loads(text)
    except ValueError:
        raise InvalidRequest(f"{pointer} must be a JSON Schema or its text", parameter=pointer) from None


def _grammar(text: str, *, is_ebnf: bool = False) -> GrammarSpec:
    """Give a grammar's spec: Lark or GBNF, told apart by how they define rules.

    guidance writes Lark for every server, behind a line of options; one without options says nothing, and neither does
    its mark on rules whose text it wants to find again.
    """
    first, _, rest = text.lstrip().partition("\n")
    if first.replace(" ", "") == GUIDANCE_MARK:
        return GrammarSpec.lark(_CAPTURE.sub("", rest))
    return GrammarSpec.ebnf(text) if is_ebnf or _is_ebnf(text) else GrammarSpec.lark(text)


def _is_ebnf(text: str) -> bool:
    for line in text.splitlines():
        name, mark, _ = line.partition("::=")
        if mark and name.strip().replace("-", "_").isidentifier():
            return True
    return False


def _structural(wanted: ResponseFormat, place: str) -> GrammarSpec:
    """Give the spec of structural tags.

    Raises:
        InvalidRequest: neither form, or both, or a tag without content.
    """
    if wanted.format is None:
        if wanted.structures is None or wanted.triggers is None:
            raise InvalidRequest(f"{place} needs format, or structures and triggers", parameter=place)
        made = TagFormat(type="triggered_tags", triggers=wanted.triggers, tags=wanted.structures)
    elif wanted.structures is not None or wanted.triggers is not None:
        raise InvalidRequest(f"{place} takes format, or structures and triggers", parameter=f"{place}/format")
    else:
        made = wanted.format
    return GrammarSpec.structural(
        [_tag(tag, f"{place}/tags/{index}") for index, tag in enumerate(made.tags)],
        triggers=made.triggers,
        min_tags=int(made.at_least_one),
        max_tags=1 if made.stop_after_first else None,
    )


def _tag(tag: Tag, place: str) -> StructuralTag:
    content = tag.content
    if (content is None) == (tag.schema_ is None):
        raise InvalidRequest(f"{place} needs either content or schema", parameter=place)
    if content is None:
        grammar = _json_schema(tag.schema_, f"{place}/schema", "compact")
    elif content.type == "json_schema" and content.pattern is None:
        grammar = _json_schema(content.json_schema, f"{place}/content/json_schema", "compact")
    elif content.type == "regex" and content.pattern is not None and content.json_schema is None:
        grammar = GrammarSpec.regex(content.pattern)
    else:
        raise InvalidRequest(
            f"{place}/content: json_schema has json_schema, regex has pattern", parameter=f"{place}/content"
        )
    return StructuralTag(tag.begin, grammar, tag.end)
