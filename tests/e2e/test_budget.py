"""A constrained answer is complete within max_tokens, or the request is refused with the number it needs."""

import json
import re

import jsonschema
import pytest

from radixrt import FinishReason, GrammarSpec, InvalidRequest, SamplingParams, StructuralTag
from radixrt.grammar import compile
from radixrt.grammar.vocabulary import GrammarVocabulary
from tests.support.tokenizers import byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "mood": {"enum": ["happy", "sad"]},
        "score": {"type": "number"},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "mood", "score", "ok"],
    "additionalProperties": False,
}


def smallest(engine, grammar):
    """The number that the refusal names."""
    with pytest.raises(InvalidRequest, match="max_tokens must be at least") as caught:
        engine.generate("x", SamplingParams(max_tokens=1, grammar=grammar))
    assert caught.value.parameter == "max_tokens"
    return int(re.search(r"at least (\d+)", str(caught.value))[1])


def test_object_is_complete_at_every_budget(engine):
    grammar = GrammarSpec.json_schema(SCHEMA)
    needed = smallest(engine, grammar)
    for max_tokens in range(needed, needed + 40, 3):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=2.0, seed=max_tokens, grammar=grammar)
        outputs = engine.generate([f"prompt {index}" for index in range(4)], sampling)
        for output in outputs:
            jsonschema.validate(json.loads(output.text), SCHEMA)
            assert output.finish_reason is FinishReason.STOP
            assert len(output.token_ids) <= max_tokens


@pytest.mark.parametrize("pattern", ["a{3,40}b", "(x|yy)+(end|stop)", "[0-9]{2}:[0-9]{2}( pm)?"])
def test_regex_is_complete_at_every_budget(engine, pattern):
    grammar = GrammarSpec.regex(pattern)
    needed = smallest(engine, grammar)
    for max_tokens in range(needed, needed + 12):
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=5.0, seed=max_tokens, grammar=grammar, n=3
        )
        for sample in engine.generate("x", sampling).samples:
            assert re.fullmatch(pattern, sample.text)
            assert sample.finish_reason is FinishReason.STOP


def test_closing_tokens_have_logprobs_too(engine):
    grammar = GrammarSpec.regex("[a-z]{4,60};end")
    sampling = SamplingParams(max_tokens=10, temperature=1.0, seed=3, grammar=grammar, logprobs=1)
    output = engine.generate("x", sampling)
    assert re.fullmatch("[a-z]{4,60};end", output.text)
    assert [item.token_id for item in output.logprobs] == list(output.token_ids)


@pytest.mark.parametrize("pattern", ["[a-z]+e", "(ab|cd)+e{3}", "[0-9]+ euros"])
def test_a_token_that_gives_way_has_its_logprob(engine, pattern):
    grammar = GrammarSpec.regex(pattern)
    needed = smallest(engine, grammar)
    for seed in range(8):
        sampling = SamplingParams(
            max_tokens=needed + 3, temperature=5.0, logprobs=1, seed=seed, grammar=grammar
        )
        output = engine.generate("abc", sampling)
        assert re.fullmatch(pattern, output.text)
        assert [item.token_id for item in output.logprobs] == list(output.token_ids)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[0-9]+ euros$"},
        {"type": "string", "pattern": r"^v[0-9]+\.[0-9]+$"},
        {"type": "string", "format": "email"},
        {"type": "integer", "multipleOf": 7, "minimum": 1000},
        {
            "$ref": "#/$defs/list",
            "$defs": {
                "list": {
                    "type": "object",
                    "properties": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]}},
                    "required": ["n"],
                    "additionalProperties": False,
                }
            },
        },
    ],
)
def test_everyday_constraints_find_their_end(engine, schema):
    grammar = GrammarSpec.json_schema(schema)
    sampling = SamplingParams(max_tokens=60, temperature=2.0, seed=4, grammar=grammar)
    output = engine.generate("x", sampling)
    assert output.finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(output.text), schema)


def test_tagged_text_is_complete_at_every_budget(engine):
    schema = {k: SCHEMA[k] for k in ("type", "properties", "required", "additionalProperties")}
    tag = StructuralTag("<|call|>", GrammarSpec.json_schema(schema), "</call>")
    grammar = GrammarSpec.structural([tag], triggers=["<|call|>"], min_tags=1, max_tags=1)
    needed = smallest(engine, grammar)
    for max_tokens in range(needed, needed + 40, 8):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=2.0, seed=max_tokens, grammar=grammar)
        output = engine.generate("x", sampling)
        free, _, rest = output.text.partition("<|call|>")
        content, _, after = rest.partition("</call>")
        jsonschema.validate(json.loads(content), schema)
        assert "<|call|>" not in free + after
        assert output.finish_reason in (
            FinishReason.STOP,
            FinishReason.LENGTH,
        )  # free text may go on to the end


def test_control_tokens_come_out_as_ids(engine):
    name = engine.tokenizer.token_text(engine.tokenizer.bos_id)
    tag = StructuralTag(name, GrammarSpec.choice(["yes", "no"]), ";")
    grammar = GrammarSpec.structural([tag], triggers=(), free_text=False, min_tags=1, max_tags=2)
    output = engine.generate("x", SamplingParams(max_tokens=20, temperature=1.0, seed=1, grammar=grammar))
    assert output.token_ids[0] == engine.tokenizer.bos_id
    assert re.fullmatch("((yes|no);){1,2}", output.text)
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    "text", ['root ::= [a-z]+ "end"', 'root ::= "(" root ")" | "x"', "root ::= ([0-9] [a-c])+ [.]"]
)
def test_ebnf_is_complete_at_every_budget(engine, text):
    grammar = GrammarSpec.ebnf(text)
    matcher = compile(grammar, engine.tokenizer)
    for max_tokens in range(4, 30, 5):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=5.0, seed=max_tokens, grammar=grammar)
        output = engine.generate("x", sampling)
        assert matcher.check(output.text)
        assert output.finish_reason is FinishReason.STOP


def test_without_a_known_end_the_answer_may_be_cut_off_but_comes(engine, monkeypatch):
    monkeypatch.setattr("radixrt.grammar.closing.Closer.run", lambda *_, **__: None)
    grammar = GrammarSpec.json_schema({"type": "string", "minLength": 30})
    output = engine.generate("x", SamplingParams(max_tokens=5, temperature=1.0, seed=1, grammar=grammar))
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == 5


@pytest.mark.parametrize(
    ("run", "token", "rests"),
    [
        (['""', ","], '"', ['",', '",']),  # the token began what the run's first token closes
        (['""', ","], "A", ['",']),
        (["[]", ","], "[", ["],", "],"]),
        (['"', ":", "1"], '":', ["1"]),  # the token took several of the run
        (['"', ","], "A", []),  # the run itself may still do
    ],
)
def test_what_would_have_ended_a_text_is_tried_after_a_token(run, token, rests):
    vocabulary = GrammarVocabulary(byte_tokenizer(extra=('""', "[]", '":')))
    ids = {data: token_id for token_id, data in enumerate(vocabulary.vocab_bytes)}
    found = vocabulary.rests_of([ids[item.encode()] for item in run], ids[token.encode()])
    texts = [b"".join(vocabulary.vocab_bytes[item] for item in rest).decode() for rest in found]
    assert texts == rests
