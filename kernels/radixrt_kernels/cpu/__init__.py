"""C++ kernels for CPUs: a whole decoder step in one call, compiled with g++ on first use (layouts: src/tile.h)."""

from radixrt_kernels.cpu.attention import CpuAttention
from radixrt_kernels.cpu.build import VARIANTS, BuildError, supported_variants
from radixrt_kernels.cpu.decoder import CpuDecoder, DecoderShape, LayerTensors
from radixrt_kernels.cpu.draw import DrawRow
from radixrt_kernels.cpu.library import Library, load_library

__all__ = [
    "VARIANTS",
    "BuildError",
    "CpuAttention",
    "CpuDecoder",
    "DecoderShape",
    "DrawRow",
    "LayerTensors",
    "Library",
    "load_library",
    "supported_variants",
]
