"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
import signal
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Without a GPU that torch can use, Triton interprets kernels on the host. It reads this when it is first imported,
# so it stands here; tests that compile kernels do so in a process of their own.
if not Path("/dev/nvidiactl").exists() or version("torch").endswith("+cpu"):
    os.environ["TRITON_INTERPRET"] = "1"


def _let_tensors_bound_loops() -> None:
    """Let a loop of an interpreted kernel end at a tensor: Triton before 3.9 asks numpy for int(array of one), which numpy
    refuses since 2.4. Later releases ask for the element, as is done here."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if (
    "TRITON_INTERPRET" in os.environ
    and find_spec("triton")
    and version("triton").startswith(("3.6.", "3.7.", "3.8."))
):
    _let_tensors_bound_loops()
# One compute thread: the models of the unit tests are tiny and the machine is shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No option of the developer's shell may change what the tests see; the folder of model files may.
for name in [name for name in os.environ if name.startswith("RADIXRT_") and name != "RADIXRT_HOME"]:
    del os.environ[name]

# A shell starts what runs in the background with Ctrl-C ignored; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--walk-operations",
        type=int,
        default=20_000,
        help="operations of each random walk (the long mode: 1000000)",
    )
    parser.addoption(
        "--fuzz-examples",
        type=int,
        default=60,
        help="random bodies per route of the server (the long mode: 2000)",
    )


@pytest.fixture
def num_walk_operations(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--walk-operations"))
