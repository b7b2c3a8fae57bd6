"""Masks of automata: two ways to find them, and how much each looks at."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixrt.constraints import GrammarSpec
from radixrt.grammar.engines import dfa as engine
from radixrt.grammar.engines.byte_dfa import ByteDFA
from radixrt.grammar.engines.dfa import DFAGrammar
from radixrt.grammar.regex_cost import whole_match
from radixrt.grammar.trie import TokenTrie
from radixrt.grammar.vocabulary import GrammarVocabulary
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer

DRAW = random.Random(5)
WORDS = ["".join(DRAW.choices("abcde é日", k=DRAW.randrange(2, 7))) for _ in range(700)]
VOCABULARY = GrammarVocabulary(byte_tokenizer(extra=(*JSON_MERGES, *WORDS)))
PATTERNS = [
    *(r"(a+)+b", r"(a|aa)+b", r"[\x00-\u2e7f]+", r"^(|.*)$", r".*.*e.*;.*", r"[a-e]{1,9}日{0,3}", r"\w{2,9}"),
    *(r"(a|b)*a(a|b){6}", r"[0-9]{4}-[0-9]{2}", "|".join(WORDS[:200])),
]


@pytest.fixture(params=PATTERNS, ids=lambda pattern: pattern[:20])
def grammar(request: pytest.FixtureRequest) -> DFAGrammar:
    pattern = whole_match(request.param)
    return DFAGrammar(GrammarSpec.regex(request.param), VOCABULARY, dfa=ByteDFA.from_regex(pattern))


def test_looking_everywhere_finds_what_walking_finds(
    grammar: DFAGrammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    for state in range(len(grammar.dfa.accepting)):
        monkeypatch.setattr(engine, "MAX_SPARSE_NODES", 0)
        everywhere = grammar._allowed(state)
        monkeypatch.setattr(engine, "MAX_SPARSE_NODES", 1 << 40)
        assert sorted(everywhere) == sorted(grammar._allowed(state))
    assert grammar._table is not None


class Lookups:
    """Counts the edges of automata and tries that are looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_done = 0
        step, children, everywhere = ByteDFA.step, TokenTrie.children_of, engine._all_token_edges

        def counted_step(dfa: ByteDFA, states: np.ndarray, values: np.ndarray) -> np.ndarray:
            self.num_done += len(values)
            return step(dfa, states, values)

        def counted_children(trie: TokenTrie, nodes: np.ndarray, values: np.ndarray) -> np.ndarray:
            self.num_done += len(values)
            return children(trie, nodes, values)

        def counted_everywhere(table: np.ndarray, trie: TokenTrie, state: int) -> np.ndarray:
            self.num_done += trie.num_nodes
            return everywhere(table, trie, state)

        monkeypatch.setattr(ByteDFA, "step", counted_step)
        monkeypatch.setattr(TokenTrie, "children_of", counted_children)
        monkeypatch.setattr(engine, "_all_token_edges", counted_everywhere)


def test_a_mask_looks_at_each_node_of_the_trie_twice_at_most(
    grammar: DFAGrammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work behind the worst time of a mask, in lookups; a mask that is known takes none."""
    lookups = Lookups(monkeypatch)
    monkeypatch.setattr(engine, "MAX_SPARSE_NODES", 100)
    for state in range(len(grammar.dfa.accepting)):
        lookups.num_done = 0
        grammar.mask(state)
        assert lookups.num_done <= 2 * VOCABULARY.trie.num_nodes
        lookups.num_done = 0
        grammar.mask(state)
        assert lookups.num_done == 0


def test_the_search_for_an_end_of_many_choices_is_linear_in_their_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choices = [f"{DRAW.getrandbits(100):025x}" for _ in range(300)]
    grammar = DFAGrammar(GrammarSpec.choice(choices), VOCABULARY, dfa=ByteDFA.from_strings(choices))
    lookups = Lookups(monkeypatch)
    run = grammar.closing_run(0, 100)
    assert run is not None
    assert VOCABULARY.tokenizer.decode(run) in choices
    assert 0 < lookups.num_done <= 4 * len(grammar.dfa.edge_keys)
