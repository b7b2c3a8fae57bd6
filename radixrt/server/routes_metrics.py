"""/metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from radixrt.server.errors import refused
from radixrt.server.service import arrival

router = APIRouter()
READER = "metrics"  # the tenant whose key reads /metrics where there are several


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Give counters and times in Prometheus' text form.

    They are of all tenants together, and one tenant could learn from them what another one has cached: with several
    API keys only the tenant "metrics" may read them.
    """
    service, visit = arrival(request)
    if len(service.keys) > 1 and visit.tenant.name != READER:
        raise refused(403, f"only the tenant {READER!r} may read /metrics", code="not_permitted")
    page = await service.in_thread(service.metrics.page)
    return Response(page, media_type=CONTENT_TYPE_LATEST)
