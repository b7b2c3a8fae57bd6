"""Which builds of the C++ kernels can be tried here."""

import ctypes

from radixrt_kernels.cpu import supported_variants
from radixrt_kernels.cpu.build import EMULATED_VARIANTS, VARIANTS, read_cpu_flags

VARIANTS_BY_NAME = {variant.name: variant for variant in (*VARIANTS, *EMULATED_VARIANTS)}
TILE_FLAGS = VARIANTS_BY_NAME["amx_bf16"].needs - VARIANTS_BY_NAME["avx512_bf16"].needs


def usable_flags():
    """Give the CPU's features, those of the matrix unit only where the system lets a process use it."""
    flags = read_cpu_flags()
    if flags & TILE_FLAGS and ctypes.CDLL(None).syscall(158, 0x1023, 18):
        return flags - TILE_FLAGS
    return flags


CPU_FLAGS = usable_flags()
VARIANT_NAMES = [variant.name for variant in supported_variants(CPU_FLAGS)]
# Those whose attention widens bfloat16 to floats (src/held.h).
WIDENING_NAMES = [
    variant.name
    for variant in supported_variants(CPU_FLAGS, (*VARIANTS, *EMULATED_VARIANTS))
    if "fp16" in variant.name.split("_")
]
# What this CPU may lack, in plain C++: the matrix unit, fastest first, and float16.
EMULATED = supported_variants(CPU_FLAGS, EMULATED_VARIANTS)
EMULATED_TILES = tuple(variant for variant in EMULATED if variant.name.startswith("amx"))
