"""What a request's OpenTelemetry span says beyond HTTP.

FastAPI opens the spans, under the caller's and through the API alone: without an SDK that the operator sets up there are
none, and nothing here happens. No prompt, no answer and no key is ever in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace
from starlette.routing import Route
from starlette.types import Scope

from radixrt.server.gate import Visit

# Logs would tell exceptions with their messages, which name what clients sent.
TELEMETRY = TelemetryConfig(
    logs=False,
    operation_spans=False,
    auto_configure=False,
    exclude=lambda scope: scope["path"] in ("/health", "/ready", "/metrics"),
)
_NAMES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "outcome": "radixrt.outcome",
}
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}


def annotate(model_name: str, scope: Scope, visit: Visit) -> Callable[[], None]:
    """Give what tells the current span, at the request's end, what became of it."""
    span = trace.get_current_span()

    def end() -> None:
        if not span.is_recording():
            return
        path = route_of(scope)
        attributes: dict[str, Any] = {
            "radixrt.request_id": visit.request_id,
            "gen_ai.provider.name": "radixrt",
            "gen_ai.request.model": model_name,
            **{name: visit.notes[note] for note, name in _NAMES.items() if note in visit.notes},
        }
        if path in _OPERATIONS:
            attributes["gen_ai.operation.name"] = _OPERATIONS[path]
        span.set_attributes(attributes)
        if "outcome" in visit.notes:  # a stream that broke: its status was told long before
            span.set_status(trace.StatusCode.ERROR, str(visit.notes["outcome"]))

    return end


def note_first_token(ago_s: float = 0.0) -> None:
    """Note on the current span that the first token came so many seconds ago."""
    trace.get_current_span().add_event("gen_ai.first_token", timestamp=time.time_ns() - int(1e9 * ago_s))


def route_of(scope: Scope) -> str:
    """Give the path as its route is declared, "other" if there is no such route."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "other"
