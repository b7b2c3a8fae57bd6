"""The grammar benchmark and the commands that need no model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from radixrt.bench.grammar import find_data, measure, report
from radixrt.bench.grammar_extremes import HOSTILE
from radixrt.bench.grammar_xgrammar import has_xgrammar
from radixrt.cli_grammar import grammar_app
from radixrt.errors import InvalidRequest
from radixrt.grammar.probe import byte_tokenizer

SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "null"}, {"type": "object", "not": {"required": ["b"]}}]},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
]  # fmt: skip
GROUP = {
    "description": "g",
    "schema": {"not": {"type": "string"}},
    "tests": [
        {"description": "t", "data": 1, "valid": True},
        {"description": "f", "data": "a", "valid": False},
    ],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "jsonschemabench").mkdir()
    (tmp_path / "json_schema_suite").mkdir()
    lines = [json.dumps({"id": str(number), "schema": schema}) for number, schema in enumerate(SCHEMAS)]
    (tmp_path / "jsonschemabench" / "some.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "json_schema_suite" / "not.json").write_text(json.dumps([GROUP]), encoding="utf-8")
    return tmp_path


def test_all_arms_are_measured_in_one_run(data: Path) -> None:
    measured = measure(data, tokenizer=byte_tokenizer())
    ours, engine = measured["arms"]["radixrt"], measured["arms"]["llguidance"]
    assert ours["schemas"]["coverage"] == pytest.approx(2 / 3)
    assert ours["schemas"]["refused"] == {"uniqueItems": 1}
    assert ours["schemas"]["valid_completions"] == ours["schemas"]["completions"]
    assert ours["suite"] == {
        "exact_groups": 1, "refused_groups": 0, "refused": {}, "invalid_accepted": 0, "valid_rejected": 0,
    }  # fmt: skip
    assert engine["schemas"]["coverage"] < ours["schemas"]["coverage"]
    checked = measured["arms"]["radixrt-check"]
    assert checked["schemas"]["coverage"] == 1
    assert checked["schemas"]["valid_completions"] == checked["schemas"]["completions"] == 3
    arms = {"radixrt", "radixrt-check", "llguidance", "outlines-core"}
    assert set(measured["arms"]) == (arms | {"xgrammar"} if has_xgrammar() else arms)
    assert ours["first_compile_ms"] > 0
    assert 0 < ours["warm_compile_us"]["p50"] < 1e3 * ours["schemas"]["compile_ms"]["p50"]
    assert ours["hostile"]["worst_ms"] == max(ours["hostile"]["masks_ms"].values())
    assert not ours["hostile"]["refused"]
    assert {*ours["hostile"]["masks_ms"]} == {*HOSTILE}
    assert {*engine["hostile"]["masks_ms"], *engine["hostile"]["refused"]} < {*HOSTILE}
    text = report(measured)
    assert "66.7%" in text
    assert "uniqueItems 1" in text


def test_columns_stand_apart_and_numbers_are_plain(data: Path) -> None:
    measured = measure(data, tokenizer=byte_tokenizer(), only=["radixrt", "llguidance"])
    for arm in measured["arms"].values():
        arm["schemas"]["compile_ms"] = {"p50": 5.1134, "p95": 22.61, "p99": 99.0, "max": 13742.2}
    lines = report(measured).splitlines()
    [line] = [line for line in lines if line.startswith("compile ms")]
    assert re.split(r" {3,}", line)[1:] == ["5.11 / 22.6 / 13742"] * 2
    ends = [lines[2].index(name) + len(name) for name in measured["arms"]]
    assert all(line[end : end + 3] in ("   ", "") for line in lines[3:17] for end in ends), (
        "the columns are right-aligned"
    )


def test_one_arm_can_be_measured_alone(data: Path) -> None:
    measured = measure(data, tokenizer=byte_tokenizer(), only=["radixrt-check"])
    assert set(measured["arms"]) == {"radixrt-check"}
    with pytest.raises(InvalidRequest, match="there is no arm 'other'"):
        measure(data, tokenizer=byte_tokenizer(), only=["other"])


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="data"):
        find_data(tmp_path)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMAS[0]), encoding="utf-8")
    return path


def test_check_tells_how_keywords_are_enforced_and_judges_a_value(schema: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"a": 1}', encoding="utf-8")
    bad.write_text('{"a": "x"}', encoding="utf-8")
    runner = CliRunner()
    found = runner.invoke(grammar_app, ["check", str(schema), "--instance", str(good), "--json"])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.output)
    assert answer["accepted"]
    assert answer["valid"]
    assert answer["keywords"]["/required"] == "mask"
    assert runner.invoke(grammar_app, ["check", str(schema), "--instance", str(bad)]).exit_code == 1


def test_check_names_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMAS[2]), encoding="utf-8")
    found = CliRunner().invoke(grammar_app, ["check", str(path), "--json"])
    assert found.exit_code == 1
    assert json.loads(found.output)["parameter"] == "/uniqueItems"


def test_check_warns_of_words_that_no_draft_knows(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"properties": {"a/b": {"minimun": 3, "x-order": 1}}}), encoding="utf-8")
    found = CliRunner().invoke(grammar_app, ["check", str(path), "--json"])
    [warning] = json.loads(found.output)["warnings"]
    assert '"minimun" at /properties/a~1b/minimun' in warning
    assert 'Did you mean "minimum"?' in warning
    assert "warning: no draft knows" in CliRunner().invoke(grammar_app, ["check", str(path)]).output


def test_check_mode_judges_the_value(tmp_path: Path) -> None:
    schema, twice = tmp_path / "schema.json", tmp_path / "twice.json"
    schema.write_text(json.dumps(SCHEMAS[2]), encoding="utf-8")
    twice.write_text('["a", "a"]', encoding="utf-8")
    options = ["--on-unsupported", "check", "--instance", str(twice), "--json"]
    found = CliRunner().invoke(grammar_app, ["check", str(schema), *options])
    assert found.exit_code == 1
    answer = json.loads(found.output)
    assert answer["keywords"]["/uniqueItems"] == "checked"
    assert answer["accepted"]
    assert not answer["valid"]


def test_check_takes_gbnf(tmp_path: Path) -> None:
    grammar, text = tmp_path / "list.gbnf", tmp_path / "text"
    grammar.write_text('root ::= [a-z]+ ("," [a-z]+)*', encoding="utf-8")
    text.write_text("ab,c", encoding="utf-8")
    found = CliRunner().invoke(grammar_app, ["check", str(grammar), "--instance", str(text), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["accepted"]


def test_sample_prints_valid_texts(schema: Path) -> None:
    found = CliRunner().invoke(grammar_app, ["sample", str(schema), "-n", "4"])
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert len(lines) == 4
    assert all(isinstance(json.loads(line)["a"], int) for line in lines)


def test_explain_says_why_a_token_may_not_come(schema: Path) -> None:
    found = CliRunner().invoke(grammar_app, ["explain", str(schema), "--text", '{"a":1', "--token", "x"])
    assert found.exit_code == 0, found.output
    assert "cannot come next" in found.output
    assert "tokens may follow" in found.output
