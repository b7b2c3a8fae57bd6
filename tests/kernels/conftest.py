"""The C++ kernels of every variant that this CPU can run, compiled once per run of the suite."""

import shutil

import pytest
from radixrt_kernels.cpu import load_library, supported_variants
from radixrt_kernels.cpu.build import COMPILER, read_cpu_flags

from radixrt.config import home_folder

VARIANT_NAMES = [variant.name for variant in supported_variants(read_cpu_flags())]


@pytest.fixture(scope="session", params=VARIANT_NAMES)
def native_library(request):
    if shutil.which(COMPILER) is None:
        pytest.skip("no C++ compiler")
    return load_library(home_folder() / "build", variant=request.param)
