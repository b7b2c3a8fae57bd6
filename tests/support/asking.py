"""Short ways to ask an app in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from radixrt import SamplingParams
from radixrt.config import ServerConfig
from radixrt.server import create_app
from tests.support.servers import at_rest, client_of


def run(engine, work, **options: Any):
    """Run `await work(http)` with a client of a new app; none of its threads is at work any more at the end."""

    async def go():
        app = create_app(engine, ServerConfig(**options))
        async with client_of(app) as http:
            found = await work(http)
        await at_rest(app)
        return found

    return asyncio.run(go())


def post(engine, path: str, body: Any, *, headers: dict[str, str] | None = None, **options: Any):
    """Post one JSON body to a new app."""
    return run(engine, lambda http: http.post(path, json=body, headers=headers), **options)


def get(engine, path: str, *, headers: dict[str, str] | None = None, **options: Any):
    """Get one path of a new app."""
    return run(engine, lambda http: http.get(path, headers=headers), **options)


def chat_ids(engine, messages):
    """Encode a chat as the server does."""
    pieces = engine.tokenizer.chat.render(messages, add_generation_prompt=True)
    return engine.tokenizer.encode_pieces(pieces)


def chat_in_process(engine, messages, **sampling: Any):
    """Answer a chat without the server."""
    return engine.generate(chat_ids(engine, messages), SamplingParams(**sampling))
