"""A crash of the grammar engine's library: one 400, and everybody else goes on."""

import asyncio
import json
import os

import pytest

from radixrt import Engine, GrammarSpec, SamplingParams
from tests.grammar.test_worker import ACCIDENTS
from tests.support.asking import run
from tests.support.models import tiny_model


@pytest.fixture
def engine(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(ACCIDENTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    folder = tiny_model("llama", tmp_path / "tiny")
    with Engine(folder, dtype="float32", checks="step", num_pages=400, threads=1) as engine:
        yield engine


def test_a_crash_in_the_engines_library_costs_one_400(engine):
    crashing = {"enum": ["please abort", 7]}
    fine = {"type": "integer", "minimum": 0, "maximum": 99}

    async def work(http):
        def ask(schema):
            body = {"model": "tiny", "prompt": "x", "max_tokens": 24, "structured_outputs": {"json": schema}}
            return http.post("/v1/completions", json=body)

        neighbours = [ask({**fine, "title": str(number)}) for number in range(4)]
        answers = await asyncio.gather(ask(crashing), ask(crashing), *neighbours)
        return answers, await ask(fine)

    (first, second, *neighbours), after = run(engine, work)
    for response in (first, second):
        assert response.status_code == 400
        assert "SIGABRT" in response.json()["error"]["message"]
    for response in (*neighbours, after):
        assert response.status_code == 200, response.text
        assert 0 <= json.loads(response.json()["choices"][0]["text"]) <= 99
    engine.check()
    assert engine.generate("x", SamplingParams(max_tokens=8, grammar=GrammarSpec.choice(["a"]))).text == "a"
