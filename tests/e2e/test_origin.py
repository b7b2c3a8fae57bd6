"""Every output tells how it came about: which tokens were forced, what masks took away, how long it waited."""

import itertools
import json
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt import GrammarSpec, OutputCollector, SamplingParams
from radixrt.bench.grammar_model import SCHEMA
from radixrt.errors import InvariantViolation
from radixrt.sched.origin import OriginLog
from radixrt.text import Detokenizer
from tests.support.asking import post
from tests.support.engines import tiny_engine
from tests.support.servers import events
from tests.support.simulation import Simulation
from tests.support.threads import begin_together
from tests.support.tokenizers import byte_tokenizer

GRAMMARS = {
    "object": GrammarSpec.json_schema(SCHEMA),
    "choice": GrammarSpec.choice(["der schöne Tag", "der schöne Abend", "日本語"]),
    "checked": GrammarSpec.json_schema(
        {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-d]{1,2}$"},
            "minItems": 3,
            "maxItems": 3,
            "uniqueItems": True,
        },
        on_unsupported="check",
    ),
    "tags": GrammarSpec.regex("<a>[xyé]{3}</a>"),
}


@pytest.fixture(scope="module")
def engine(folder):
    with tiny_engine(folder, max_running=4) as engine:
        yield engine


def check_spans(engine, sample):
    """Check that the spans lie in the sample, and that its text before and in each of them is that of its tokens."""
    last = -1
    for span in sample.origin.forced:
        assert last < span.start < span.stop <= len(sample.token_ids)
        last = span.stop
        assert 0 <= span.text_start <= span.text_stop <= len(sample.text)
        for num_tokens, num_characters in ((span.start, span.text_start), (span.stop, span.text_stop)):
            whole = engine.tokenizer.decode(sample.token_ids[:num_tokens]).rstrip("\ufffd")
            assert sample.text[:num_characters] == whole


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("n", [1, 3])
def test_forced_spans_are_token_exact_and_add_up_to_the_count(engine, name, n):
    for number in range(4):
        sampling = SamplingParams(max_tokens=150, temperature=2.0, seed=number, n=n, grammar=GRAMMARS[name])
        output = engine.generate(f"prompt {number}", sampling)
        for sample in output.samples:
            check_spans(engine, sample)
        spans = [span for sample in output.samples for span in sample.origin.forced]
        assert sum(span.stop - span.start for span in spans) == output.usage.forced_tokens > 0
        assert output.origin is output.samples[0].origin


def test_what_is_written_by_the_schema_is_forced_and_values_are_not(engine):
    schema = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}}, "required": ["name"]}
    grammar = GrammarSpec.json_schema({**schema, "additionalProperties": False}, whitespace="none")
    sample = engine.generate("x", SamplingParams(max_tokens=40, seed=3, grammar=grammar)).samples[0]
    name = json.loads(sample.text)["name"]
    first, second = sample.origin.forced
    assert sample.text[first.text_start : first.text_stop] == '{"name":"'
    assert sample.text[second.text_start : second.text_stop] == name[1:] + '"}'
    assert (first.stop, second.start) == (9, 10)  # a byte is a token here


def test_streamed_chunks_tell_the_same_once_at_the_end_of_each_sample(engine):
    sampling = SamplingParams(max_tokens=150, temperature=2.0, seed=1, n=2, grammar=GRAMMARS["object"])
    whole = engine.generate("x", sampling)
    collector = OutputCollector(whole.prompt_ids, num_samples=2)
    chunks = list(engine.stream("x", sampling))
    for chunk in chunks:
        assert (chunk.origin is not None) == (chunk.finish_reason is not None)
        assert (chunk.queued_s is not None) == (chunk.usage is not None)
        collector.add(chunk)
    assert [sample.origin for sample in collector.output().samples] == [
        sample.origin for sample in whole.samples
    ]


def test_without_a_constraint_nothing_is_forced_or_masked(engine):
    origin = engine.generate("x", SamplingParams(max_tokens=8, ignore_eos=True)).origin
    assert (origin.forced, origin.masked_share, origin.num_measured) == ((), None, 0)


def test_spans_end_where_a_stop_string_cut_the_text(engine):
    grammar = GrammarSpec.regex("[ab]{2}forced text")
    sampling = SamplingParams(max_tokens=40, seed=1, grammar=grammar, stop=("ced t",))
    output = engine.generate("x", sampling)
    assert output.text[2:] == "for"
    (span,) = output.origin.forced
    assert (span.text_start, span.text_stop) == (2, 5)
    assert span.start == 2


def test_the_share_of_masks_is_that_of_the_tokens_that_were_looked_at(engine):
    narrow = engine.generate("x", SamplingParams(max_tokens=3, seed=1, grammar=GrammarSpec.regex("[ab]{3}")))
    assert narrow.origin.num_measured == 3
    assert 0.5 < narrow.origin.masked_share < 1
    free = SamplingParams(max_tokens=24, seed=1, ignore_eos=True, grammar=GrammarSpec.regex("(?s:.)*"))
    wide = engine.generate("x", free).origin
    assert wide.num_measured == 5  # tokens 0 to 3 and 16
    assert wide.masked_share < narrow.origin.masked_share


def test_the_time_in_the_queue_is_until_the_step_that_admits_it():
    simulation = Simulation(max_running=1)
    first = simulation.add([1, 2, 3], max_tokens=3)
    simulation.now_s = 2.0
    second = simulation.add([4, 5, 6], max_tokens=3)
    assert first.origin.queued_s is None
    while second.origin.queued_s is None:
        simulation.step()
        simulation.now_s += 1.0
    assert first.origin.queued_s == 2.0
    assert second.origin.queued_s == simulation.now_s - 1.0 - 2.0 > 0


def test_an_engine_tells_how_long_its_requests_waited(engine, monkeypatch):
    launch, steps = engine._runner.launch, itertools.count()

    def launch_later(plan):
        if next(steps) == 5:
            time.sleep(0.05)
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", launch_later)
    sampling = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    begin_together(engine, 9)
    outputs = engine.generate([f"prompt {number}" for number in range(9)], sampling)  # 4 run at a time
    for output in outputs:
        assert 0 <= output.queued_s <= output.first_token_s <= output.seconds
    assert outputs[-1].queued_s >= 0.05


@pytest.mark.parametrize("stream", [False, True])
def test_the_native_route_tells_it_too(engine, stream):
    expected = engine.generate("x", SamplingParams(max_tokens=60, seed=5, grammar=GRAMMARS["tags"]))
    grammar = {"kind": "regex", "text": GRAMMARS["tags"].text}
    body = {"prompt": "x", "max_tokens": 60, "seed": 5, "grammar": grammar, "stream": stream}
    answer = post(engine, "/generate", body)
    if stream:
        told = [event for event in events(answer.text) if isinstance(event, dict) and "origin" in event]
        (last,) = told
        origin, queued_s = last["origin"], last["queued_s"]
    else:
        origin, queued_s = answer.json()["samples"][0]["origin"], answer.json()["queued_s"]
    assert [(span["start"], span["stop"]) for span in origin["forced"]] == [
        (span.start, span.stop) for span in expected.origin.forced
    ]
    assert origin["masked_share"] == pytest.approx(expected.origin.masked_share, abs=1e-6)
    assert queued_s >= 0


def test_the_log_holds_its_invariants_whatever_is_added_and_taken_back():
    generator = random.Random(7)
    for _ in range(200):
        log, is_forced = OriginLog(), list[bool]()
        for _ in range(20):
            if generator.random() < 0.2:
                num_kept = generator.randint(0, len(is_forced))
                log.cut(num_kept)
                del is_forced[num_kept:]
            elif generator.random() < 0.5:
                num_tokens = generator.randint(0, 3)
                log.add_run(len(is_forced), num_tokens)
                is_forced += [True] * num_tokens
            else:
                is_forced.append(False)
            log.check(len(is_forced))
            told = {place for start, stop in log.runs for place in range(start, stop)}
            assert told == {place for place, forced in enumerate(is_forced) if forced}


def test_the_log_notices_runs_that_cannot_be():
    log = OriginLog()
    log.add_run(2, 3)
    with pytest.raises(InvariantViolation):
        log.check(4)
    log.num_forced = 2
    with pytest.raises(InvariantViolation):
        log.check(9)


@given(st.lists(st.integers(0, 255), max_size=20), st.lists(st.integers(0, 20), max_size=4))
def test_places_in_the_text_count_whole_characters(token_ids, places):
    tokenizer = byte_tokenizer()
    places = sorted(min(place, len(token_ids)) for place in places)
    ends = Detokenizer(tokenizer).text_ends(token_ids, places)
    for place, end in zip(places, ends, strict=True):
        detokenizer = Detokenizer(tokenizer)
        assert end == len(detokenizer.push(token_ids[:place]).text)
