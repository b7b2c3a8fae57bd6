"""on_unsupported="check": what masks cannot enforce is checked on the finished value, and failures are sampled anew."""

import json
import random

import jsonschema
import pytest

from radixrt import (
    Engine,
    FinishReason,
    GrammarDeadEnd,
    GrammarSpec,
    InvalidRequest,
    SamplingParams,
    UnsupportedGrammar,
)
from radixrt.grammar import GrammarCache
from tests.support.models import tiny_model

LETTERS = {"type": "string", "pattern": "^[a-d]{1,2}$"}
DISTINCT = {"type": "array", "items": LETTERS, "minItems": 2, "maxItems": 5, "uniqueItems": True}
SCHEMAS = {
    "distinct": DISTINCT,
    "nested": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "d": DISTINCT},
        "required": ["x", "d"],
        "additionalProperties": False,
    },
    "look-behind": {"type": "string", "pattern": "^[ab]{1,5}$", "allOf": [{"pattern": "(?<=b)$"}]},
    "word": {"type": "string", "pattern": "^[ab ]{1,6}$", "allOf": [{"pattern": "\\bb\\b"}]},
    "one of": {
        "oneOf": [
            {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
            {"type": "array", "items": {"enum": [2, 3]}, "maxItems": 3, "contains": {"const": 3}},
        ]
    },
}


def checked(schema):
    return GrammarSpec.json_schema(schema, on_unsupported="check")


@pytest.mark.parametrize("name", SCHEMAS)
def test_is_refused_without_check(engine, name):
    with pytest.raises(UnsupportedGrammar):
        engine.generate("x", SamplingParams(grammar=GrammarSpec.json_schema(SCHEMAS[name])))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_result_is_valid_or_an_error(engine, name, temperature):
    grammar = checked(SCHEMAS[name])
    num_valid = 0
    for seed in range(12):
        sampling = SamplingParams(max_tokens=60, temperature=temperature, seed=seed, grammar=grammar)
        try:
            output = engine.generate(f"prompt {seed % 3}", sampling)
        except GrammarDeadEnd:
            continue
        jsonschema.validate(json.loads(output.text), SCHEMAS[name])
        assert output.finish_reason is FinishReason.STOP
        assert len(output.token_ids) <= 60
        assert output.usage.forced_tokens <= output.usage.output_tokens
        num_valid += 1
    assert num_valid >= 6
    engine.check()


def test_retries_do_happen(engine, monkeypatch):
    """Without them some of these answers would not be valid."""
    num_failures = []
    check = type(engine.grammars.get(checked(DISTINCT))).check
    monkeypatch.setattr(
        "radixrt.grammar.engines.llg.LLGrammar.check",
        lambda self, text: check(self, text) or bool(num_failures.append(text)),
    )
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=3, grammar=checked(DISTINCT), n=16)
    output = engine.generate("x", sampling)
    assert num_failures
    for sample in output.samples:
        jsonschema.validate(json.loads(sample.text), DISTINCT)


def test_the_others_are_not_disturbed(engine):
    plain = SamplingParams(max_tokens=24, temperature=0)
    alone = [engine.generate(f"another {number}", plain).token_ids for number in range(4)]
    mixed = [SamplingParams(max_tokens=60, temperature=1.0, seed=number, grammar=checked(DISTINCT)) for number in range(4)]  # fmt: skip
    prompts = [item for number in range(4) for item in (f"another {number}", f"prompt {number}")]
    params = [item for sampling in mixed for item in (plain, sampling)]
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs[::2]] == alone
    for output in outputs[1::2]:
        jsonschema.validate(json.loads(output.text), DISTINCT)
    engine.check()
    assert engine.stats().num_running == 0


def test_the_same_seed_gives_the_same_answer(engine):
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=3, grammar=checked(DISTINCT), n=8)
    first = engine.generate("x", sampling)
    engine.clear_cache()
    again = engine.generate(["x", "y"], sampling)[0]
    assert [sample.text for sample in again.samples] == [sample.text for sample in first.samples]


def test_nothing_is_streamed_before_it_is_valid(engine):
    chunks = list(engine.stream("x", SamplingParams(max_tokens=60, seed=1, grammar=checked(DISTINCT))))
    assert len([chunk for chunk in chunks if chunk.token_ids]) == 1
    jsonschema.validate(json.loads("".join(chunk.text for chunk in chunks)), DISTINCT)


def test_what_masks_can_enforce_is_streamed_as_ever(engine):
    grammar = checked({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3})
    chunks = list(engine.stream("x", SamplingParams(max_tokens=60, seed=1, grammar=grammar)))
    assert len([chunk for chunk in chunks if chunk.token_ids]) > 1


def test_logprobs_belong_to_the_tokens_that_stayed(engine):
    sampling = SamplingParams(
        max_tokens=60, temperature=1.0, seed=3, grammar=checked(DISTINCT), n=8, logprobs=1
    )
    for sample in engine.generate("x", sampling).samples:
        jsonschema.validate(json.loads(sample.text), DISTINCT)
        assert [item.token_id for item in sample.logprobs] == list(sample.token_ids)


@pytest.mark.parametrize("options", [{"prefix_cache": False}, {"page_size": 1}, {"page_size": 16}])
def test_the_cache_does_not_matter(engine, tmp_path, options):
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=3, grammar=checked(DISTINCT), n=6)
    expected = [sample.text for sample in engine.generate("x", sampling).samples]
    folder = tiny_model("llama", tmp_path / "tiny")
    with Engine(folder, dtype="float32", checks="step", num_pages=400, threads=1, **options) as other:
        assert [sample.text for sample in other.generate("x", sampling).samples] == expected


def test_a_schema_that_nothing_satisfies_is_a_clear_error(engine):
    schema = {"type": "array", "items": {"type": "string", "maxLength": 1}, "minItems": 2, "maxItems": 3}
    impossible = {**schema, "uniqueItems": True, "allOf": [{"items": {"pattern": "(?<=x)$"}}, {"items": {"pattern": "^y(?<=y)"}}]}  # fmt: skip
    with pytest.raises(GrammarDeadEnd, match="no valid answer was found"):
        engine.generate("x", SamplingParams(max_tokens=40, seed=1, grammar=checked(impossible)))
    engine.check()
    assert engine.generate("x", SamplingParams(max_tokens=3)).usage.output_tokens


def test_a_hostile_pattern_does_not_hang(engine):
    schema = {
        "type": "string",
        "minLength": 40,
        "maxLength": 44,
        "pattern": "^(a|a)*(?<=a)b(?<=c)$|^(a+)+(?<=a)!$",
    }
    sampling = SamplingParams(max_tokens=60, seed=1, grammar=checked(schema), logit_bias={ord("a"): 100.0})
    with pytest.raises(GrammarDeadEnd):
        engine.generate("x", sampling)


def test_a_number_that_cannot_be_judged_ends_its_own_request_only(engine):
    """jsonschema raises for the quotient of a large integer and a fraction."""
    schema = {
        "type": "array",
        "items": {"type": "number", "multipleOf": 0.5},
        "uniqueItems": True,
        "minItems": 1,
    }
    sampling = SamplingParams(
        max_tokens=600, temperature=0, grammar=checked(schema), logit_bias={ord("1"): 100.0}
    )
    alone = engine.generate("other", SamplingParams(max_tokens=24, temperature=0)).token_ids
    failing = engine.submit(engine.request("x", sampling), (failures := []).append)
    assert engine.generate("other", SamplingParams(max_tokens=24, temperature=0)).token_ids == alone
    while not failures:
        engine.check()
    assert isinstance(failures[-1], GrammarDeadEnd), (failing, failures)
    engine.check()
    assert engine.stats().num_running == 0


def test_stop_strings_are_refused(engine):
    with pytest.raises(InvalidRequest, match="stop must be empty") as caught:
        SamplingParams(stop=("a",), grammar=checked(DISTINCT))
    assert caught.value.parameter == "stop"


def test_pages_add_up_after_a_random_mix(engine):
    draw = random.Random(4)
    for _ in range(4):
        params = [
            SamplingParams(
                max_tokens=draw.choice([20, 60]),
                temperature=draw.choice([0.0, 1.0]),
                seed=draw.randrange(100),
                n=draw.choice([1, 3]),
                grammar=draw.choice([None, checked(DISTINCT), GrammarSpec.regex("[ab]{3,9}")]),
            )
            for _ in range(8)
        ]
        engine.generate([f"mix {draw.randrange(4)}" for _ in params], params)
        engine.check()
    assert isinstance(engine.grammars, GrammarCache)
