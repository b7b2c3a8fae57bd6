"""Short ways to ask an app in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from radixrt import SamplingParams
from tests.support.servers import client


def run(engine, work, **options: Any):
    """Run `await work(http)` with a client of a new app."""

    async def go():
        async with client(engine, **options) as http:
            return await work(http)

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
