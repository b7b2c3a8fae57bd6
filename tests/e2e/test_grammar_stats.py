"""What the engine tells about constraints: compilations, masks, removed probability, dead ends, retries."""

import pytest

from radixrt import GrammarDeadEnd, GrammarSpec, SamplingParams, UnsupportedGrammar
from tests.support.engines import tiny_engine


@pytest.fixture
def engine(folder):
    with tiny_engine(folder) as engine:
        yield engine


def grammar_stats(engine):
    return engine.stats().grammar


def test_compilations_are_counted(engine):
    for spec in (GrammarSpec.regex("[ab]{3}"), GrammarSpec.regex("[ab]{3}"), GrammarSpec.choice(["a", "b"])):
        engine.generate("x", SamplingParams(max_tokens=8, grammar=spec))
    for _ in range(2):
        with pytest.raises(UnsupportedGrammar):
            engine.generate("x", SamplingParams(grammar=GrammarSpec.json_schema(False)))
    found = grammar_stats(engine).compilations
    assert (found.num_cached, found.num_compiled, found.num_refused) == (2, 2, 1)
    assert sum(found.compile_s.counts) == 3
    assert found.num_entries == 3
    assert 0 < found.num_bytes <= engine.grammars.num_bytes  # masks were filled since


def test_every_sampled_token_has_a_mask_and_the_first_and_one_in_16_are_measured(engine):
    sampling = SamplingParams(max_tokens=40, seed=1, n=8, grammar=GrammarSpec.regex("[ab]{40}"))
    output = engine.generate("x", sampling)
    found = grammar_stats(engine)
    assert found.num_masks == sum(len(sample.token_ids) for sample in output.samples) == 320
    assert sum(found.mask_s.counts) == 320
    assert found.num_measured == 8 * (4 + 2)  # of each sample the tokens 0 to 3, 16 and 32
    assert 0.5 < found.removed_probability < 1.0  # 2 of 259 tokens are left


def test_a_mask_of_everything_removes_next_to_nothing(engine):
    free = "(?s:.)*"
    sampling = SamplingParams(max_tokens=40, seed=1, n=4, grammar=GrammarSpec.regex(free), ignore_eos=True)
    engine.generate("x", sampling)
    found = grammar_stats(engine)
    assert found.num_measured > 0
    assert found.removed_probability < 0.9


def test_plain_requests_have_none(engine):
    engine.generate("x", SamplingParams(max_tokens=8, ignore_eos=True))
    found = grammar_stats(engine)
    assert (found.num_masks, found.num_measured, found.num_dead_ends) == (0, 0, 0)


def test_dead_ends_and_retries_are_counted(engine):
    schema = {"type": "array", "items": {"type": "string", "maxLength": 1}, "minItems": 2, "maxItems": 2}
    schema |= {"uniqueItems": True, "contains": {"pattern": "(?<=x)y"}}
    grammar = GrammarSpec.json_schema(schema, on_unsupported="check")
    with pytest.raises(GrammarDeadEnd):
        engine.generate("x", SamplingParams(max_tokens=40, seed=1, grammar=grammar))
    found = grammar_stats(engine)
    assert found.num_dead_ends == 1
    assert found.num_retries == 8


def test_a_failing_forward_does_not_leave_masks_behind(engine, monkeypatch):
    """The masks of a step are filled beside its forward pass: when that fails, they are waited for."""
    grammar = GrammarSpec.regex("[ab]{8}")

    def fail(*_, **__):
        raise RuntimeError("no device")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._runner.model), "predict", fail)
        with pytest.raises(Exception, match="no device"):
            engine.generate("x", SamplingParams(max_tokens=8, grammar=grammar))
    assert len(engine.generate("x", SamplingParams(max_tokens=8, grammar=grammar)).token_ids) == 8
    engine.check()
