"""Run the server: start-up, drain on SIGTERM, exit status."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from radixrt.config import ServerConfig
from radixrt.engine import Engine
from radixrt.server.app import create_app
from radixrt.server.connections import PatientProtocol
from radixrt.server.logs import set_up_logs
from radixrt.server.service import Service

logger = logging.getLogger("radixrt.server")
WATCH_S = 0.2
# How long a thread may keep the interpreter while others want it: the event loop gives it away at each write, and gets it
# back from the engine's thread, and from those that render and compile, only after so long (Python's own 5 ms each).
SWITCH_S = 0.0005
LAST_WORDS_S = 4  # after the drain, for errors to reach their readers
# Then, for what served those who did not read them to end; what outlasts that is told as a fault.
CUT_OFF_S = 1
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class DrainingServer(uvicorn.Server):
    """uvicorn, told to let requests end: the first signal starts the drain, the end of the drain ends the engine."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.has_died = False
        self._is_cut_off = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: begin the drain; a second SIGINT cuts it short, a third one waits for nothing."""
        self._service.load.is_draining = True
        if sig == signal.SIGINT and self.should_exit and not self._is_cut_off:
            asyncio.get_running_loop().call_soon_threadsafe(self._cut_off)
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: Any = None) -> None:
        """Listen, say so, and watch over the engine."""
        await super().startup(sockets=sockets)
        if self.started:
            _freeze()
            port = self.servers[0].sockets[0].getsockname()[1]
            sys.stderr.write(start_block(self._service, port=port) + "\n")
            sys.stderr.flush()
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Stop when the engine dies. End it when the drain takes too long, and then whoever does not read the error."""
        while self._service.engine.is_running and not self.should_exit:
            await asyncio.sleep(WATCH_S)
        if not self.should_exit:
            logger.critical("the engine has died: the server stops")
            self.has_died = True
            await asyncio.sleep(WATCH_S)  # let /health say so
            self.should_exit = True
        await asyncio.sleep(self._service.config.drain_s)
        if self._service.engine.is_running:
            logger.warning("requests are still open after drain_s: they get an error")
            threading.Thread(target=self._service.engine.close, daemon=True).start()
        await asyncio.sleep(LAST_WORDS_S)
        self._cut_off()

    def _cut_off(self) -> None:
        """Break the connections: that ends their requests as any that nobody reads. Cancelled ones would look like faults."""
        self._is_cut_off = True
        logger.warning("%d connections are still open: they are cut off", len(self.server_state.connections))
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _freeze() -> None:
    """Take what start-up made out of the garbage collector's sight: its walks through all of it take 0.3 s, and all wait."""
    gc.collect()
    gc.freeze()
    gc.collect()  # it puts off its walks until a quarter has been added to what it found last: to nearly nothing, now


def start_block(service: Service, *, port: int) -> str:
    """Give what start-up prints: model, dtype, KV, URL, one line to try."""
    engine, config = service.engine.config, service.config
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{port}"
    key = ' -H "Authorization: Bearer $KEY"' if len(service.keys) else ""
    lines = [
        f"radixrt serves {service.model_name} at {url}",
        f"  model      {engine.options.model.model} on {engine.device.type}, "
        f"{str(engine.dtype).removeprefix('torch.')}, context {engine.max_context} tokens",
        f"  KV cache   {engine.num_pages - 1} pages of {engine.layout.page_size} = {engine.num_kv_tokens} tokens",
        f"  API keys   {len(service.keys) or 'none: everyone who reaches the port is let in'}"
        f"; prefixes shared by: {service.rule.mode}",
        f"  try        curl {url}/v1/chat/completions -H 'content-type: application/json'{key} "
        f"""-d '{{"model":"{service.model_name}","messages":[{{"role":"user","content":"Hello"}}]}}'""",
    ]
    if config.host not in LOOPBACK and not len(service.keys):
        lines.append(f"  WARNING    {config.host} may be reached by others, and no API key is set")
    return "\n".join(lines)


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Give uvicorn's options. h11 bounds the bytes of a request's head by itself."""
    protocol = partial(PatientProtocol, patience_s=config.body_timeout_s)
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=cast(type[asyncio.Protocol], protocol),  # called as a class would be
        ws="none",
        h11_max_incomplete_event_size=config.max_header_bytes,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=config.drain_s + LAST_WORDS_S + CUT_OFF_S,
    )


def _ignored(_number: int, _frame: FrameType | None) -> None:
    """Take a signal that was obeyed already."""


def run(options: Mapping[str, Any]) -> int:
    """Serve until a signal or the engine's death; give the exit status: 1 when the engine died."""
    engine = Engine(**options)
    config = engine.config.options.server
    log = set_up_logs(config.log_format)
    sys.setswitchinterval(SWITCH_S)
    try:
        engine.grammars.warm()
        app = create_app(engine, config)
        server = DrainingServer(uvicorn_config(app, config), app.state.service)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _ignored)  # uvicorn raises what it caught once more after its own clean end
        server.run()
        return 1 if server.has_died or not server.started else 0
    finally:
        engine.close()
        log.finish()
