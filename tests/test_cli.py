"""The command line as a user runs it, on a tiny model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from radixrt.cli import app
from radixrt.errors import RadixrtError
from tests.support.models import tiny_model
from tests.support.threads import wait_until

ROOT = Path(__file__).parents[1]
PROGRAMS = """
from frontend_lang import gen, program, select

@program
def ask(s, question: str, times: int = 1):
    for _ in range(times):
        s += f"Q: {question} A: " + gen("answer", regex="[a-c]{2}", temperature=0)
    return {"times": times}

@program
def broken(s):
    s += "x"
    raise ZeroDivisionError("in the middle")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "mine.py"
    path.write_text(PROGRAMS)
    return path


def radixrt(*arguments, home=None, timeout=120):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    if home is not None:
        environment["RADIXRT_HOME"] = str(home)
    return subprocess.run(
        [sys.executable, "-m", "radixrt", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )


def engine_options(folder):
    return ("--model", folder, "--dtype", "float32", "--num-pages", "500")


def test_run_prints_transcript_values_and_table(folder, file):
    done = radixrt(
        "run", f"{file}:ask", "--arg", "question=why?", "--arg", "times=2", *engine_options(folder)
    )
    assert done.returncode == 0, done.stderr
    assert "Q: why? A: " in done.stdout
    assert "returned: {'times': 2}" in done.stdout
    assert "answer: " in done.stdout
    assert "cached" in done.stdout


def test_run_gives_one_json_object(folder, file):
    done = radixrt("run", f"{file}:ask", "--arg", "question=why?", "--json", *engine_options(folder))
    found = json.loads(done.stdout)
    assert found["value"] == {"times": 1}
    assert len(found["variables"]["answer"]) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{file}:aks", "--arg", "question=why?"], 'Did you mean "ask"'),
        (["{file}"], "say which program"),
        (["missing.py:ask"], "no such Python file"),
        (["{file}:ask"], "--arg question=..."),
        (["{file}:ask", "--arg", "quetsion=why?"], 'Did you mean "question"'),
        (["{file}:ask", "--arg", "question"], "name=value"),
        (["{file}:ask", "--arg", "question=a", "--arg", "times=two"], "must be JSON"),
        (["{file}:ask", "--arg", "question=a", "--page-size", "0"], "page_size must be in"),
    ],
)
def test_wrong_calls_are_one_error(folder, file, arguments, text):
    run = ["run", *[item.format(file=file) for item in arguments], "--model", str(folder)]
    with pytest.raises(RadixrtError) as caught:
        CliRunner().invoke(app, run, catch_exceptions=False)
    assert text in str(caught.value)


def test_error_is_one_line_without_traceback(file):
    done = radixrt("run", f"{file}:aks")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_error_of_a_users_program_shows_its_own_lines_only(folder, file):
    done = radixrt("run", f"{file}:broken", *engine_options(folder))
    assert done.returncode == 1
    assert "ZeroDivisionError: in the middle" in done.stderr
    assert 'mine.py", line 13' in done.stderr
    assert "asyncio" not in done.stderr
    assert "greenlet" not in done.stderr


def test_file_that_cannot_be_loaded_is_told(folder, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("import no_such_module\n")
    done = radixrt("run", f"{path}:ask", "--model", folder)
    assert done.returncode == 1
    assert "no_such_module" in done.stderr
    assert "importlib" not in done.stderr


def test_demo_runs_on_any_model(folder):
    done = radixrt("demo", *engine_options(folder))
    assert done.returncode == 0, done.stderr
    assert "def judge_review" in done.stdout
    assert "select advice" in done.stdout


def test_models_are_listed_and_removed(tmp_path):
    listed = radixrt("models", "list", home=tmp_path)
    assert "smollm2-135m" in listed.stdout
    gone = radixrt("models", "rm", "smollm2-135m", home=tmp_path)
    assert "was not here" in gone.stdout
    unknown = radixrt("models", "rm", "smollm3-135m", home=tmp_path)
    assert 'Did you mean "smollm2-135m"' in unknown.stderr


def test_doctor_names_what_is_missing_and_the_command_that_mends_it(tmp_path):
    done = radixrt("doctor", home=tmp_path)
    assert done.returncode == 1
    assert "radixrt models pull smollm2-135m" in done.stdout
    assert "torch: " in done.stdout


def test_doctor_names_a_model_folder_that_cannot_be_made(folder, tmp_path):
    (tmp_path / "file").write_text("")
    done = radixrt("doctor", "--model", folder, home=tmp_path / "file")
    assert done.returncode == 1
    assert (
        f"NO  model folder: {tmp_path}/file/models cannot be made: {tmp_path}/file is in the way"
        in done.stdout
    )


def test_doctor_is_content_with_a_local_folder(folder, tmp_path):
    done = radixrt("doctor", "--model", folder, home=tmp_path)
    assert done.returncode == 0, done.stdout


def test_options_lists_every_variable():
    assert "RADIXRT_PAGE_SIZE" in CliRunner().invoke(app, ["options"]).stdout


@pytest.mark.parametrize("library", ["_pydantic_core", "libtorch_cpu"])
def test_interrupt_ends_it_at_any_moment(folder, file, library):
    """From the moment on at which it is our code that runs: told by what has been loaded."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    arguments = [
        "run",
        f"{file}:ask",
        "--arg",
        "question=why?",
        "--arg",
        "times=4000",
        *engine_options(folder),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "radixrt", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    wait_until(lambda: library in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert "Traceback" not in stderr
