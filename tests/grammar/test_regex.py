"""Regular expressions and choices: the automata say what Python's re says; hostile ones stay cheap."""

from __future__ import annotations

import random
import re
import time

import numpy as np
import pytest

from radixrt.constraints import GrammarKind, GrammarSpec
from radixrt.errors import InvalidRequest, UnsupportedGrammar
from radixrt.grammar import compile
from radixrt.grammar.engines.byte_dfa import ByteDFA
from radixrt.grammar.engines.dfa import DFAGrammar
from radixrt.grammar.engines.llg import LLGrammar
from radixrt.grammar.regex_cost import max_states, whole_match
from radixrt.grammar.schema.compile import shortest_match
from radixrt.grammar.trie import ROOT, TokenTrie
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer

TOKENIZER = byte_tokenizer(extra=JSON_MERGES)

PATTERNS = [
    "a*", "(a|ab)(c|bcd)d*", "[ab]{2,3}", "a?b?c?", "(?:ab|a)*", "", "[^a]", ".", ".*", "日|語+", "[é-日]{1,2}a",
    "(|a)b", "a{0}b", "(a{1,2}){2}", "[abc]*[ab]", r"a\.b", "[a\\]b]+", "^(|.*)$", "(ab|cd)?(ab|ef)", "日本?",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_verdicts_equal_those_of_python(pattern: str) -> None:
    grammar = compile(GrammarSpec.regex(pattern), TOKENIZER)
    generator = random.Random(3)
    texts = ["".join(generator.choices("aabcd.é日語本\\]", k=generator.randrange(6))) for _ in range(300)]
    for text in ["", *texts]:
        assert grammar.check(text) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_both_engines_give_the_same_masks(pattern: str) -> None:
    """The llguidance engine is the second oracle of the automata, where it forces nothing."""
    import llguidance

    from radixrt.grammar.matcher import EnforcementReport
    from radixrt.grammar.vocabulary import GrammarVocabulary

    vocabulary = GrammarVocabulary(TOKENIZER)
    spec = GrammarSpec.regex(pattern)
    one = DFAGrammar(spec, vocabulary, dfa=ByteDFA.from_regex(whole_match(pattern)))
    grammar = llguidance.LLMatcher.grammar_from_regex(whole_match(pattern))
    two = LLGrammar(spec, vocabulary, grammar=grammar, report=EnforcementReport())
    generator = random.Random(4)
    for _ in range(4):
        a, b = one.start(), two.start()
        for _ in range(6):
            rows = np.zeros((2, (TOKENIZER.vocab_size + 31) // 32), dtype=np.int32)
            a.fill_mask(rows[0])
            b.fill_mask(rows[1])
            assert a.is_accepting == b.is_accepting
            if b.forced_tokens():
                assert (rows[0] & rows[1] == rows[1]).all()
            else:
                assert (rows[0] == rows[1]).all()
            allowed = np.flatnonzero(np.unpackbits(rows[1].view(np.uint8), bitorder="little")).tolist()
            if not allowed:
                break
            token_id = generator.choice(allowed)
            assert a.accept(token_id)
            assert b.accept(token_id)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:a?){40}a{40}", "[ab]*a[ab]{30}", ".{0,10000}", "(a{1,100}){1,100}", r"(\w{1,50}\s?){1,50}",
        "[ab]*a" + "[ab]" * 40, "(a|b|ab)*c" * 20, r"\p{L}{1,40}" * 3,
    ],
)  # fmt: skip
def test_hostile_patterns_never_reach_the_automaton_compiler(pattern: str) -> None:
    started = time.process_time()
    grammar = compile(GrammarSpec.regex(pattern), TOKENIZER)
    row = np.zeros((TOKENIZER.vocab_size + 31) // 32, dtype=np.int32)
    matcher = grammar.start()
    for _ in range(3):
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        assert matcher.accept(allowed[0])
    assert isinstance(grammar, LLGrammar)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "pattern", ["(?=a)b", r"(a)\1", r"\bfoo", "a(", "a)", "a)|(b", "[a", "*a", "(?<!a)b", "a{2"]
)
def test_unsupported_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        compile(GrammarSpec.regex(pattern), TOKENIZER)
    assert caught.value.parameter == "grammar"


def test_patterns_that_match_nothing_are_refused() -> None:
    for pattern in ("[^\\x00-\\U0010FFFF]", "a[^\\x00-\\U0010FFFF]"):
        with pytest.raises(UnsupportedGrammar):
            compile(GrammarSpec.regex(pattern), TOKENIZER)


def test_anchors_around_the_whole_are_dropped() -> None:
    assert whole_match("^a$") == "a"
    assert whole_match(r"a\$") == r"a\$"
    assert whole_match(r"a\\$") == r"a\\"


def test_the_cost_bound_is_a_bound() -> None:
    assert max_states("[0-9]{4}-[0-9]{2}") == 7 + 1
    assert (max_states("[ab]*a[ab]{30}") or 0) >= 2**30
    assert (max_states("((a{9}){9}){9}") or 0) >= 729
    assert (max_states("(((a{999}){999}){999}){999}") or 0) >= 10**11
    assert max_states("(?i)a") is None
    assert max_states("(" * 200 + ")" * 200) is None
    assert (max_states("a|b" * 30) or 0) >= 2**30


def test_choices_are_exact_and_linear() -> None:
    choices = [f"item {number:05d} 日本" for number in range(10_000)]
    started = time.process_time()
    grammar = compile(GrammarSpec.choice(choices), TOKENIZER)
    assert time.process_time() - started < 2
    assert grammar.check("item 00042 日本")
    assert not grammar.check("item 00042")
    forced = grammar.start().forced_tokens()
    assert TOKENIZER.decode(forced) in "item 0"


def test_a_choice_that_begins_another_can_go_on() -> None:
    grammar = compile(GrammarSpec.choice(["a", "ab"]), TOKENIZER)
    matcher = grammar.start()
    assert matcher.accept(97)
    assert matcher.is_accepting
    assert not matcher.is_terminated
    assert matcher.accept(98)
    assert matcher.is_terminated


def test_jump_forward_on_chinese_alternatives() -> None:
    """sglang #549: a forced run must not end inside a character or guess between alternatives."""
    grammar = compile(GrammarSpec.choice(["他是日本人", "他是日語老师"]), TOKENIZER)
    matcher = grammar.start()
    run = matcher.forced_tokens()
    assert "他是日本".startswith(TOKENIZER.decode(run))
    for token_id in run:
        assert matcher.accept(token_id)


def test_malformed_choices_are_refused() -> None:
    for text in ('["a", "a"]', "[]", '[""]', '"a"', "[1]", "[", '["\\ud800"]'):
        with pytest.raises(InvalidRequest):
            compile(GrammarSpec(GrammarKind.CHOICE, text), TOKENIZER)


def test_the_trie_finds_every_token_and_no_other() -> None:
    trie = TokenTrie.build(TOKENIZER.vocab_bytes)
    for token_id, token in enumerate(TOKENIZER.vocab_bytes):
        node = trie.find(token)
        assert node is not None
        ids = trie.token_ids[trie.token_start[node] : trie.token_start[node + 1]]
        assert (token_id in ids) == (token != b"")
    assert trie.find(b"zzzz") is None
    assert trie.find(b"") == ROOT
    assert trie.has_longer("日".encode())
    assert not trie.has_longer(b"abc")


def test_a_padded_vocabulary_has_no_bits_in_the_padding() -> None:
    padded = TOKENIZER.vocab_size + 77
    for spec in (GrammarSpec.regex(".*"), GrammarSpec.json_object()):
        row = np.full((padded + 31) // 32, -1, dtype=np.int32)
        compile(spec, TOKENIZER, vocab_size=padded).start().fill_mask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        assert bits[: TOKENIZER.vocab_size].any()
        assert not bits[TOKENIZER.vocab_size :].any()


def test_an_empty_alternative_beside_everything() -> None:
    """vllm PR 37642: `^(|.*)$` crashed or allowed nothing."""
    grammar = compile(GrammarSpec.regex("^(|.*)$"), TOKENIZER)
    assert grammar.check("")
    assert grammar.check("日本 x")
    assert not grammar.check("a\nb")
    assert grammar.start().is_accepting


def test_a_class_that_ends_inside_a_page_of_unicode() -> None:
    r"""vllm #15210: `[\x00-\u2e7f]+` let through or refused characters by their bytes."""
    grammar = compile(GrammarSpec.regex("[\\x00-\u2e7f]+"), TOKENIZER)
    assert grammar.check("aé\u2e7f\x00")
    assert not grammar.check("a\u2e80")
    assert not grammar.check("日")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^[\w.-]+@\w{2,}$", "-@aa"),
        (r"\p{Lu}\p{L}{2}\d", "Aaa0"),
        (r"\S\s\S", "a a"),
        (r"\\d", r"\d"),
        (r"\w{60}", "a" * 60),
    ],
)
def test_a_short_text_of_a_pattern_needs_no_automaton_of_all_scripts(
    monkeypatch: pytest.MonkeyPatch, pattern: str, text: str
) -> None:
    sizes: list[int] = []
    build = ByteDFA.from_regex

    def counted(body: str) -> ByteDFA:
        dfa = build(body)
        sizes.append(len(dfa.accepting))
        return dfa

    monkeypatch.setattr(ByteDFA, "from_regex", staticmethod(counted))
    assert shortest_match(pattern) == text
    assert max(sizes) < 100
