"""Stop strings around tool calls."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.text import Detokenizer
from radixrt.text.stopping import StopStrings, StopStringsAroundCalls
from radixrt.text.tool_forms import PLAIN_FORMS, ToolForm
from tests.support.tokenizers import byte_tokenizer
from tests.support.tool_models import TEMPLATES, tool_tokenizer
from tests.text.test_detokenizer import cut_at_stop

TOKENIZER = byte_tokenizer()
FORMS = {
    **{f"plain {name}": form for name, form in PLAIN_FORMS.items()},
    **{name: ToolForm.of(tool_tokenizer(template)) for name, template in TEMPLATES.items()},
}
PIECES = ["a", "b", " ", "\n", '"', "{", "}", "[", "]", "<", ">", "/", "<tool_c", "[TOOL", '{"name', "é"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
ARGUMENTS = st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS, max_size=2), max_size=2).map(json.dumps)
STOPS = st.lists(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)
    | st.sampled_from(["<tool_call>", "arguments", "}\n", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '": ', "f"]),
    min_size=1,
    max_size=3,
).map(tuple)  # fmt: skip


def stopped(parts, stop):
    """Cut an answer of (text, the calls behind it) at the first stop string in its text."""
    found, is_after_call = "", False
    for text, calls in parts:
        num_blank = len(text) - len(text.lstrip()) if is_after_call else 0
        for end in range(num_blank + 1, len(text) + 1):
            cut = cut_at_stop(text[:end], tuple(item for item in stop if text[:end].endswith(item)))
            if cut != text[:end]:
                return found + cut
        found += text + calls
        is_after_call = is_after_call or bool(calls)
    return found


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=150)
@given(
    st.lists(st.tuples(TEXTS, st.lists(ARGUMENTS, min_size=1, max_size=2)), max_size=2),
    TEXTS,
    STOPS,
    st.lists(st.integers(0, 300), max_size=12),
)
def test_stop_strings_end_the_text_around_calls_and_cut_none(name, answer, last, stop, cuts):
    form = FORMS[name]
    parts = []
    for text, calls in answer:
        written = form.written([("f", arguments) for arguments in calls[: 2 if form.is_list else 1]])
        parts.append((text, written))
    parts.append((last, ""))
    ids = [*"".join(text + calls for text, calls in parts).encode()]
    wanted = stopped(parts, stop)
    for edges in ([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)], range(len(ids) + 1)):
        detokenizer = Detokenizer(TOKENIZER, stop=stop, call_marks=form.marks)
        deltas = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise(edges)]
        assert "".join(delta.text for delta in deltas) + detokenizer.finish().text == wanted


@pytest.mark.parametrize("name", FORMS)
@given(st.lists(TEXTS, max_size=6), st.integers(0, 6), STOPS)
def test_a_text_without_calls_ends_as_one_that_can_have_none(name, texts, num_early, stop):
    found = []
    for stops in (StopStrings(stop), StopStringsAroundCalls(stop, FORMS[name].marks)):
        deltas = [stops.push(text, allow_stop=at >= num_early) for at, text in enumerate(texts)]
        found.append("".join(delta.text for delta in [*deltas, stops.push("", is_last=True)]))
    assert found[0] == found[1]


def test_a_call_is_given_as_it_is_written():
    form = PLAIN_FORMS["hermes"]
    detokenizer = Detokenizer(TOKENIZER, stop=('{"',), call_marks=form.marks)
    text = form.written([("f", '{"a": {"b": 1}}')])
    given_texts = [detokenizer.push([byte]).text for byte in text.encode()]
    assert given_texts[len(form.trigger) :] == list(text[len(form.trigger) :])


def test_a_call_that_is_cut_off_is_given_as_far_as_it_came():
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "b'
    detokenizer = Detokenizer(TOKENIZER, stop=("x", "bc"), call_marks=PLAIN_FORMS["hermes"].marks)
    assert detokenizer.push(list(text.encode())).text == text
    assert detokenizer.finish().text == ""


def test_what_might_have_begun_a_call_is_text_at_the_end():
    marks = PLAIN_FORMS["hermes"].marks
    detokenizer = Detokenizer(TOKENIZER, stop=("<tool",), call_marks=marks)
    assert detokenizer.push(list(b"a<tool_c")).text == "a"
    assert detokenizer.finish().text == ""
    other = Detokenizer(TOKENIZER, stop=("x",), call_marks=marks)
    assert other.push(list(b"a<tool_c")).text + other.finish().text == "a<tool_c"
