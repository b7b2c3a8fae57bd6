"""create_app: the routes over one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI

from radixrt.config import ServerConfig
from radixrt.engine import AsyncEngine, Engine
from radixrt.server import (
    routes_chat,
    routes_completions,
    routes_decisions,
    routes_health,
    routes_metrics,
    routes_models,
    routes_native,
    routes_responses,
)
from radixrt.server.bodies_chat import ChatBody
from radixrt.server.bodies_completions import CompletionBody
from radixrt.server.bodies_decisions import DecisionBody
from radixrt.server.bodies_native import CloseScopesBody, ExplainBody, GenerateBody, ScopeBody
from radixrt.server.bodies_responses import ResponsesBody
from radixrt.server.documents import add_document
from radixrt.server.errors import add_error_handlers
from radixrt.server.gate import Gate
from radixrt.server.reading import Body
from radixrt.server.service import Service
from radixrt.server.tracing import TELEMETRY, annotate

ROUTERS = (  # a request tries one after the other
    routes_chat.router,
    routes_completions.router,
    routes_native.router,
    routes_responses.router,
    routes_decisions.router,
    routes_models.router,
    routes_health.router,
    routes_metrics.router,
)
BODIES: tuple[type[Body], ...] = (
    ChatBody,
    CompletionBody,
    routes_models.TokenizeBody,
    routes_models.DetokenizeBody,
    routes_models.OpenRoleBody,
    GenerateBody,
    ExplainBody,
    ScopeBody,
    CloseScopesBody,
    DecisionBody,
    ResponsesBody,
)


def create_app(engine: Engine | AsyncEngine, config: ServerConfig | None = None) -> FastAPI:
    """Give an ASGI app over an engine; the caller closes the engine.

    Args:
        config: default: the server options that the engine was made with.
    Raises:
        InvalidRequest: the API keys cannot be read.
    """
    inner = engine.engine if isinstance(engine, AsyncEngine) else engine
    service = Service(inner, inner.config.options.server if config is None else config)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.warmed()
        yield
        service.close()

    app = FastAPI(
        title="radixrt",
        openapi_url="/openapi.json",
        docs_url=None,  # its page loads scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry=TELEMETRY,
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    add_error_handlers(app)
    add_document(app, BODIES)
    app.add_middleware(
        Gate,
        keys=service.keys,
        load=service.load,
        max_header_bytes=service.config.max_header_bytes,
        watchers=(service.count, partial(annotate, service.model_name)),
    )
    return app
