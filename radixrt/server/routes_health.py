"""/health and /ready."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixrt.errors import EngineStopped
from radixrt.server.answers import json_response
from radixrt.server.errors import refused
from radixrt.server.service import service_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """Tell whether the engine lives; never waits for it."""
    if not service_of(request).engine.is_running:
        raise EngineStopped("the engine has stopped")
    return json_response({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Tell whether new requests are taken."""
    service = service_of(request)
    if not service.engine.is_running:
        raise EngineStopped("the engine has stopped")
    if service.load.is_draining:
        raise refused(503, "the server is stopping", code="engine_stopped", retry_after="5")
    return json_response({"status": "ready"})
