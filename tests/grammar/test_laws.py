"""Laws that hold for every engine, along random walks over small vocabularies."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import numpy as np
import pytest

from radixrt.constraints import GrammarSpec, StructuralTag
from radixrt.grammar import CompiledGrammar, GrammarMatcher, compile
from radixrt.text import Tokenizer
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer, sentencepiece_tokenizer

TOKENIZERS = {
    "byte": byte_tokenizer(extra=JSON_MERGES),
    "sentencepiece": sentencepiece_tokenizer(extra=JSON_MERGES),
}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["é", "日本", "ab"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

# Masks allow any items; whether they are distinct is seen at the end.
CHECKED = {
    "type": "array",
    "items": {"type": "string", "pattern": r"^[\d\w]{1,2}$"},
    "uniqueItems": True,
    "maxItems": 3,
}

SPECS = {
    "choice": GrammarSpec.choice(["yes", "no", "yes!", "日本語", "日本", "🙂", "🙃", 'a"', 'a",']),
    "forced choice": GrammarSpec.choice(["the name is 日本", "the name is 日語"]),
    "date": GrammarSpec.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "any character": GrammarSpec.regex(".{1,3}"),
    "after accepting": GrammarSpec.regex(".*"),
    "alternatives": GrammarSpec.regex("(a|ab)(c|bcd)d*"),
    "large regex": GrammarSpec.regex("[a-c]{1,30}(é|日){1,30}"),
    "word": GrammarSpec.regex(r"\w{2,9}@\w+"),
    "object": GrammarSpec.json_object(),
    "person": GrammarSpec.json_schema(PERSON),
    "flexible person": GrammarSpec.json_schema(PERSON, whitespace="flexible"),
    "person without whitespace": GrammarSpec.json_schema(PERSON, whitespace="none"),
    "union": GrammarSpec.json_schema(
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}}]}
    ),
    "checked": GrammarSpec.json_schema(CHECKED, on_unsupported="check"),
    "lark": GrammarSpec.lark('start: item ("," item)*\nitem: /[a-c]+/ | "(" start ")"'),
    "ambiguous lark": GrammarSpec.lark('start: start "a" | "b"'),
    "lark by characters": GrammarSpec.lark('start: "if" NAME | NAME "=" NAME\nNAME: /[a-z]+/\n%ignore " "'),
    "one of": GrammarSpec.json_schema({"oneOf": [{"minLength": 2}, {"maxLength": 3, "type": "string"}]}),
    "empty": GrammarSpec.regex("(ab)?"),
    "ebnf": GrammarSpec.ebnf('root ::= item ("," item)*\nitem ::= [a-c]+ "c" | "日" | "(" root ")"'),
    "tagged": GrammarSpec.structural(
        [StructuralTag("[", GrammarSpec.json_schema(PERSON), "]")], triggers=["["], min_tags=1
    ),
}


@dataclass(frozen=True)
class Case:
    tokenizer: Tokenizer
    grammar: CompiledGrammar

    def allowed(self, matcher: GrammarMatcher) -> list[int]:
        row = np.full((self.tokenizer.vocab_size + 31) // 32, -1, dtype=np.int32)
        matcher.fill_mask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        return [int(token_id) for token_id in np.flatnonzero(bits)]

    def is_same(self, one: GrammarMatcher, other: GrammarMatcher) -> bool:
        return (
            self.allowed(one) == self.allowed(other)
            and one.is_accepting == other.is_accepting
            and one.is_terminated == other.is_terminated
            and one.forced_tokens() == other.forced_tokens()
        )


_compiled: dict[tuple[str, str], CompiledGrammar] = {}


@pytest.fixture(params=[(vocabulary, name) for vocabulary in TOKENIZERS for name in SPECS], ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    vocabulary, name = request.param
    tokenizer = TOKENIZERS[vocabulary]
    if request.param not in _compiled:
        _compiled[request.param] = compile(SPECS[name], tokenizer)
    return Case(tokenizer, _compiled[request.param])


def walk(case: Case, seed: int, num_steps: int) -> list[int]:
    """Draw tokens from the masks until nothing may follow."""
    generator = random.Random(seed)
    matcher, drawn = case.grammar.start(), []
    while len(drawn) < num_steps and (allowed := case.allowed(matcher)):
        drawn.append(generator.choice(allowed))
        assert matcher.accept(drawn[-1]), f"seed {seed}: masked in but not accepted after {drawn}"
    return drawn


def test_a_bit_is_set_exactly_when_the_token_is_accepted(case: Case) -> None:
    for seed in range(3):
        matcher = case.grammar.start()
        for token_id in [*walk(case, seed, 7), None]:
            allowed = set(case.allowed(matcher))
            for candidate in range(case.tokenizer.vocab_size):
                fork = matcher.fork()
                is_accepted = fork.accept(candidate)
                assert is_accepted == (candidate in allowed), (
                    f"seed {seed}: token {candidate} {case.tokenizer.token_text(candidate)!r}"
                )
            if token_id is not None:
                assert matcher.accept(token_id)


def test_end_tokens_are_counted_outside(case: Case) -> None:
    matcher = case.grammar.start()
    for token_id in walk(case, 1, 30):
        assert not set(case.allowed(matcher)) & case.tokenizer.special_ids
        assert not any(matcher.accept(end_id) for end_id in case.tokenizer.eos_ids)
        matcher.accept(token_id)
    assert not matcher.accept(-1)
    assert not matcher.accept(case.tokenizer.vocab_size)


def test_a_terminated_matcher_accepts_and_allows_nothing(case: Case) -> None:
    for seed in range(5):
        matcher = case.grammar.start()
        for token_id in walk(case, seed, 60):
            if matcher.is_terminated:
                assert matcher.is_accepting
            assert not (matcher.is_terminated and case.allowed(matcher))
            matcher.accept(token_id)
        if not case.allowed(matcher):
            assert matcher.is_accepting, f"seed {seed}: a dead end"
            assert matcher.is_terminated


def test_every_bit_of_a_mask_can_be_explained(case: Case) -> None:
    matcher = case.grammar.start()
    for token_id in [*walk(case, 2, 5), None]:
        allowed = set(case.allowed(matcher))
        for candidate in {*range(0, case.tokenizer.vocab_size, 29), *list(allowed)[:3]}:
            found = matcher.explain_mask(candidate)
            assert found.is_allowed == (candidate in allowed)
            assert found.num_allowed == len(allowed)
            assert found.reason
            assert 0 <= found.num_fitting_bytes <= len(found.token_bytes)
        if token_id is not None:
            assert matcher.accept(token_id)


def test_rollback_equals_a_replay(case: Case) -> None:
    for seed in range(3):
        drawn = walk(case, seed, 12)
        for keep in {0, len(drawn) // 2, max(0, len(drawn) - 1)}:
            matcher, replay = case.grammar.start(), case.grammar.start()
            assert all(matcher.accept(token_id) for token_id in drawn)
            matcher.rollback(len(drawn) - keep)
            assert all(replay.accept(token_id) for token_id in drawn[:keep])
            assert case.is_same(matcher, replay), f"seed {seed}, kept {keep}"
            assert all(matcher.accept(token_id) for token_id in drawn[keep:])
    with pytest.raises(ValueError, match="num_tokens"):
        case.grammar.start().rollback(1)


def test_a_fork_equals_a_replay_and_is_independent(case: Case) -> None:
    drawn = walk(case, 5, 12)
    for keep in {0, len(drawn) // 2, len(drawn)}:
        matcher, replay = case.grammar.start(), case.grammar.start()
        for token_id in drawn[:keep]:
            assert matcher.accept(token_id)
            assert replay.accept(token_id)
        fork = matcher.fork()
        assert all(fork.accept(token_id) for token_id in drawn[keep:])
        assert case.is_same(matcher, replay)
        fork.rollback(len(drawn) - keep)
        assert case.is_same(fork, replay)


def test_validate_counts_and_changes_nothing(case: Case) -> None:
    drawn = walk(case, 7, 10)
    matcher = case.grammar.start()
    assert matcher.validate([*drawn, case.tokenizer.eos_ids[0]]) == len(drawn)
    assert matcher.validate([]) == 0
    assert case.is_same(matcher, case.grammar.start())


def test_a_run_is_taken_as_its_tokens_are_one_by_one(case: Case) -> None:
    for seed in range(4):
        generator, matcher = random.Random(seed), case.grammar.start()
        for token_id in [*walk(case, seed, 15), None]:
            runs = [matcher.forced_tokens(), matcher.closing_run(60) or [], walk(case, seed + 9, 9)]
            for run in list(runs):
                changed = list(run)
                if changed:  # one token is another, somewhere
                    changed[generator.randrange(len(run))] = generator.randrange(case.tokenizer.vocab_size)
                runs += [changed, run + run[:2]]
            for run in runs:
                together, alone = matcher.fork(), matcher.fork()
                num_taken, num_valid = together.accept_run(run), matcher.validate(run)
                assert num_valid <= num_taken <= len(run)
                if num_valid < num_taken:  # another spelling of what is forced
                    alone.accept_run(run[:num_valid])
                    assert alone.forced_tokens()[:1] != [run[num_valid]]
                else:
                    assert all(alone.accept(item) for item in run[:num_taken])
                    assert case.is_same(together, alone)
                if num_taken < len(run):
                    assert not together.accept(run[num_taken])
                together.rollback(num_taken)
                assert case.is_same(together, matcher)
            if token_id is not None:
                assert matcher.accept(token_id)


def test_the_first_way_to_the_end_is_the_same_whatever_was_asked_before(case: Case) -> None:
    limits = [3, 60, 5, 200, 1, 60, 3]
    fresh = compile(case.grammar.spec, case.tokenizer)
    ways = [fresh.start().closing_run(limit) for limit in limits]
    assert ways == [
        compile(case.grammar.spec, case.tokenizer).start().closing_run(limit) for limit in limits[:4]
    ] + [ways[4], ways[1], ways[0]]
    for way in ways:
        if way:
            way.clear()  # it is the caller's own
    assert fresh.start().closing_run(60) == case.grammar.start().closing_run(60)


def test_forced_tokens_are_the_only_way(case: Case) -> None:
    """Every continuation that the masks allow spells the forced text first."""
    for seed in range(4):
        matcher = case.grammar.start()
        for token_id in [*walk(case, seed, 15), None]:
            if forced := matcher.forced_tokens():
                assert not matcher.is_accepting
                fork = matcher.fork()
                text = b"".join(case.tokenizer.vocab_bytes[forced_id] for forced_id in forced)
                for forced_id in forced:
                    assert forced_id in case.allowed(fork)
                    assert fork.accept(forced_id)
                for candidate in case.allowed(matcher):
                    token = case.tokenizer.vocab_bytes[candidate]
                    assert text.startswith(token) or token.startswith(text), (seed, text, token)
            if token_id is not None:
                assert matcher.accept(token_id)


def test_following_forced_runs_gives_the_canonical_tokens(case: Case) -> None:
    """Where the text after a run is known, its tokenization is that of the whole text."""
    matcher = case.grammar.start()
    forced = matcher.forced_tokens()
    for token_id in forced:
        assert matcher.accept(token_id)
    if matcher.is_terminated:
        text = case.tokenizer.decode(forced)
        assert case.tokenizer.encode_continuation(text) == forced


def test_completions_pass_the_final_check(case: Case) -> None:
    num_complete = 0
    for seed in range(40):
        drawn = walk(case, seed, 80)
        matcher = case.grammar.start()
        assert matcher.validate(drawn) == len(drawn)
        for token_id in drawn:
            matcher.accept(token_id)
        text = b"".join(case.tokenizer.vocab_bytes[token_id] for token_id in drawn)
        if matcher.is_accepting:
            num_complete += 1
            is_valid = not case.grammar.report.checked or len({*json.loads(text)}) == len(json.loads(text))
            assert case.grammar.check(text.decode("utf-8")) == is_valid, f"seed {seed}: {text!r}"
    assert num_complete


def test_a_closing_run_is_allowed_and_ends_the_text(case: Case) -> None:
    for seed in range(4):
        matcher = case.grammar.start()
        for token_id in [*walk(case, seed, 25), None]:
            run = matcher.closing_run(60)
            if run is not None:
                assert len(run) <= 60
                fork = matcher.fork()
                for step, closing_id in enumerate(run):
                    assert not fork.is_accepting
                    assert fork.accept(closing_id), (seed, step, run)
                assert fork.is_accepting
                if run:
                    shorter = matcher.closing_run(len(run) - 1)
                    assert shorter is None or len(shorter) < len(run)
            else:
                assert case.grammar.spec == SPECS["ambiguous lark"]
            if token_id is not None:
                assert matcher.accept(token_id)


def test_a_way_that_begins_with_another_and_goes_on_as_a_known_one_ends_the_text(case: Case) -> None:
    for seed in range(6):
        matcher = case.grammar.start()
        known = matcher.closing_run(60) or []
        for token_id in walk(case, seed, 25):
            assert matcher.accept(token_id)
            for limit in (60, len(known), len(known) // 2):
                run = matcher.closing_run(limit, known=known)
                if run is not None:
                    fork = matcher.fork()
                    assert len(run) <= limit
                    assert fork.accept_run(run) == len(run), (seed, run)
                    assert fork.is_accepting
                elif limit == 60:
                    assert case.grammar.spec == SPECS["ambiguous lark"]
            known = matcher.closing_run(60, known=known) or []


def test_a_closing_run_of_an_automaton_is_a_shortest_one() -> None:
    tokenizer = TOKENIZERS["byte"]
    for name in ("choice", "forced choice", "alternatives"):
        matcher = compile(SPECS[name], tokenizer).start()
        run = matcher.closing_run(100)
        assert run is not None
        assert len(run) == shortest(matcher, tokenizer)
        assert matcher.closing_run(len(run)) == run
        assert matcher.closing_run(len(run) - 1) is None


def shortest(matcher: GrammarMatcher, tokenizer: Tokenizer) -> int:
    """Count the tokens to an accepting state by trying all of them."""
    frontier, depth = {b"": matcher}, 0
    while not any(item.is_accepting for item in frontier.values()):
        reached: dict[bytes, GrammarMatcher] = {}
        for text, item in frontier.items():
            for token_id, token in enumerate(tokenizer.vocab_bytes):
                if text + token not in reached and (fork := item.fork()).accept(token_id):
                    reached[text + token] = fork
        frontier, depth = reached, depth + 1
    return depth


def test_answers_end_within_their_budget(case: Case) -> None:
    """The rule of `closing_run`: a sampled token after which no run fits gives way to the run known before."""
    for seed in range(5):
        generator, matcher = random.Random(seed), case.grammar.start()
        run = matcher.closing_run(60)
        assert run is not None
        budget = len(run) + generator.randrange(12)
        while budget and not matcher.is_terminated and (allowed := case.allowed(matcher)):
            token_id = generator.choice(allowed)
            assert matcher.accept(token_id)
            following = matcher.closing_run(budget - 1)
            if following is None:
                matcher.rollback(1)
                assert all(map(matcher.accept, run))
                break
            run, budget = following, budget - 1
        assert matcher.is_accepting, f"seed {seed}"


def test_a_wrong_row_is_refused(case: Case) -> None:
    matcher = case.grammar.start()
    width = (case.tokenizer.vocab_size + 31) // 32
    for row in (np.zeros(width + 1, np.int32), np.zeros(width, np.int64), np.zeros(2 * width, np.int32)[::2]):
        with pytest.raises(ValueError, match="row"):
            matcher.fill_mask(row)
