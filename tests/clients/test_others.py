"""Other people's clients against a real server, each in an environment of its own from PyPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixrt.config import home_folder
from radixrt.model.catalog import load_tokenizer, resolve
from tests.support.models import oracle
from tests.support.servers import served

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1800)]

MODEL, KEY = "smollm2-135m", "test-key-1"
SCRIPTS = Path(__file__).parent / "others"
ENVIRONMENTS = {
    "openai 3": ("instructor", "langchain-openai", "pydantic-ai-slim[openai]", "outlines[openai]", "llm"),
    "openai 2": ("litellm", "dspy", "openai<3"),
    "guidance": ("guidance", "openai"),
    "lm-eval": ("lm-eval[api]",),
}
CLIENTS = {
    "instructor": "openai 3",
    "langchain": "openai 3",
    "pydantic_ai": "openai 3",
    "outlines": "openai 3",
    "llm": "openai 3",
    "litellm": "openai 2",
    "dspy": "openai 2",
    "guidance": "guidance",
}
ITEMS = [
    (context, continuation)
    for context in (
        "The capital of France is",
        "Water boils at",
        "1, 1, 2, 3, 5, 8,",
        "def f(x):\n    return",
        "Der schnelle braune",
    )
    for continuation in (" Paris", " 100 degrees", " 13", " Fuchs springt \u00fcber")
]


@pytest.fixture(scope="session")
def python_of(tmp_path_factory):
    """Give a function from an environment's name to its Python; made when first asked for."""
    made = {}

    def find(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("environments") / name.replace(" ", "-")
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *ENVIRONMENTS[name]]
            subprocess.run(command, check=True, timeout=1200)
            made[name] = folder / "bin" / "python"
        return made[name]

    return find


def run_script(python, name, url, *, given=""):
    command = [str(python), str(SCRIPTS / f"{name}_client.py"), url, KEY, MODEL]
    ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_works(server, python_of, name):
    run_script(python_of(CLIENTS[name]), name, server)


def test_lm_evals_loglikelihoods_are_transformers(python_of):
    options = ("--api-keys", f"me={KEY}", "--num-pages", "1024", "--dtype", "float32")
    with served(MODEL, *options) as (url, _):
        written = run_script(python_of("lm-eval"), "lm_eval", url, given=json.dumps(ITEMS))
    [line] = [line for line in written.splitlines() if line.startswith("RESULT")]
    found = json.loads(line.removeprefix("RESULT"))
    assert len(found) == len(ITEMS) == 20
    folder = resolve(MODEL, home=home_folder())
    model, tokenizer = oracle(folder), load_tokenizer(MODEL)
    for (context, continuation), (value, is_greedy) in zip(ITEMS, found, strict=True):
        num_context = len(tokenizer.encode(context, add_special_tokens=False))
        ids = tokenizer.encode(context + continuation, add_special_tokens=False)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        rows = range(num_context - 1, len(ids) - 1)
        expected = sum(logprobs[row, ids[row + 1]].item() for row in rows)
        assert value == pytest.approx(expected, abs=1e-3), (context, continuation)
        assert is_greedy == all(logprobs[row].argmax().item() == ids[row + 1] for row in rows)
