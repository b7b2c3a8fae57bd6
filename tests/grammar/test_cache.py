from __future__ import annotations

import threading

import pytest

import radixrt.grammar.cache
from radixrt.config import GrammarConfig
from radixrt.constraints import GrammarSpec
from radixrt.errors import EngineStopped, UnsupportedGrammar
from radixrt.grammar import CompiledGrammar, GrammarCache
from tests.support.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()


def test_equal_constraints_are_compiled_once() -> None:
    cache = GrammarCache(TOKENIZER)
    schema = {"type": "integer"}
    assert cache.get(GrammarSpec.json_schema(schema)) is cache.get(GrammarSpec.json_schema(dict(schema)))
    assert cache.get(GrammarSpec.regex("a")) is not cache.get(GrammarSpec.regex("b"))
    assert len(cache) == 3


def test_threads_that_arrive_together_share_one_compilation() -> None:
    cache = GrammarCache(TOKENIZER)
    spec = GrammarSpec.choice([f"{number}" for number in range(3000)])
    barrier, found = threading.Barrier(8), []

    def get() -> None:
        barrier.wait()
        found.append(cache.get(spec))

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(grammar) for grammar in found}) == 1


def test_refusals_are_remembered() -> None:
    cache = GrammarCache(TOKENIZER)
    spec = GrammarSpec.json_schema({"not": {}})
    errors = []
    for _ in range(2):
        with pytest.raises(UnsupportedGrammar) as caught:
            cache.get(spec)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert (str(errors[0]), errors[0].parameter) == (str(errors[1]), errors[1].parameter)
    assert len(cache) == 1


def test_the_least_recently_used_go_first() -> None:
    probe = GrammarCache(TOKENIZER)
    one_bytes = probe.get(GrammarSpec.regex("a{7}")).num_bytes
    cache = GrammarCache(TOKENIZER, config=GrammarConfig(grammar_cache_bytes=3 * one_bytes))
    specs = [GrammarSpec.regex(f"{letter}{{7}}") for letter in "abcd"]
    first = cache.get(specs[0])
    cache.get(specs[1])
    cache.get(specs[2])
    assert cache.get(specs[0]) is first
    cache.get(specs[3])
    assert cache.num_bytes <= 3 * one_bytes
    assert cache.get(specs[0]) is first


def test_nobody_can_flush_the_share_of_another() -> None:
    one_bytes = GrammarCache(TOKENIZER).get(GrammarSpec.regex("a{7}")).num_bytes
    cache = GrammarCache(TOKENIZER, config=GrammarConfig(grammar_cache_bytes=4 * one_bytes))
    quiet = GrammarSpec.regex("q{7}")
    kept = cache.get(quiet, owner="quiet")
    for letter in "abcdefgh":
        cache.get(GrammarSpec.regex(f"{letter}{{7}}"), owner="busy")
    assert cache.get(quiet, owner="quiet") is kept
    assert cache.num_bytes <= 4 * one_bytes


def test_masks_count_towards_the_limit() -> None:
    import numpy as np

    cache = GrammarCache(TOKENIZER)
    grammar: CompiledGrammar = cache.get(GrammarSpec.regex(".*"))
    before = grammar.num_bytes
    grammar.start().fill_mask(np.zeros((TOKENIZER.vocab_size + 31) // 32, dtype=np.int32))
    assert grammar.num_bytes > before


def test_a_hit_looks_at_one_entry_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a warm compilation costs does not depend on how much is held, nor on the constraint."""
    cache = GrammarCache(TOKENIZER)
    specs = [GrammarSpec.regex(f"a{{{number}}}") for number in range(1, 30)]
    held = [cache.get(spec) for spec in specs]
    looked_at = []
    count = radixrt.grammar.cache._num_bytes
    monkeypatch.setattr(
        "radixrt.grammar.cache._num_bytes", lambda entry: looked_at.append(entry) or count(entry)
    )
    cache.close()  # a closed cache has no process to ask
    for spec, grammar in zip(specs, held, strict=True):
        assert cache.get(spec) is grammar
    assert len(looked_at) == len(specs)
    assert cache.stats().num_compiled == len(specs)
    with pytest.raises(EngineStopped):
        cache.get(GrammarSpec.regex("b"))


def test_a_cache_without_room_still_compiles() -> None:
    cache = GrammarCache(TOKENIZER, config=GrammarConfig(grammar_cache_bytes=0))
    assert cache.get(GrammarSpec.regex("a")).check("a")
    assert len(cache) == 0
