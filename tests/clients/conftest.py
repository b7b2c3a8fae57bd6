"""A real server process with the small default model, for real clients."""

from __future__ import annotations

import pytest

from tests.support.servers import served


@pytest.fixture(scope="session")
def server():
    """Give the URL of a server with the default model and a key."""
    with served("smollm2-135m", "--api-keys", "me=test-key-1", "--num-pages", "1024") as (url, _):
        yield url
