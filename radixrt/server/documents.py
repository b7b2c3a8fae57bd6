"""The OpenAPI document: bodies are read by our own reader, so their schemas are added here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from radixrt.server.reading import Body

_PLACE = "#/components/schemas/{model}"


def documented(kind: type[Body]) -> dict[str, Any]:
    """Give a route's keyword arguments that document its JSON body."""
    reference = {"$ref": _PLACE.format(model=kind.__name__)}
    content = {"application/json": {"schema": reference}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def add_document(app: FastAPI, bodies: Sequence[type[Body]]) -> None:
    """Let the app's OpenAPI document have these bodies; it is made when first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, found = models_json_schema([(kind, "validation") for kind in bodies], ref_template=_PLACE)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(found.get("$defs", {}))
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
