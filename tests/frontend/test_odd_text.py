"""Text that is no Unicode is refused where it stands, and what failed of it can still be saved and shown."""

import pytest

from frontend_lang import ProgramError, Trace, assistant, gen, program, user
from radixrt import InvalidRequest
from tests.support.backends import ScriptedBackend
from tests.support.places import place

pytestmark = pytest.mark.timeout(60)

ODD = "caf\udce9"


@program
def says(s, text):
    s += "before"
    s += text
    s += gen("a")


@program
def says_in_a_message(s, text):
    s += user("before") + assistant("x")
    s += user(text)
    s += assistant(gen("a"))


@pytest.mark.parametrize(("each", "line"), [(says, "s += text"), (says_in_a_message, "s += user(text)")])
def test_text_that_is_no_unicode_fails_where_it_was_appended(each, line):
    backend = ScriptedBackend()
    with pytest.raises(ProgramError, match="text must be valid Unicode") as caught:
        each.with_options(backend=backend).run(ODD)
    assert caught.value.location == place(each, line)
    assert backend.requests == []


def test_a_name_that_is_no_unicode_is_refused():
    with pytest.raises(InvalidRequest, match="name must be valid Unicode"):
        gen(ODD)


@pytest.mark.parametrize("error", [OSError(f"no file {ODD}"), InvalidRequest(f"bad {ODD}", parameter="x")])
def test_a_failure_that_speaks_of_such_text_can_be_saved_and_shown(error, tmp_path):
    backend = ScriptedBackend(fail_at={0}, error=error)
    trace = says.with_options(backend=backend).trace("text")
    trace.save(tmp_path / "run.json")
    loaded = Trace.load(tmp_path / "run.json")
    assert r"caf\udce9" in loaded.error
    assert loaded == trace
    (tmp_path / "run.html").write_text(loaded.html(), encoding="utf-8")
    with pytest.raises(ProgramError, match=r"caf\\udce9"):
        says.with_options(backend=loaded.replay()).run("text")


def test_a_name_that_a_terminal_would_obey_is_shown_as_what_it_is():
    @program
    def named(s):
        s += "x" + gen("\x1b[2J\n")

    result = named.with_options(backend=ScriptedBackend()).run()
    for shown in (
        str(result.trace),
        result.table(),
        str(named.with_options(backend=ScriptedBackend()).dry_run()),
    ):
        assert r"gen '\x1b[2J\n'" in shown
        assert "\x1b" not in shown
