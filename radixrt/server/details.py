"""radixrt.details: where a prompt misses the cache, asked before it runs."""

from __future__ import annotations

from collections.abc import Sequence

from radixrt.explain import PrefixReport
from radixrt.server.bodies import CallBody
from radixrt.server.service import Service
from radixrt.types import GenerateRequest


async def reports(
    service: Service, body: CallBody, requests: Sequence[GenerateRequest]
) -> list[PrefixReport]:
    """Give a report per prompt if details are wanted, else none. Waits for the engine's next step."""
    if not body.radixrt.details:
        return []
    engine = service.engine

    def explain() -> list[PrefixReport]:
        found = [engine.explain(item.prompt_ids, namespace=item.namespace) for item in requests]
        return [service.shown(report) for report in found]

    return await service.in_thread(explain)
