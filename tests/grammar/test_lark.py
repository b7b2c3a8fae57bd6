from __future__ import annotations

import time

import numpy as np
import pytest

from radixrt.errors import InvalidRequest, UnsupportedGrammar
from radixrt.grammar import compile
from radixrt.types import GrammarSpec
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer

TOKENIZER = byte_tokenizer(extra=JSON_MERGES)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('start: "a" b\nb: /[0-9]+/', ["a1", "a42"], ["a", "1", "a1b"]),
        ('start: expr\nexpr: NUM | "(" expr "+" expr ")"\nNUM: /[0-9]+/', ["1", "(1+(2+3))"], ["(1)", "1+2"]),
        ('start: (WORD ",")* WORD\n%import common.WORD\n%ignore " "', ["ab, c", "ab"], ["ab,", ""]),
        ('start: start "a" | "b"', ["b", "baa"], ["a", "ab"]),
        ("start: /日本(語)?/", ["日本", "日本語"], ["日", "日本人"]),
    ],
)
def test_verdicts(text: str, good: list[str], bad: list[str]) -> None:
    grammar = compile(GrammarSpec.lark(text), TOKENIZER)
    assert all(grammar.check(item) for item in good)
    assert not any(grammar.check(item) for item in bad)


@pytest.mark.parametrize("text", ["start: /a+/ /a/", "start: /ab*/ /b/", 'start: start start | "a"'])
def test_grammars_that_hang_with_forcing_do_not_hang(text: str) -> None:
    started = time.process_time()
    matcher = compile(GrammarSpec.lark(text), TOKENIZER).start()
    row = np.zeros((TOKENIZER.vocab_size + 31) // 32, dtype=np.int32)
    for _ in range(3):
        assert matcher.forced_tokens() == []
        matcher.fill_mask(row)
        assert matcher.accept(97) or matcher.accept(98)
    assert time.process_time() - started < 5


def test_no_run_is_forced_in_a_user_grammar() -> None:
    assert compile(GrammarSpec.lark('start: "abcdef"'), TOKENIZER).start().forced_tokens() == []


@pytest.mark.parametrize(
    "text",
    [
        "start: foo",
        "%declare A\nstart: A",
        "%override start: A",
        "%extend A: /b/\nstart: A",
        'start: %json {"not": {}}',
        '%llguidance {"no_forcing": false}\nstart: "a"',
        "start: <|im_end|>",
        "begin: /a/",
        "start: /(?=a)b/",
        "start: a\na: a",
        "start: (",
    ],
)
def test_what_is_not_supported_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        compile(GrammarSpec.lark(text), TOKENIZER)
    assert caught.value.parameter == "grammar"


def test_errors_name_the_line() -> None:
    with pytest.raises(UnsupportedGrammar, match=r"2\(4\)"):
        compile(GrammarSpec.lark('start: "a" b\nb: nowhere'), TOKENIZER)


def test_an_empty_grammar_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest):
        compile(GrammarSpec.lark("  \n"), TOKENIZER)
