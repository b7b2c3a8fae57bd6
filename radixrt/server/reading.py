"""Reading a request's body: bounded in bytes, time and depth, then into its model."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails

from radixrt.errors import InvalidRequest, suggest
from radixrt.server.errors import refused
from radixrt.server.retired import RETIRED_FIELDS

MAX_DEPTH = 128  # of the JSON text; the validating parser's own limit is 200
MAX_ERRORS = 1000

_NOT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class Body(BaseModel):
    """A request body: unknown fields are errors, and so are values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Stop at a list's first bad item: one error is told, and a million would take a minute to collect."""
        schema = handler(source)
        pending: list[Any] = [schema]
        while pending:
            item = pending.pop()
            if isinstance(item, dict):
                if item.get("type") in ("list", "tuple"):
                    item["fail_fast"] = True
                pending.extend(item.values())
            elif isinstance(item, list | tuple):
                pending.extend(item)
        return schema


BodyType = TypeVar("BodyType", bound=Body)


async def read_json(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read a body that says it is JSON.

    Raises:
        Refusal: 413 too many bytes, 408 too slow, 415 not JSON by its content type.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        # Browsers send other types across sites without asking, so they are not taken for JSON.
        raise refused(415, "the body must have the content type application/json", code="not_json")
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise refused(413, f"the body must have at most {max_bytes} bytes", code="body_too_large")
                parts.append(part)
    except TimeoutError:
        raise refused(408, f"the body did not arrive within {timeout_s:g} s", code="body_too_slow") from None
    return b"".join(parts)


def parse_body(raw: bytes, kind: type[BodyType]) -> BodyType:
    """Parse and check a JSON text. Pure.

    Raises:
        InvalidRequest: not JSON, nested too deeply, or a field that breaks a rule (names it).
    """
    check_depth(raw)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _as_request_error(error, kind, raw) from None


def check_depth(raw: bytes) -> None:
    """Raise InvalidRequest if JSON text is nested too deeply, before any recursive walk. Pure.

    Brackets inside strings count too where their number alone could be too large; the strings are then cut out.
    """
    if _depth(raw) > MAX_DEPTH and _depth(_without_strings(raw)) > MAX_DEPTH:
        raise InvalidRequest(f"the body may be nested {MAX_DEPTH} levels deep", parameter="body")


def _depth(raw: bytes) -> int:
    deepest = depth = 0
    brackets = raw.translate(None, _NOT_BRACKETS)
    if brackets.count(b"[") + brackets.count(b"{") <= MAX_DEPTH:
        return 0
    for bracket in brackets:
        depth += _STEP[bracket]
        deepest = max(deepest, depth)
    return deepest


def _without_strings(raw: bytes) -> bytes:
    """Cut the strings out of JSON text."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2])


def _as_request_error(error: ValidationError, kind: type[Body], raw: bytes) -> InvalidRequest:
    """Give the first broken rule in our words, with the field as a JSON Pointer."""
    if error.error_count() > MAX_ERRORS:  # to spell out each of a million unknown fields would take seconds
        return InvalidRequest(f"the body breaks {error.error_count()} rules", parameter="body")
    found = error.errors(include_url=False, include_context=False)
    if found[0]["type"] == "json_invalid":
        return InvalidRequest(f"the body must be JSON: {found[0]['msg']}", parameter="body")
    given = _given(raw)
    # Of the branches of a union, the one that went furthest is the one that was meant.
    branches = [item for item in found if item["loc"][:1] == found[0]["loc"][:1]]
    first = max(branches, key=lambda item: len(_place(item, given)))
    place = _place(first, given)
    pointer, name = "/".join(place), place[-1] if place else "body"
    if first["type"] == "extra_forbidden":
        if len(place) == 1 and name in RETIRED_FIELDS:
            return InvalidRequest(f"{name}: {RETIRED_FIELDS[name]}", parameter=name)
        known = kind.model_fields if len(place) == 1 else ()
        return InvalidRequest(f"unknown field {pointer!r}.{suggest(name, known)}", parameter=pointer)
    if first["type"] == "missing":
        return InvalidRequest(f"{pointer} is missing", parameter=pointer)
    text = first["msg"].removeprefix("Value error, ")
    value = repr(first.get("input"))[:120]
    return InvalidRequest(
        f"{pointer or 'body'}: {text}, got {value}", parameter=pointer or "body", value=value
    )


def _given(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:  # a number with too many digits, say
        return None


def _place(item: ErrorDetails, given: Any) -> list[str]:
    """Give where an error stands in what was given: its place less the names of unions' branches."""
    place: list[str] = []
    for at, part in enumerate(item["loc"]):
        is_missing = item["type"] == "missing" and at == len(item["loc"]) - 1
        if isinstance(given, dict) and (part in given or is_missing):
            given = given.get(part)
        elif isinstance(given, list) and isinstance(part, int) and part < len(given):
            given = given[part]
        else:
            continue
        place.append(str(part))
    return place
