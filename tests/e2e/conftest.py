"""One tiny model for the tests of whole engines, and an engine for each module; some bring their own."""

from __future__ import annotations

import pytest

from tests.support.engines import tiny_engine
from tests.support.models import tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def engine(folder):
    with tiny_engine(folder) as engine:
        yield engine
