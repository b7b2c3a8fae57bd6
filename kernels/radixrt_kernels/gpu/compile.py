"""Compile a kernel for sm_90 without a GPU and report what the machine code needs; which ones: production.py."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixrt_kernels.gpu.checks import is_interpreted

SM_90 = GPUTarget("cuda", 90, 32)
MAX_REGISTERS = 255
MAX_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile.

    Attributes:
        signature: the types of its run-time arguments; pointers and `aligned` integers are multiples of 16.
        constants: its constexpr arguments.
        reads_kv: it must load keys and values 128 bits at a time.
        needs_wgmma: it must use Hopper's matrix instruction.
        moves_128_bits: it must load and store 128 bits at a time.
        has_fp_fusion: products and sums may be fused.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ("stride_page",)
    reads_kv: bool = False
    needs_wgmma: bool = False
    moves_128_bits: bool = False
    has_fp_fusion: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """What a compiled kernel needs, per thread or per program; counts are of machine instructions.

    num_spills: loads and stores of local memory. The stack is no measure: an exact division has a frame.
    """

    name: str
    num_registers: int
    num_spills: int
    num_shared_bytes: int
    num_wgmma: int
    num_async_128: int
    num_async_narrow: int
    num_loads_128: int
    num_stores_128: int
    faults: list[str] = field(default_factory=list)


def compile_variant(variant: Variant) -> Report:
    """Compile one kernel and read its machine code.

    Raises:
        RuntimeError: Triton runs in its interpreter, which compiles nothing.
    Cost: 1 to 5 s; nothing when it is in Triton's cache.
    """
    if is_interpreted():
        raise RuntimeError("kernels cannot be compiled while TRITON_INTERPRET is set")
    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or (name in variant.aligned and name in variant.signature)
    }
    source = ASTSource(variant.kernel, signature, constants, attributes)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.has_fp_fusion,
    }
    compiled = triton.compile(source, target=SM_90, options=options)
    return _read(variant, compiled.asm["cubin"], compiled.metadata.shared)


def _read(variant: Variant, cubin: bytes, num_shared_bytes: int) -> Report:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = re.search(r"\bREG:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump told no resource usage: {usage[-200:]}")
    async_copies = re.findall(r"\bLDGSTS[.\w]*", code)
    report = Report(
        name=variant.name,
        num_registers=int(found[1]),
        num_spills=len(re.findall(r"\b(?:STL|LDL)\b", code)),
        num_shared_bytes=num_shared_bytes,
        num_wgmma=len(re.findall(r"\bHGMMA", code)),
        num_async_128=sum(".128" in copy for copy in async_copies),
        num_async_narrow=sum(".128" not in copy for copy in async_copies),
        num_loads_128=len(re.findall(r"\bLDG\.E[.\w]*128", code)),
        num_stores_128=len(re.findall(r"\bSTG\.E[.\w]*128", code)),
    )
    report.faults.extend(faults(variant, report))
    return report


def faults(variant: Variant, report: Report) -> Iterator[str]:
    """Give the rules that a compiled kernel breaks."""
    if report.num_spills:
        yield f"{report.num_spills} spills"
    if report.num_registers > MAX_REGISTERS:
        yield f"{report.num_registers} registers"
    if report.num_shared_bytes > MAX_SHARED_BYTES:
        yield f"{report.num_shared_bytes} bytes of shared memory"
    if variant.needs_wgmma and not report.num_wgmma:
        yield "no wgmma"
    if variant.reads_kv and not report.num_async_128 + report.num_loads_128:
        yield "no 128-bit loads of keys and values"
    if variant.moves_128_bits and not (report.num_loads_128 and report.num_stores_128):
        yield "no 128-bit loads and stores"
    # narrow asynchronous copies may fetch page ids, never keys and values
    if variant.reads_kv and report.num_async_narrow > report.num_async_128:
        yield f"{report.num_async_narrow} narrow copies beside {report.num_async_128} of 128 bits"
