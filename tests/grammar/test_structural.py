"""Tagged texts: masks agree with a plain reading of the rules, with and without control tokens."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tokenizers

from radixrt import GrammarSpec, InvalidRequest, StructuralTag, UnsupportedGrammar
from radixrt.constraints import GrammarKind
from radixrt.errors import RequestError
from radixrt.grammar import CompiledGrammar, GrammarCache, GrammarMatcher, compile
from radixrt.text import Tokenizer
from tests.support.tokenizers import CHATML, JSON_MERGES, byte_tokenizer, sentencepiece_tokenizer


def controlled_tokenizer() -> Tokenizer:
    """Give a tokenizer with two control tokens that end nothing."""
    plain = byte_tokenizer(extra=(*JSON_MERGES, "<call>", "call>", "</call>", '"}', "}<"))
    backend = tokenizers.Tokenizer.from_str(plain.serialized())
    return Tokenizer(
        backend, special_tokens={"bos_token": OTHER, "eos_token": "<|im_end|>", "unk_token": CONTROL}
    )


CONTROL, OTHER = "<|endoftext|>", "<|im_start|>"
OTHER_ID, CONTROL_ID = 256, 258
TOKENIZER = controlled_tokenizer()
CACHE = GrammarCache(TOKENIZER)

NUMBERED = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
NUMBERED_PATTERN = r'\{"a": ?-?(?:0|[1-9][0-9]*)\}'


@dataclass(frozen=True)
class Structure:
    """Tags with their contents as regular expressions besides; the oracle reads these."""

    tags: tuple[tuple[str, GrammarSpec, str, str], ...]  # begin, grammar, pattern, end
    triggers: tuple[str, ...]
    options: dict[str, Any]

    @property
    def spec(self) -> GrammarSpec:
        tags = [StructuralTag(begin, grammar, end) for begin, grammar, _, end in self.tags]
        return GrammarSpec.structural(tags, triggers=self.triggers, **self.options)

    def conforms(self, text: str) -> bool:
        """Read a text from left to right."""
        is_free = self.options.get("free_text", True)
        least, most = self.options.get("min_tags", 0), self.options.get("max_tags")
        position = num_tags = 0
        while True:
            if is_free:
                places = [(text.find(trigger, position), trigger) for trigger in self.triggers]
                places = [place for place in places if place[0] >= 0]
                if not places:
                    return num_tags >= least
                position, trigger = min(places)
            elif position == len(text) and (num_tags or not least):
                return num_tags >= least
            elif num_tags:
                if not text.startswith(self.options["separator"], position):
                    return False
                position += len(self.options["separator"])
            if num_tags == most:
                return False
            ends = [
                end
                for begin, _, pattern, mark in self.tags
                if text.startswith(begin, position) and (not is_free or begin.startswith(trigger))
                for end in range(position + len(begin) + len(mark), len(text) + 1)
                if text.endswith(mark, 0, end)
                and re.fullmatch(pattern, text[position + len(begin) : end - len(mark)])
            ]
            if not ends:
                return False
            position, num_tags = min(ends), num_tags + 1


OPEN, CLOSE = "<call>", "</call>"
STRUCTURES = {
    "one": Structure(((OPEN, NUMBERED, NUMBERED_PATTERN, CLOSE),), (OPEN,), {}),
    "at least one": Structure(((OPEN, NUMBERED, NUMBERED_PATTERN, CLOSE),), (OPEN,), {"min_tags": 1}),
    "at most one": Structure(((OPEN, NUMBERED, NUMBERED_PATTERN, CLOSE),), (OPEN,), {"max_tags": 1}),
    "exactly two": Structure(
        ((OPEN, NUMBERED, NUMBERED_PATTERN, ""),), (OPEN,), {"min_tags": 2, "max_tags": 2}
    ),
    "functions": Structure(
        (
            ("<f=ab>", NUMBERED, NUMBERED_PATTERN, "</f>"),
            ("<f=abc>", GrammarSpec.regex("[a-c<]*"), "[a-c<]*", "</f>"),
            ("<g>", GrammarSpec.choice(["x", "xy", "<"]), "x|xy|<", "</g>"),
        ),
        ("<f=", "<g"),
        {},
    ),
    "prefix of a name": Structure(
        (("!ab", NUMBERED, NUMBERED_PATTERN, ";"), ("!abc", NUMBERED, NUMBERED_PATTERN, ";")), ("!",), {}
    ),
    "end inside": Structure((("(", GrammarSpec.regex(".*"), ".*", ")"),), ("(",), {"min_tags": 1}),
    "only one tag": Structure(
        ((OPEN, NUMBERED, NUMBERED_PATTERN, CLOSE), ("[", GrammarSpec.regex("[ab]+"), "[ab]+", "]")),
        (),
        {"free_text": False, "min_tags": 1, "max_tags": 1, "separator": ", "},
    ),
    "only tags": Structure(
        (
            (OPEN, NUMBERED, NUMBERED_PATTERN, CLOSE),
            ("[", GrammarSpec.regex("[ab]+"), "[ab]+", "]"),
        ),
        (),
        {"free_text": False, "min_tags": 1, "max_tags": 3, "separator": ", "},
    ),
    "one alone": Structure(
        ((OPEN, NUMBERED, NUMBERED_PATTERN, CLOSE),),
        (),
        {"free_text": False, "min_tags": 1, "max_tags": 1, "separator": ", "},
    ),
    "one or nothing": Structure(
        ((OPEN, NUMBERED, NUMBERED_PATTERN, CLOSE),),
        (),
        {"free_text": False, "max_tags": 1, "separator": ", "},
    ),
    "perhaps nothing": Structure(
        ((OPEN, NUMBERED, NUMBERED_PATTERN, CLOSE),), (OPEN,), {"free_text": False, "separator": "\n"}
    ),
}


def allowed_ids(matcher: GrammarMatcher, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    row = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def draw_text(grammar: CompiledGrammar, structure: Structure, draw: random.Random) -> str:
    """Give a text that the masks lead to, or its beginning; tags are begun on purpose now and then."""
    matcher, data = grammar.start(), b""
    for _ in range(draw.randrange(1, 40)):
        tokens = matcher.forced_tokens()
        if not tokens and draw.random() < 0.3:
            begin = draw.choice(structure.tags)[0]
            ids = TOKENIZER.encode_continuation(begin)
            tokens = ids if matcher.validate(ids) == len(ids) else []
        if not tokens and draw.random() < 0.3:
            tokens = matcher.closing_run(60) or []
        allowed = allowed_ids(matcher)
        if not tokens and not allowed:
            break
        for token_id in tokens or [draw.choice(allowed)]:
            assert matcher.accept(token_id)
            data += TOKENIZER.vocab_bytes[token_id]
    return data.decode("utf-8", "ignore")


@pytest.mark.parametrize("name", STRUCTURES)
def test_masks_agree_with_a_plain_reading(name: str) -> None:
    structure = STRUCTURES[name]
    grammar = CACHE.get(structure.spec)
    alphabet = sorted({*"".join(begin + end for begin, _, _, end in structure.tags), *'{"a": 1}<x'})
    draw, num_good, num_tagged = random.Random(5), 0, 0
    for number in range(300):
        text = draw_text(grammar, structure, draw) if number % 3 else "".join(draw.choices(alphabet, k=6))
        if number % 3 == 2 and text:
            place = draw.randrange(len(text))
            text = text[:place] + draw.choice(alphabet) + text[place + draw.randrange(2) :]
        is_good = structure.conforms(text)
        assert grammar.check(text) == is_good, (text, is_good)
        num_good += is_good
        num_tagged += is_good and any(begin in text for begin, *_ in structure.tags)
    assert num_good > 20
    assert num_tagged > 10


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("vocabulary", ["byte", "sentencepiece"])
def test_a_bit_is_set_exactly_when_the_token_is_accepted(name: str, vocabulary: str) -> None:
    tokenizer = TOKENIZER if vocabulary == "byte" else sentencepiece_tokenizer(extra=JSON_MERGES)
    cache = CACHE if vocabulary == "byte" else GrammarCache(tokenizer)
    structure = STRUCTURES[name]
    grammar, draw = cache.get(structure.spec), random.Random(name)
    opening = tokenizer.encode_continuation(structure.tags[0][0])
    matcher = grammar.start()
    for step in range(14):
        allowed = set(allowed_ids(matcher, tokenizer))
        for candidate in range(tokenizer.vocab_size):
            assert matcher.fork().accept(candidate) == (candidate in allowed), tokenizer.token_text(candidate)
        if step == 2 and matcher.validate(opening) == len(opening):
            assert all(map(matcher.accept, opening))
        elif allowed:
            assert matcher.accept(draw.choice(sorted(allowed)))


@pytest.mark.parametrize("is_in_template", [True, False])
def test_the_models_own_token_is_forced_where_it_is_no_control_token(is_in_template: bool) -> None:
    """Qwen adds <tool_call> as an ordinary token, which its template names."""
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.serialized())
    names = ["<tool_call>", "</tool_call>"]
    backend.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in names])
    template = CHATML + "{# " + " ".join(names) + " #}" if is_in_template else CHATML
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<|im_end|>"}, chat_template=template)
    opening, closing = (backend.token_to_id(name) for name in names)
    tag = StructuralTag("<tool_call>\n", GrammarSpec.choice(["xx", "xy"]), "\n</tool_call>")
    newline, letter = ord("\n"), ord("x")
    for free_text in (False, True):
        spec = GrammarSpec.structural(
            [tag], triggers=["<tool_call>"], min_tags=1, max_tags=1, free_text=free_text
        )
        matcher = compile(spec, tokenizer).start()
        run = matcher.closing_run(20)
        assert run is not None
        assert (run[0], run[-1]) == (opening, closing)
        if not free_text:
            assert matcher.forced_tokens() == [opening, newline, letter]
        for token_id in (opening, newline, letter, letter):
            assert matcher.accept(token_id)
        assert matcher.forced_tokens() == [newline, closing]
        assert matcher.accept(newline)
        assert matcher.accept(closing)
        assert matcher.is_accepting


def test_a_choice_spells_the_models_own_token() -> None:
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.serialized())
    backend.add_tokens([tokenizers.AddedToken("<tool_call>", special=False, normalized=False)])
    template = CHATML + "{# <tool_call> #}"
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<|im_end|>"}, chat_template=template)
    own = backend.token_to_id("<tool_call>")
    for spec in (GrammarSpec.choice(["a<tool_call>b"]), GrammarSpec.json_schema({"const": "<tool_call>"})):
        forced = compile(spec, tokenizer).start().forced_tokens()
        assert own in forced
        assert tokenizer.decode(forced) in ("a<tool_call>b", '"<tool_call>"')


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_way_to_the_end_is_known_everywhere(name: str) -> None:
    structure = STRUCTURES[name]
    grammar = CACHE.get(structure.spec)
    for seed in range(20):
        draw = random.Random(seed)
        matcher = grammar.start()
        ids = TOKENIZER.encode_continuation(draw_text(grammar, structure, draw))
        for token_id in ids[: draw.randrange(len(ids) + 1)]:
            if not matcher.accept(token_id):
                break
        run = matcher.closing_run(120)
        assert run is not None
        assert all(matcher.accept(token_id) for token_id in run)
        assert matcher.is_accepting


def test_a_way_to_the_end_takes_forced_tokens_as_masks_hold_them() -> None:
    """An end that is tried as a whole spells "ab" otherwise than the mask does, where the grammar forces it."""
    tags = [StructuralTag("<ab", NUMBERED, "a"), StructuralTag("[1", GrammarSpec.regex("[a<]{1,3}"), "a")]
    spec = GrammarSpec.structural(tags, triggers=["[", "<"], min_tags=2, free_text=False)
    matcher = CACHE.get(spec).start()
    for token_id in TOKENIZER.encode_continuation("[1"):
        assert matcher.accept(token_id)
    draw = random.Random(3)
    for _ in range(40):
        cursor = matcher.fork()
        for _ in range(draw.randrange(9)):
            if allowed := allowed_ids(cursor):
                assert cursor.accept(draw.choice(allowed))
        run = cursor.closing_run(60)
        assert run is not None
        assert cursor.validate(run) == len(run)


def controlled(**options: Any) -> CompiledGrammar:
    tag = StructuralTag(f"{CONTROL}f", NUMBERED, f"{CONTROL}{OTHER};")
    return CACHE.get(GrammarSpec.structural([tag], triggers=[CONTROL], **options))


def test_a_control_token_is_itself_and_never_spelled() -> None:
    grammar, ids = controlled(), TOKENIZER.encode_continuation
    matcher = grammar.start()
    whole = [*ids("hey"), CONTROL_ID, *ids('f{"a":1}'), CONTROL_ID, OTHER_ID, *ids("; hey")]
    assert matcher.validate(whole) == len(whole)
    assert matcher.validate(ids(CONTROL)) < len(ids(CONTROL))
    assert CONTROL_ID in allowed_ids(matcher)
    assert OTHER_ID not in allowed_ids(matcher)
    assert grammar.check(f'hey{CONTROL}f{{"a":1}}{CONTROL}{OTHER}; hey')
    assert not grammar.check(f'hey{CONTROL}f{{"a":1}};')


def test_a_run_of_control_tokens_is_forced() -> None:
    matcher = controlled().start()
    for token_id in (CONTROL_ID, *TOKENIZER.encode_continuation('f{"a":1}')):
        assert matcher.accept(token_id)
    assert matcher.forced_tokens()[:2] == [CONTROL_ID, OTHER_ID]
    assert matcher.explain_mask(CONTROL_ID).is_allowed
    assert matcher.explain_mask(CONTROL_ID).allowed_bytes == (CONTROL.encode(),)


@pytest.mark.parametrize("options", [{}, {"min_tags": 1}, {"min_tags": 2, "max_tags": 2}])
def test_every_bit_agrees_with_accept_for_control_tokens_too(options: dict[str, Any]) -> None:
    draw = random.Random(1)
    matcher = controlled(**options).start()
    for step in range(30):
        allowed = set(allowed_ids(matcher))
        for candidate in range(TOKENIZER.vocab_size):
            assert matcher.fork().accept(candidate) == (candidate in allowed), (step, candidate)
        if not allowed:
            break
        is_marked = CONTROL_ID in allowed and draw.random() < 0.5
        assert matcher.accept(CONTROL_ID if is_marked else draw.choice(sorted(allowed)))
    run = matcher.closing_run(100)
    assert run is not None
    assert all(map(matcher.accept, run))
    assert matcher.is_accepting


def test_after_the_last_tag_no_trigger_is_allowed() -> None:
    matcher = controlled(max_tags=1).start()
    for token_id in (CONTROL_ID, *TOKENIZER.encode_continuation('f{"a":1}'), CONTROL_ID, OTHER_ID, ord(";")):
        assert matcher.accept(token_id)
    assert matcher.is_accepting
    assert CONTROL_ID not in allowed_ids(matcher)


def test_a_vocabulary_without_the_token_spells_it() -> None:
    tag = StructuralTag("<|python_tag|>", NUMBERED, "<|eom|>")
    grammar = CACHE.get(GrammarSpec.structural([tag], triggers=["<|python_tag|>"]))
    assert grammar.check('hey<|python_tag|>{"a":1}<|eom|>')
    assert not grammar.check("hey<|python_tag|>")


def tag(begin: str, grammar: GrammarSpec = NUMBERED, end: str = ";") -> StructuralTag:
    return StructuralTag(begin, grammar, end)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: StructuralTag("", NUMBERED, ""), "begin must have 1 to"),
        (lambda: StructuralTag("x", GrammarSpec.regex("a"), ""), "end must have 1 to"),
        (lambda: StructuralTag("x", GrammarSpec.lark('start: "a"'), ";"), "got lark"),
        (lambda: GrammarSpec.structural([], triggers=["x"]), "tags must be a list of 1"),
        (lambda: GrammarSpec.structural([tag("x")], triggers=[]), "triggers must be a list"),
        (lambda: GrammarSpec.structural([tag("x")], triggers=["x", "y"]), "'y' begins no tag"),
        (lambda: GrammarSpec.structural([tag("x"), tag("y")], triggers=["x"]), "no trigger begins the tag 'y'"),
        (lambda: GrammarSpec.structural([tag("xy")], triggers=["xy", "x"]), "holds the trigger 'x'"),
        (lambda: GrammarSpec.structural([tag("x")], triggers=["x"], min_tags=2, max_tags=1), "max_tags must be"),
        (lambda: GrammarSpec.structural([tag("x")], triggers=["x"], max_tags=0), "max_tags must be"),
        (lambda: GrammarSpec.structural([tag("x")], triggers=["x"], separator=","), "separator needs free_text"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        make()


@pytest.mark.parametrize(
    ("tags", "triggers", "reason"),
    [
        ([tag("x"), tag("x")], ["x"], "cannot be told apart"),
        ([tag("x", GrammarSpec.regex("a"), ";"), tag("xa")], ["x"], "cannot be told apart"),
        ([tag("x"), tag("x1")], ["x"], "cannot be told apart"),
        ([tag("x<|im_end|>")], ["x"], "ends a sequence"),
        ([tag(f"x{CONTROL}")], [f"x{CONTROL}"], "must be its beginning"),
        ([tag("x", GrammarSpec.json_schema({"type": "integer"}), "0")], ["x"], "read as more of it"),
        ([tag("x", GrammarSpec.json_schema({"type": "number"}), "")], ["x"], "read as more of it"),
        ([tag("x", GrammarSpec.json_schema({"items": {"uniqueItems": True}}))], ["x"], "in the tag 'x'.*uniqueItems"),
        ([tag("x", GrammarSpec.regex("(a"))], ["x"], "in the tag 'x'"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_apart_is_refused(
    tags: list[StructuralTag], triggers: list[str], reason: str
) -> None:
    with pytest.raises(UnsupportedGrammar, match=reason):
        CACHE.get(GrammarSpec.structural(tags, triggers=triggers))


@pytest.mark.parametrize("kind", [5, None, [["x"]], [], {"number": 1}])
def test_a_type_that_is_none_is_refused(kind: object) -> None:
    spec = GrammarSpec.structural([tag("x", GrammarSpec.json_schema({"type": kind}))], triggers=["x"])
    with pytest.raises(InvalidRequest, match="in the tag 'x': not a JSON Schema at /type"):
        CACHE.get(spec)


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"tags": 1}', '{"tags": [{"begin": "x"}]}'])
def test_text_that_nobody_wrote_so_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        CACHE.get(GrammarSpec(GrammarKind.STRUCTURAL, text))


def test_tags_with_the_same_content_share_it() -> None:
    tags = [tag(f"<{number}>") for number in range(200)]
    grammar = CACHE.get(GrammarSpec.structural(tags, triggers=["<"]))
    assert grammar.check('a<199>{"a":1};b')
    assert not grammar.check('a<200>{"a":1};b')


def test_the_report_names_the_keywords_of_every_tag() -> None:
    report = CACHE.get(GrammarSpec.structural([tag("x")], triggers=["x"])).report
    assert report.keywords["/tags/0/grammar/properties"] == "mask"
