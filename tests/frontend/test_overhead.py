"""Programs cost no threads and little memory: 10,000 are alive at once. Times are measured by the bench, not here."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

from frontend_lang import gen, program
from tests.support.backends import ScriptedBackend

ROOT = Path(__file__).parents[2]


def test_ten_thousand_programs_are_alive_at_once_in_a_handful_of_threads():
    done = subprocess.run(
        [sys.executable, "-m", "frontend_lang.bench", "--rounds", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["num_alive"] == 10_000
    assert report["most_threads"] <= 10
    assert report["peak_rss_mb"] < 1024
    assert report["alive_s"] < 30


def test_a_run_that_has_ended_is_free_without_a_search_for_cycles():
    """Half of the time of small programs went into such searches."""
    alive = []

    @program
    def forked(s):
        s += "a" + gen("a")
        branches = s.fork(3)
        branches += "b" + gen("b")
        alive.extend(weakref.ref(state._branch) for state in (s, *branches))
        return [branch["b"] for branch in branches]

    gc.collect()
    gc.disable()
    try:
        result = forked.with_options(backend=ScriptedBackend()).run()
        assert [branch() for branch in alive] == [None] * 4
        assert result.value == ["ok"] * 3
        assert len(result.trace.branches) == 4
    finally:
        gc.enable()
