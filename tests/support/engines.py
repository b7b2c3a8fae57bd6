"""Engines on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radixrt import Engine


@contextmanager
def tiny_engine(folder: Path, **options: Any) -> Iterator[Engine]:
    """Run an engine that checks itself at every step; at the end it must hold nothing of any request."""
    with Engine(
        folder, **{"dtype": "float32", "checks": "step", "num_pages": 400, "threads": 1, **options}
    ) as engine:
        yield engine
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        engine.clear_cache()
        cache = engine.stats().cache
        assert cache.num_free_pages == cache.num_pages
