"""Options and fixtures of the whole suite."""

from __future__ import annotations

import os
import signal
from importlib.metadata import version
from pathlib import Path

import pytest

# Without a GPU that torch can use, Triton interprets kernels on the host. It reads this when it is first imported,
# so it stands here; tests that compile kernels do so in a process of their own.
if not Path("/dev/nvidiactl").exists() or version("torch").endswith("+cpu"):
    os.environ["TRITON_INTERPRET"] = "1"
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
