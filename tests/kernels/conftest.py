"""The C++ kernels of every variant that this CPU can run, compiled once per run of the suite."""

import shutil

import pytest
from radixrt_kernels.cpu import load_library
from radixrt_kernels.cpu.build import COMPILER

from radixrt.config import home_folder
from tests.support.variants import VARIANT_NAMES


@pytest.fixture(scope="session", params=VARIANT_NAMES)
def native_library(request):
    if shutil.which(COMPILER) is None:
        pytest.skip("no C++ compiler")
    return load_library(home_folder() / "build", variant=request.param)
