"""Every example runs on the small default model and does what its first line says."""

import importlib.util
from pathlib import Path

import pytest

from radixrt import Engine

pytestmark = pytest.mark.model
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def engine():
    with Engine("smollm2-135m") as engine:
        yield engine


def run_example(name, engine):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.main(engine)


def test_every_example_has_a_test():
    tested = {name.removeprefix("test_the_").removesuffix("_example") for name in globals()}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


def test_the_hello_example(engine, capsys):
    _, result = run_example("hello", engine)
    assert "Paris" in result["answer"]
    assert "Paris" in capsys.readouterr().out


def test_the_chat_example(engine, capsys):
    module, result = run_example("chat", engine)
    assert len(result.value) == len(module.QUESTIONS)
    for earlier, later in zip(result.calls, result.calls[1:], strict=False):
        # All that an earlier turn computed is there; its last token was sampled but never computed.
        assert later.cached_tokens >= earlier.prompt_tokens + earlier.output_tokens - 1
    assert "total" in capsys.readouterr().out


def test_the_few_shot_example(engine):
    module, outcomes = run_example("few_shot", engine)
    results = [outcome.unwrap() for outcome in outcomes]
    assert [result["number"] for result in results][:2] == ["8.", "30."]
    shared = len(engine.tokenizer.encode(results[0].text().split(module.QUESTIONS[0])[0]))
    firsts = [result.calls[0] for result in results]
    assert sum(call.cached_tokens >= shared - 1 for call in firsts) >= len(firsts) - 1


def test_the_json_extract_example(engine):
    module, result = run_example("json_extract", engine)
    assert isinstance(result.value, module.Order)
    assert result["order"] == module.Order.model_validate_json(result.calls[0].text)
    assert result.usage.forced_tokens >= 0


def test_the_judge_example(engine):
    module, result = run_example("judge", engine)
    assert list(result.value) == module.DIMENSIONS
    assert result["verdict"] in ("good", "bad")
    assert sum(result.record("verdict").distribution.values()) == pytest.approx(1.0)
    assert [call.branch for call in result.calls] == ["root/0", "root/1", "root/2", "root"]
