from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.text import Detokenizer
from tests.support.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer(extra=["abc", "bca", "日本", "🙂", "é", "end"])
# Few characters, so that stop strings match often; loose bytes, so that UTF-8 breaks.
IDS = st.lists(
    st.sampled_from([97, 98, 99, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 257])
    | st.integers(0, TOKENIZER.vocab_size - 1),
    max_size=25,
)
STOPS = st.lists(st.text("abc日é\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """Cut before the stop string that is complete first; of those complete together, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(item) for item in stop if text[:end].endswith(item)]
        if starts:
            return text[: min(starts)]
    return text


def run(ids: list[int], cuts: list[int], stop: tuple[str, ...]) -> str:
    detokenizer = Detokenizer(TOKENIZER, stop=stop)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    texts = [detokenizer.push(ids[start:end]).text for start, end in itertools.pairwise(edges)]
    return "".join(texts) + detokenizer.finish().text


@settings(max_examples=500)
@given(IDS, st.lists(st.integers(0, 25), max_size=6), STOPS)
def test_texts_add_up_for_every_way_to_cut(ids: list[int], cuts: list[int], stop: tuple[str, ...]) -> None:
    expected = cut_at_stop(TOKENIZER.decode(ids), stop)
    assert run(ids, cuts, stop) == expected
    assert run(ids, list(range(len(ids))), stop) == expected


@given(IDS)
def test_never_half_a_character(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    given_text = ""
    for count, token_id in enumerate(ids, 1):
        given_text += detokenizer.push([token_id]).text
        assert TOKENIZER.decode(ids[:count]).startswith(given_text)
    assert given_text + detokenizer.finish().text == TOKENIZER.decode(ids)


def test_no_part_of_a_stop_string_is_given() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=("abcd",))
    assert detokenizer.push([120, 97]).text == "x"
    assert detokenizer.push([98, 99]).text == ""
    delta = detokenizer.push([100, 101])
    assert (delta.text, delta.is_stopped) == ("", True)
    assert detokenizer.push([102]).text == ""
    assert detokenizer.finish().text == ""


def test_a_prefix_of_a_stop_string_is_given_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=("abcd",))
    assert detokenizer.push([97, 98]).text == ""
    assert detokenizer.finish().text == "ab"


def test_stop_strings_complete_before_min_tokens_are_text() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=("bb",))
    first = detokenizer.push([98, 98], allow_stop=False)
    second = detokenizer.push([99, 98])
    assert (first.text + second.text, first.is_stopped, second.is_stopped) == ("bbc", False, False)
    assert detokenizer.push([98]).is_stopped


def test_a_stop_string_may_begin_before_min_tokens() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=("bb",))
    assert detokenizer.push([97, 98], allow_stop=False).text == "a"
    delta = detokenizer.push([98])
    assert (delta.text, delta.is_stopped) == ("", True)


def test_special_tokens_have_no_text() -> None:
    assert Detokenizer(TOKENIZER).push([97, 257, 98]).text == "ab"


def test_shown_control_tokens_are_text() -> None:
    tokenizer = byte_tokenizer()
    ids = [*b"a", 256, *b"bc", 257]
    detokenizer = Detokenizer(tokenizer, stop=("c",), shown_ids=(256,))
    texts = [detokenizer.push([token_id]).text for token_id in ids]
    assert "".join(texts) + detokenizer.finish().text == "a<|im_start|>b"
