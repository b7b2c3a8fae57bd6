"""A trace shows which parts of a value its constraint wrote, what masks took away and how long a call waited."""

import json
import shutil

import pytest
from pydantic import BaseModel

from frontend_lang import (
    EngineBackend,
    OpenAIBackend,
    Trace,
    assistant,
    cache_table,
    gen,
    program,
    select,
    user,
)
from frontend_lang.traces.tree import pieces
from radixrt import Engine, ForcedSpan, Origin
from tests.support.backends import ScriptedBackend
from tests.support.chat_server import chat, serving
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(120)


class Person(BaseModel):
    name: str
    age: int


@program
def form(s):
    s += "Fill in: " + gen("person", schema=Person, max_tokens=60, temperature=2.0, seed=4)
    s += "\nhttp:" + gen("healed", heal=True, regex="//[ab]{2}<end>", seed=1)
    s += select("verdict", choices=["good", "bad"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")
    with Engine(folder, dtype="float32", num_pages=600, page_size=4, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def result(engine):
    return form.with_options(engine=engine).run()


def forced_texts(call):
    return [piece.text for piece in pieces(call) if piece.is_forced]


def test_the_pieces_are_the_text_and_the_forced_ones_are_what_the_schema_says(result):
    person, healed, verdict = result.calls
    for call in result.calls:
        assert "".join(piece.text for piece in pieces(call)) == call.text
    assert any('age"' in text for text in forced_texts(person))
    assert forced_texts(healed) == ["//", "<end>"]
    assert forced_texts(verdict) == []
    assert sum(span.stop - span.start for span in person.origin.forced) == person.forced_tokens


def test_the_spans_of_a_healed_call_are_places_in_its_own_text(engine):
    call = form.with_options(engine=engine).run().calls[1]
    assert call.text.startswith("//")
    assert call.origin.forced[0].text_start == 0
    for span, text in zip(call.origin.forced, ("//", "<end>"), strict=True):
        assert call.text[span.text_start : span.text_stop] == text


def test_a_streamed_run_tells_the_same(engine, result):
    told = form.with_options(engine=engine).stream().result()
    assert [call.origin for call in told.calls] == [call.origin for call in result.calls]


def test_the_tree_marks_what_was_forced(result):
    lines = str(result.trace).splitlines()
    (line,) = [line for line in lines if "<end>" in line]
    ab = result["healed"][2:4]
    assert line.strip("│ ") == f"['//'] '{ab}' ['<end>']"
    head = next(line for line in lines if "gen person" in line)
    assert f", masked {result.calls[0].origin.masked_share:.0%}" in head
    assert ", queued 0.0" in head
    assert all(len(line) < 220 for line in lines)


def test_a_value_of_many_pieces_is_shown_by_its_ends():
    def every_second(text):
        return Origin(tuple(ForcedSpan(at, at + 1, at, at + 1) for at in range(0, len(text), 2)))

    @program
    def long(s):
        s += "a" + gen("x")

    trace = long.with_options(backend=ScriptedBackend(["ab" * 40], origin=every_second)).trace()
    shown = str(trace).splitlines()[-1]
    assert shown.strip() == "['a'] 'b' ['a'] 'b' ... ['a'] 'b' ['a'] 'b' (80 characters)"


def test_times_tell_the_wait(result):
    for call in result.calls:
        queued_s = result.trace.times(call.index).queued_s
        if call.kind == "select":
            assert queued_s is None
        else:
            assert 0 <= queued_s <= call.seconds


def test_it_is_saved_and_replayed_to_the_bit(result, tmp_path):
    result.trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert loaded == result.trace
    assert (str(loaded), loaded.html()) == (str(result.trace), result.trace.html())
    again = form.with_options(backend=loaded.replay()).run()
    assert [(call.origin, call.queued_s) for call in again.calls] == [
        (call.origin, call.queued_s) for call in result.calls
    ]


def test_a_trace_of_version_1_is_read_and_what_it_does_not_tell_is_unknown(result, tmp_path):
    def without(value):
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items() if key not in ("origin", "queued_s")}
        return [without(item) for item in value] if isinstance(value, list) else value

    result.trace.save(tmp_path / "trace.json")
    old = without(json.loads((tmp_path / "trace.json").read_text())) | {"version": 1}
    (tmp_path / "old.json").write_text(json.dumps(old))
    loaded = Trace.load(tmp_path / "old.json")
    assert loaded.text() == result.text()
    assert loaded.calls[0].forced_tokens is None
    assert "forced unknown" in str(loaded)
    assert form.with_options(backend=loaded.replay()).run().text() == result.text()


@program
def chatty(s):
    s += "Why? " + gen("answer")


def test_what_a_runtime_does_not_tell_is_unknown_and_not_zero():
    result = chatty.with_options(backend=ScriptedBackend(["ok"], origin=lambda text: None)).run()
    (call,) = result.calls
    assert call.forced_tokens is None
    assert str(result.trace).count("forced unknown") == 2  # of the run, and of the call
    page = result.trace.html()
    assert '<td data-count="forced">unknown</td>' in page
    assert "<th>masked share</th><td>unknown</td>" in page
    assert "<th>queued</th><td>unknown</td>" in page
    assert result.table().splitlines()[-1].split()[4] == "?"
    assert cache_table([result]).splitlines()[-1].split()[-2] == "?"


def test_a_chat_server_tells_nothing_of_it():
    @program
    def ask(s):
        s += user("Why?") + assistant(gen("answer"))

    with serving(chat("Because.")) as server:
        result = ask.with_options(backend=OpenAIBackend(server.url, "tiny")).run()
    (call,) = result.calls
    assert (call.origin, call.queued_s, call.forced_tokens) == (None, None, None)
    assert "forced unknown" in str(result.trace)


def test_a_runtime_that_tells_of_nothing_forced_says_0():
    result = chatty.with_options(backend=ScriptedBackend(["ok"])).run()
    assert result.calls[0].forced_tokens == 0
    assert "forced 0" in str(result.trace)


def test_samples_of_one_request_have_their_own(engine):
    @program
    def several(s):
        s += "x" + gen("x", n=3, regex="<[ab]+>", max_tokens=8, temperature=2.0, seed=3)

    backend = EngineBackend(engine)
    calls = several.with_options(backend=backend).run().calls
    assert len(calls) == 3
    for call in calls:
        assert forced_texts(call)[0] == "<"
        assert forced_texts(call)[-1].endswith(">") or call.text[-2:-1] in "ab"


def test_a_browser_shows_forced_text_apart(result, tmp_path):
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    (tmp_path / "trace.html").write_text(result.trace.html(), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto((tmp_path / "trace.html").as_uri())
        for call in result.calls:
            written = page.locator(f"[data-call='{call.index}'] + .written")
            assert written.text_content() == call.text
            assert written.locator(".forced").all_text_contents() == forced_texts(call)
        background = "one => getComputedStyle(one).backgroundColor"
        first = page.locator("[data-call='1'] + .written")
        forced, generated = first.locator(".forced").first, first.locator(".generated").first
        assert forced.evaluate(background) != generated.evaluate(background)
        browser.close()
