"""Forced runs save passes and change nothing."""

import pytest

from radixrt import GrammarSpec, SamplingParams, StructuralTag
from radixrt.bench.grammar_model import SCHEMA, measure_model, report_model
from tests.support.engines import tiny_engine

GRAMMARS = {
    "object": GrammarSpec.json_schema(SCHEMA),
    "choice": GrammarSpec.choice(["the name is Ann", "the name is Bob"]),
    "lark": GrammarSpec.lark('start: "begin " ("one" | "two") " end"'),
    "ebnf": GrammarSpec.ebnf('root ::= "begin " [a-c]{2} " end"'),
    "tags": GrammarSpec.structural(
        [StructuralTag("<call>", GrammarSpec.json_schema(SCHEMA), "</call>")],
        triggers=["<call>"],
        free_text=False,
        min_tags=1,
        max_tags=1,
    ),
}


@pytest.fixture(scope="module")
def engines(folder):
    with tiny_engine(folder) as one, tiny_engine(folder, forced_runs=False) as other:
        yield one, other


@pytest.mark.parametrize("name", GRAMMARS)
def test_greedy_answers_are_the_same_without_them(engines, name):
    on, off = engines
    sampling = SamplingParams(max_tokens=150, temperature=0, grammar=GRAMMARS[name])
    for number in range(4):
        with_runs = on.generate(f"prompt {number}", sampling)
        without = off.generate(f"prompt {number}", sampling)
        assert without.text == with_runs.text
        assert with_runs.usage.forced_tokens > without.usage.forced_tokens
        assert with_runs.usage.computed_tokens <= without.usage.computed_tokens + 1


def test_they_save_passes(engines):
    on, off = engines
    sampling = SamplingParams(max_tokens=150, temperature=1.0, seed=1, grammar=GRAMMARS["object"])
    counts = []
    for engine in (on, off):
        before = engine.stats().num_steps
        output = engine.generate("x", sampling)
        counts.append((engine.stats().num_steps - before) / len(output.token_ids))
    assert counts[0] < 0.75 * counts[1]


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_completes_every_answer():
    measured = measure_model("smollm2-135m", budget_step=16, num_prompts=16)
    assert "forward passes per token" in report_model(measured)
    budgets = measured["budgets"]
    assert budgets["valid"] == budgets["answers"] > 0
    assert budgets["cut_off"] == budgets["over_budget"] == 0
    assert measured["forced_runs"]["equal_share"] >= 0.99
    assert measured["forced_runs"]["valid_share"] == 1
    assert measured["passes"]["none"]["passes_per_token"] <= 0.70
