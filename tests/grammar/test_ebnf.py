"""GBNF: masks agree with a parser that tries every way to read a text, or the grammar is refused with its place."""

from __future__ import annotations

import random
import time
from functools import reduce
from itertools import chain, product
from typing import Any

import lark
import numpy as np
import pytest

from radixrt import GrammarSpec
from radixrt.config import GrammarConfig
from radixrt.errors import GrammarTooCostly, InvalidRequest, UnsupportedGrammar
from radixrt.grammar import CompiledGrammar, GrammarCache
from tests.support.tokenizers import JSON_MERGES, byte_tokenizer

TOKENIZER = byte_tokenizer(extra=JSON_MERGES)
CACHE = GrammarCache(TOKENIZER)

JSON = r"""
root   ::= object # the whole
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

# Name -> GBNF, the same for Lark (every terminal one character), and the characters of the random texts.
AGREE = {
    "literals": ('root ::= "yes" | "no"', 'start: "y" "e" "s" | "n" "o"', "yesno"),
    "greedy would fail": ('root ::= [a-z]+ "a"', 'start: /[a-z]/+ "a"', "ab1"),
    "left recursion": ('root ::= root "b" | "a"', 'start: start "b" | "a"', "ab"),
    "right recursion": ('root ::= "b" root | "a"', 'start: "b" start | "a"', "ab"),
    "through nothing": ('root ::= e e "x"\ne ::= "a"*', 'start: e e "x"\ne: "a"*', "ax"),
    "empty parts": ('root ::= ("" | "a")* "b"', 'start: "a"* "b"', "ab"),
    "counts": ('root ::= "a"{2} [bc]{1,3} "d"{2,}', 'start: "a"~2 /[bc]/~1..3 "d" "d" "d"*', "abcd"),
    "double repeat": ('root ::= ("a"{2})+ "b"?', 'start: ("a" "a")+ "b"?', "ab"),
    "classes": ('root ::= [^a-c\\n]+ [\\]x-] "."', 'start: /[^a-c\\n]/+ /[\\]x\\-]/ "."', "axz]-.\n"),
    "any": ('root ::= "(" .* ")"', 'start: "(" /(?s:.)/* ")"', "()a\n"),
    "keyword or name": (
        'root ::= "if" name | name "=" name\nname ::= [a-z]+',
        'start: "i" "f" name | name "=" name\nname: /[a-z]/+',
        "if=a",
    ),
    "alternatives below": (
        'root ::= (\n  "a"\n  | "b" # c\n)\n  | "c"\n\nx-1 ::= "d"',
        'start: "a" | "b" | "c"',
        "abcd",
    ),
    "escapes": (
        'root ::= "\\x41\\u00e9\\U0001F642\\t\\"\\\\" [\\x30-\\x32]',
        'start: "A" "é" "🙂" "\\t" "\\"" "\\\\" /[0-2]/',
        'Aé🙂\t"\\012',
    ),
    "a rule named start": ('root ::= start start\nstart ::= "a" | "b"', 'start: s s\ns: "a" | "b"', "ab"),
    "nesting": ('root ::= "(" root ")" | root root | ""', 'start: s?\ns: "(" s? ")" | s s', "()"),
    "arithmetic": (
        'root ::= (expr "=" term "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= ident | num | "(" expr ")"\n'
        'ident ::= [a-z] [a-z0-9_]*\nnum ::= [0-9]+',
        'start: (expr "=" term "\\n")+\nexpr: term (/[-+*\\/]/ term)*\nterm: ident | num | "(" expr ")"\n'
        "ident: /[a-z]/ /[a-z0-9_]/*\nnum: /[0-9]/+",
        "a1+=()\n",
    ),
    "dead branch": ('root ::= "a" | b\nb ::= "x" b | []', 'start: "a"', "abx"),
    "a rule that nobody uses": ('root ::= [a]\nb ::= root [xy]{2}', 'start: "a"', "axy"),
}  # fmt: skip


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.start()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.is_accepting


def allowed_ids(grammar_matcher: object) -> list[int]:
    row = np.zeros((TOKENIZER.vocab_size + 31) // 32, dtype=np.int32)
    grammar_matcher.fill_mask(row)  # type: ignore[attr-defined]
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def draw_text(grammar: CompiledGrammar, draw: random.Random) -> str:
    matcher, data = grammar.start(), b""
    for _ in range(draw.randrange(1, 12)):
        allowed = allowed_ids(matcher)
        if not allowed or (matcher.is_accepting and draw.random() < 0.3):
            break
        token_id = draw.choice(allowed)
        assert matcher.accept(token_id)
        data += TOKENIZER.vocab_bytes[token_id]
    if draw.random() < 0.5:
        data += b"".join(TOKENIZER.vocab_bytes[item] for item in matcher.closing_run(50) or [])
    return data.decode("utf-8", "ignore")


def parses(parser: lark.Lark, text: str) -> bool:
    try:
        parser.parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


@pytest.mark.parametrize("name", AGREE)
def test_masks_agree_with_every_way_to_read_a_text(name: str) -> None:
    ebnf, same, alphabet = AGREE[name]
    grammar = CACHE.get(GrammarSpec.ebnf(ebnf))
    parser = lark.Lark(same, parser="earley", lexer="dynamic_complete")
    draw, num_good = random.Random(7), 0
    for number in range(200):
        text = (
            draw_text(grammar, draw) if number % 2 else "".join(draw.choices(alphabet, k=draw.randrange(9)))
        )
        if number % 4 == 3 and text:
            place = draw.randrange(len(text))
            text = text[:place] + draw.choice(alphabet) + text[place + 1 :]
        is_good = parses(parser, text)
        assert accepts(grammar, text) == is_good, (text, is_good)
        num_good += is_good
    assert num_good


MAX_LENGTH = 4
REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1), "{2}": (2, 2), "{1,3}": (1, 3), "{2,}": (2, None), "{0,2}": (0, 2)}  # fmt: skip


def draw_part(draw: random.Random, depth: int, names: list[str]) -> tuple[Any, ...]:
    """Give a random part of a rule: its kind, then what it is made of."""
    kind = draw.choice(["text", "text", "class", "rule", *(["seq", "alt", "repeat"] * 2 if depth else [])])
    if kind in ("text", "class", "rule"):
        choices = {"text": ["a", "b", "ab", "ba", "aa", ""], "class": ["a", "b", "ab"], "rule": names}
        return kind, draw.choice(choices[kind])
    if kind == "repeat":
        return kind, draw_part(draw, depth - 1, names), draw.choice(list(REPEATS))
    return (kind, *(draw_part(draw, depth - 1, names) for _ in range(draw.randint(2, 3))))


def written(part: tuple[Any, ...]) -> str:
    kind, *rest = part
    if kind in ("text", "class", "rule"):
        return {"text": f'"{rest[0]}"', "class": f"[{rest[0]}]", "rule": rest[0]}[kind]
    if kind == "repeat":
        return f"({written(rest[0])}){rest[1]}"
    return f"({(' | ' if kind == 'alt' else ' ').join(map(written, rest))})"


def language(rules: dict[str, tuple[Any, ...]]) -> set[str]:
    """Give all short texts of the root, by rounds until nothing is new."""
    known: dict[str, frozenset[str]] = dict.fromkeys(rules, frozenset())

    def joined(left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
        return frozenset(one + other for one in left for other in right if len(one + other) <= MAX_LENGTH)

    def texts(part: tuple[Any, ...]) -> frozenset[str]:
        kind, *rest = part
        if kind in ("text", "class", "rule"):
            return {"text": frozenset({rest[0]}), "class": frozenset(rest[0])}.get(kind) or known[rest[0]]
        if kind == "alt":
            return frozenset().union(*map(texts, rest))
        if kind == "seq":
            return reduce(joined, map(texts, rest))
        (low, high), inner = REPEATS[rest[1]], texts(rest[0])
        ways = [frozenset({""})]
        for _ in range(MAX_LENGTH + low if high is None else high):
            ways.append(joined(ways[-1], inner))
        return frozenset().union(*ways[low:])

    while (found := {name: texts(part) for name, part in rules.items()}) != known:
        known = found
    return set(known["root"])


@pytest.mark.parametrize("seed", range(150))
def test_random_grammars_allow_their_texts_and_no_other(seed: int) -> None:
    draw = random.Random(seed)
    names = ["root", "x", "y"][: draw.randint(1, 3)]
    rules = {name: draw_part(draw, 3, names) for name in names}
    expected = language(rules)
    spec = GrammarSpec.ebnf("\n".join(f"{name} ::= {written(part)}" for name, part in rules.items()))
    try:
        grammar = CACHE.get(spec)
    except UnsupportedGrammar:  # it accepts no text at all
        assert not expected
        return
    everything = map("".join, chain(*(product("ab", repeat=length) for length in range(MAX_LENGTH + 1))))
    assert {text for text in everything if accepts(grammar, text)} == expected


@pytest.mark.parametrize("name", AGREE)
def test_a_bit_is_set_exactly_when_the_token_is_accepted(name: str) -> None:
    grammar, draw = CACHE.get(GrammarSpec.ebnf(AGREE[name][0])), random.Random(2)
    matcher = grammar.start()
    for _ in range(6):
        allowed = set(allowed_ids(matcher))
        for candidate in range(TOKENIZER.vocab_size):
            assert matcher.fork().accept(candidate) == (candidate in allowed)
        if not allowed:
            break
        assert matcher.accept(draw.choice(sorted(allowed)))


def test_the_json_grammar_of_llama_cpp() -> None:
    grammar = CACHE.get(GrammarSpec.ebnf(JSON))
    for text in ['{"a": [1, -2.5e3, "\\u00e9\\"", null]}', "{}", '{"日": {"": true}}', '{ "a":1 ,'][:3]:
        assert accepts(grammar, text), text
    for text in ["[]", '{"a": 01}', '{"a"}', '{"a": 1', '{"a": "\n"}']:
        assert not accepts(grammar, text), text


def test_a_way_to_the_end_is_found() -> None:
    matcher = CACHE.get(GrammarSpec.ebnf(JSON)).start()
    for token_id in TOKENIZER.encode_continuation('{"a": [1, {"b": "x'):
        assert matcher.accept(token_id)
    run = matcher.closing_run(50)
    assert run is not None
    assert all(map(matcher.accept, run))
    assert matcher.is_accepting


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('start ::= "a"', "no rule named root"),
        ('root ::= "a"\n  item', "line 2, column 7: ::= must stand here"),
        ("root ::= item", "line 1, column 10: the rule item is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is defined twice"),
        ('root ::= ("a"\n  | "b"', "line 1, column 10: the parenthesis is never closed"),
        ('root ::= "a', "line 1, column 10: the string is never closed"),
        ("root ::= [a", "line 1, column 10: the class is never closed"),
        ("root ::= [z-a]", "line 1, column 11: a range that ends before it begins"),
        ('root ::= "\\q"', r"line 1, column 11: the escape \\q is not known"),
        ('root ::= "\\x4"', "line 1, column 11.*2 hexadecimal digits"),
        ('root ::= "\\ud800"', "line 1, column 11.*no character"),
        ('root ::= "a"{,3}', "line 1, column 13: a repeat is written"),
        ('root ::= "a"{12345678901}', "line 1, column 13: a repeat is written"),
        ('root ::= "a"{3,2}', "line 1, column 13: a repeat from 3 to 2"),
        ('root ::= "a")', r"line 1, column 13: unexpected '\)'"),
        ("root ::= <think> [a-z]", "line 1, column 10: tokens of a vocabulary"),
        ("root ::= !<[10]>", "line 1, column 10: tokens of a vocabulary"),
        ('root ::= "x" root', "accepts no text"),
        ("root ::= []", "accepts no text"),
    ],
)
def test_what_is_not_translated_is_refused_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=reason) as caught:
        CACHE.get(GrammarSpec.ebnf(text))
    assert caught.value.parameter == "grammar"


def test_an_empty_grammar_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="rule named root"):
        CACHE.get(GrammarSpec.ebnf(" \n"))


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a"{1000000}',
        'root ::= ((("a"{1,50}){1,50}){1,50}){1,50}',
        'root ::= "a"' + "?" * 5000,
        "root ::= " + "(" * 90 + '"a"' + ")*+?{2}" * 90,
        "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
        "root ::= " + " ".join(['"abcdefgh"'] * 9000),
    ],
)
def test_large_grammars_are_refused_in_time(text: str) -> None:
    started = time.process_time()
    with pytest.raises(GrammarTooCostly):
        CACHE.get(GrammarSpec.ebnf(text))
    assert time.process_time() - started < 2


def test_ambiguity_does_not_hang() -> None:
    started = time.process_time()
    for text in ('root ::= root root | "a"', "root ::= ([a]*)*", 'root ::= ("a"* "a"*)* "b"'):
        matcher = CACHE.get(GrammarSpec.ebnf(text)).start()
        for _ in range(20):
            assert 97 in allowed_ids(matcher)
            assert matcher.accept(97)
    assert time.process_time() - started < 5


def test_the_limit_of_atoms_counts_written_out_repeats() -> None:
    cache = GrammarCache(TOKENIZER, config=GrammarConfig(max_grammar_atoms=100))
    with pytest.raises(GrammarTooCostly, match="max_grammar_atoms"):
        cache.get(GrammarSpec.ebnf('root ::= "ab"{60}'))
    assert cache.get(GrammarSpec.ebnf('root ::= "ab"{20}')).check("ab" * 20)
