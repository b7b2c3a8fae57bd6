"""Lark grammars: masks agree with Lark's own Earley parser, or the grammar is refused with its place."""

from __future__ import annotations

import random
import time
from pathlib import Path

import lark
import numpy as np
import pytest

from radixrt.constraints import GrammarSpec
from radixrt.errors import GrammarTooCostly, InvalidRequest, UnsupportedGrammar
from radixrt.grammar import CompiledGrammar, compile
from radixrt.grammar.forcing import MAX_FORCED_BYTES
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer

TOKENIZER = byte_tokenizer(extra=JSON_MERGES)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('start: "a" b\nb: /[0-9]+/', ["a1", "a42"], ["a", "1", "a1b"]),
        ('start: expr\nexpr: NUM | "(" expr "+" expr ")"\nNUM: /[0-9]+/', ["1", "(1+(2+3))"], ["(1)", "1+2"]),
        ('start: (WORD ",")* WORD\n%import common.WORD\n%ignore " "', ["ab, c", "ab", " ab "], ["ab,", ""]),
        ('start: start "a" | "b"', ["b", "baa"], ["a", "ab"]),
        ("start: /日本(語)?/", ["日本", "日本語"], ["日", "日本人"]),
        ('start: x\nx: "a"?', ["", "a"], ["aa"]),
    ],
)
def test_verdicts(text: str, good: list[str], bad: list[str]) -> None:
    grammar = compile(GrammarSpec.lark(text), TOKENIZER)
    assert all(grammar.check(item) for item in good)
    assert not any(grammar.check(item) for item in bad)


# Name -> grammar, and the characters of the random texts.
AGREE = {
    "list": ('start: "[" [item ("," item)*] "]"\nitem: /[a-c]+/ | start', "[],ab"),
    "spaces": ('start: WORD+\n%import common.WORD\n%import common.WS\n%ignore WS', "ab \n"),
    "arithmetic": (
        '?start: sum\n?sum: product | sum "+" product -> add | sum "-" product -> sub\n'
        '?product: atom | product "*" atom\n?atom: NUMBER | "-" atom | "(" sum ")"\n'
        "%import common.NUMBER\n%import common.WS_INLINE\n%ignore WS_INLINE",
        "1.+-*() e",
    ),
    "json": (
        '?start: value\n?value: object | array | string | SIGNED_NUMBER | "true" | "false" | "null"\n'
        'array: "[" [value ("," value)*] "]"\nobject: "{" [pair ("," pair)*] "}"\npair: string ":" value\n'
        "string: ESCAPED_STRING\n%import common.ESCAPED_STRING\n%import common.SIGNED_NUMBER\n%import common.WS\n%ignore WS",
        '[]{},:"\\ta1-. ',
    ),
    "keyword or name": (
        'start: "if" NAME | NAME "=" NAME\nNAME: /[a-z]+/\n%ignore " "',
        "if=a ",
    ),
    "template": (
        'start: _sep{pair, ","}\npair: KEY "=" VALUE\n_sep{x, s}: x (s x)*\nKEY: "k" /[0-9]/\nVALUE: "v"i',
        "k1=vV,",
    ),
    "nested template": ('start: twice{twice{"a"}}\ntwice{x}: x x', "a"),
    "priorities": ('start: A | B\nA.2: "ab"\nB.1: /a./', "abc"),
    "repeats": ('start: "a"~2..3 ("b" | "c")~2', "abc"),
    "override": ("start: WORD\n%import common.WORD\n%override WORD: /[xy]+/", "xyab"),
    "extend": ('start: WORD\n%import common.WORD\n%extend WORD: "1"', "a1"),
    "comment": ('start: ("x" ";")+\n%ignore /\\/\\*.*?\\*\\//\n%ignore " "', "x;/* "),
    "any case": ('start: "select"i NAME\nNAME: /[a-c]+/\n%ignore " "', "sSelct abc"),
    "left and right": ('start: start "a" | "b" start | "c"', "abc"),
    "recursion through nothing": ('start: e e "x"\ne: "a"*', "ax"),
    "characters": ('start: ("é" | "日" "本")+', "é日本"),
    "dead branch": ('start: "a" | b\nb: "x" b', "ax"),
    "a rule that nobody uses": ('start: "a" c?\nb: start "x" c "y"\nc: "x"', "axy"),
    "look-ahead": ("start: /(?!ab)[abc]{2}/", "abc"),
    "greedy name": ("start: NAME (\" \" NAME)*\nNAME: /[a-z][a-z0-9]*/", "ab1 "),
}  # fmt: skip


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Tell whether the masks let this text through, byte by byte."""
    matcher = grammar.start()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.is_accepting


def draw_text(grammar: CompiledGrammar, draw: random.Random) -> str:
    """Give a text that the masks lead to, or its beginning."""
    matcher, data = grammar.start(), b""
    row = np.zeros((TOKENIZER.vocab_size + 31) // 32, dtype=np.int32)
    for _ in range(draw.randrange(1, 14)):
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if not allowed or (matcher.is_accepting and draw.random() < 0.3):
            break
        token_id = draw.choice(allowed)
        assert matcher.accept(token_id)
        data += TOKENIZER.vocab_bytes[token_id]
    return data.decode("utf-8", "ignore")


def parses(parser: lark.Lark, text: str) -> bool:
    try:
        parser.parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


@pytest.mark.parametrize("name", AGREE)
def test_masks_agree_with_lark_on_random_texts(name: str) -> None:
    text, alphabet = AGREE[name]
    grammar = compile(GrammarSpec.lark(text), TOKENIZER)
    parser = lark.Lark(text, parser="earley")
    draw = random.Random(3)
    num_good = 0
    for number in range(200):
        candidate = (
            draw_text(grammar, draw) if number % 2 else "".join(draw.choices(alphabet, k=draw.randrange(9)))
        )
        if number % 4 == 3 and candidate:
            position = draw.randrange(len(candidate))
            candidate = candidate[:position] + draw.choice(alphabet) + candidate[position + 1 :]
        is_good = parses(parser, candidate)
        assert accepts(grammar, candidate) == is_good, (candidate, is_good)
        num_good += is_good
    assert num_good


@pytest.mark.parametrize("text", ['start: start start | "a"', 'start: a* a*\na: "x"'])
def test_ambiguous_grammars_do_not_hang(text: str) -> None:
    started = time.process_time()
    matcher = compile(GrammarSpec.lark(text), TOKENIZER).start()
    row = np.zeros((TOKENIZER.vocab_size + 31) // 32, dtype=np.int32)
    for _ in range(3):
        assert matcher.forced_tokens() == []
        matcher.fill_mask(row)
        assert matcher.accept(97) or matcher.accept(120)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("text", "begin", "forced"),
    [
        ('start: "abcdef"', "", "abcdef"),
        ('start: "name" "is" ("日本" | "日語") "!"', "", "nameis日"),
        ('start: "a" | "b"', "", ""),
        ('start: "a"+', "a", ""),
        ('start: A "xyz"\nA: /[0-9]+/', "12x", "yz"),
    ],
)
def test_forced_runs_of_a_user_grammar_are_found(text: str, begin: str, forced: str) -> None:
    matcher = compile(GrammarSpec.lark(text), TOKENIZER).start()
    for token_id in TOKENIZER.encode_continuation(begin):
        assert matcher.accept(token_id)
    found = TOKENIZER.decode(matcher.forced_tokens())
    assert forced.startswith(found)  # a token that could merge with what follows is left out
    assert len(forced) - len(found) <= 1


def test_forced_runs_are_found_after_rollback_and_in_forks() -> None:
    matcher = compile(GrammarSpec.lark('start: ("abc" | "xyz") "end"'), TOKENIZER).start()
    assert matcher.accept(ord("a"))
    assert TOKENIZER.decode(matcher.forced_tokens()) == "bcend"
    fork = matcher.fork()
    matcher.rollback(1)
    assert matcher.forced_tokens() == []
    assert matcher.accept(ord("x"))
    assert TOKENIZER.decode(matcher.forced_tokens()) == "yzend"
    assert TOKENIZER.decode(fork.forced_tokens()) == "bcend"


def test_the_search_for_forced_runs_is_bounded() -> None:
    started = time.process_time()
    matcher = compile(GrammarSpec.lark('start: "abcdefghij"~100'), TOKENIZER).start()
    assert 0 < len(matcher.forced_tokens()) <= MAX_FORCED_BYTES
    for text in ('start: start start | "a"', 'start: a* a*\na: "x"'):
        compile(GrammarSpec.lark(text), TOKENIZER).start().forced_tokens()
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("start: /a+/ /a/", "line 1, column 8: the terminal /a[+]/ takes every character"),
        ("start: /ab*/ /b/", "line 1, column 8"),
        ('start: "x"\n  | foo', "line 2, column 5.*'foo' used but not defined"),
        ("%declare A\nstart: A", "only declared"),
        ("begin: /a/", "no rule named start"),
        ("start: (", "line 1"),
        ("start: /a|ab/", "line 1, column 8.*put longer alternatives first"),
        ("start: /a*/", "line 1, column 8.*matches the empty string"),
        ('start: "b"\n | /a\\b/', "line 2, column 4.*not supported"),
        ("start: a\na: a", "accepts no text"),
        ('start: a\na: "x" a', "line 1.*accepts no text"),
        ("%import .secret.A\nstart: A", "line 1.*not imported"),
        ("%import nowhere.A\nstart: A", "nowhere"),
        ('start: "a" /(?<=a)b/', "looks behind"),
        ("start: A B\nA: /[a-z]+/\nB: /[a-z]+[0-9]/\n", "line 2, column 4.*never ends"),
        ('start: A ("b" | "c") | "a" "ad"\nA: /a+b?/', "can end in several places"),
        ("start: \"a\"~3..2", "repeat from 3 to 2|Bad Range"),
        ("%llguidance {}\nstart: /a/", "line 1"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=place) as caught:
        compile(GrammarSpec.lark(text), TOKENIZER)
    assert caught.value.parameter == "grammar"


def test_templates_without_end_are_too_costly() -> None:
    with pytest.raises(GrammarTooCostly, match="templates"):
        compile(GrammarSpec.lark('start: t{"a"}\nt{x}: t{t{x}}'), TOKENIZER)


def test_a_declared_terminal_does_no_harm_where_nobody_uses_it() -> None:
    assert compile(GrammarSpec.lark('%declare A\nstart: "a"'), TOKENIZER).check("a")


def test_an_empty_grammar_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest):
        compile(GrammarSpec.lark("  \n"), TOKENIZER)


def test_larks_own_grammars_compile_or_are_refused_with_a_reason() -> None:
    folder = Path(lark.__file__).parent / "grammars"
    verdicts = {}
    for path in sorted(folder.glob("*.lark")):
        try:
            compile(GrammarSpec.lark(path.read_text(encoding="utf-8")), TOKENIZER)
            verdicts[path.name] = "compiled"
        except (UnsupportedGrammar, GrammarTooCostly) as error:
            verdicts[path.name] = str(error)
    assert set(verdicts) == {"common.lark", "lark.lark", "python.lark", "unicode.lark"}
    assert "no rule named start" in verdicts["common.lark"]
