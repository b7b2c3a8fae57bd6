"""Programs cost no threads and little memory: 10,000 are alive at once. Times are measured by the bench, not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
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
