"""`radixrt bench serve` on a tiny model: it measures what it says."""

import pytest

from radixrt.bench import serve
from tests.support.models import tiny_model
from tests.support.servers import ROOT


@pytest.mark.slow
def test_the_figures_are_there_and_add_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.setattr(serve, "NUM_BLOCKS", 2)
    folder = tiny_model("llama", tmp_path / "tiny", max_position_embeddings=2048)
    measured = serve.measure({"model": str(folder), "device": "cpu", "kernels": "torch", "num_pages": 1024})
    assert measured["chat_overhead_ms"] == measured["chat_p50_ms"] - measured["engine_chat_p50_ms"]
    assert 0 < measured["cpu_ms_per_token"] < 100
    assert measured["num_events"] > serve.NUM_STREAMS
    assert "ms of the event loop's CPU" in serve.report(measured)
