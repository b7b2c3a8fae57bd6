"""mypy --strict sees the typed values of a program."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("typed_programs.py")


def check(path, tmp_path):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            f"--cache-dir={tmp_path}",
            "--follow-imports=silent",
            path,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_mypy_strict_sees_every_value_and_every_mistake(tmp_path):
    done = check(PROGRAMS, tmp_path)
    assert done.returncode == 0, done.stdout
    mistakes = [
        's[gen("p", schema=Person)].nme',
        "typed.run(5)",
        'typed.run("q", quiet=True)',
        'gen("x", max_token=5)',
        'gen("x", temperature="hot")',
        's[gen("x", type=int)].upper()',
    ]
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from frontend_lang import State, gen\n"
        "from tests.frontend.typed_programs import Person, typed\n"
        "def wrong(s: State) -> None:\n" + "".join(f"    {line}\n" for line in mistakes)
    )
    done = check(wrong, tmp_path)
    lines = {line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line}
    assert lines == {str(4 + index) for index in range(len(mistakes))}, done.stdout
