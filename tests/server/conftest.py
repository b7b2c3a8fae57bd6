"""One tiny engine for the server's tests."""

from __future__ import annotations

import pytest

from radixrt.engine import Engine
from tests.support.models import tiny_model
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny_model(
        "llama",
        tmp_path_factory.mktemp("models") / "tiny",
        tokenizer=byte_tokenizer(chat=True, extra=JSON_MERGES),
        max_position_embeddings=2048,
    )


@pytest.fixture(scope="session")
def engine(model_folder):
    with Engine(
        model_folder, device="cpu", dtype="float32", kernels="torch", num_pages=2048, seed=7, checks="step"
    ) as engine:
        yield engine
        engine.check()
