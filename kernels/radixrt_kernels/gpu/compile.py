"""Compile the kernels for sm_90 without a GPU and report what the machine code needs.

    python -m radixrt_kernels.gpu.compile [--all] [--json]

Exit status 1 when a kernel breaks a rule of `faults`. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixrt_kernels.gpu import configs
from radixrt_kernels.gpu.checks import is_interpreted
from radixrt_kernels.gpu.extend import extend_kernel
from radixrt_kernels.gpu.tree_decode import MERGE_PARTS, merge_parts_kernel, tree_decode_kernel

SM_90 = GPUTarget("cuda", 90, 32)
MAX_REGISTERS = 255
MAX_SHARED_BYTES = 227 * 1024
MIN_WGMMA_ROWS = 64
TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLAGS = {"HAS_WINDOW": False, "HAS_CAP": False}


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile.

    Attributes:
        signature: the types of its run-time arguments; pointers and `aligned` integers are multiples of 16.
        constants: its constexpr arguments.
        reads_kv: it must load keys and values 128 bits at a time.
        needs_wgmma: it must use Hopper's matrix instruction.
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


@dataclass(frozen=True, slots=True)
class Report:
    """What a compiled kernel needs, per thread or per program; counts are of machine instructions."""

    name: str
    num_registers: int
    num_spill_bytes: int
    num_shared_bytes: int
    num_wgmma: int
    num_async_128: int
    num_async_narrow: int
    num_loads_128: int
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
        if signature[name].startswith("*") or name in variant.aligned and name in variant.signature
    }
    source = ASTSource(variant.kernel, signature, constants, attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
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
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump told no resource usage: {usage[-200:]}")
    async_copies = re.findall(r"\bLDGSTS[.\w]*", code)
    report = Report(
        name=variant.name,
        num_registers=int(found[1]),
        num_spill_bytes=int(found[2]) + int(found[3]),
        num_shared_bytes=num_shared_bytes,
        num_wgmma=len(re.findall(r"\bHGMMA", code)),
        num_async_128=sum(".128" in copy for copy in async_copies),
        num_async_narrow=sum(".128" not in copy for copy in async_copies),
        num_loads_128=len(re.findall(r"\bLDG\.E[.\w]*128", code)),
    )
    report.faults.extend(faults(variant, report))
    return report


def faults(variant: Variant, report: Report) -> Iterator[str]:
    """Give the rules that a compiled kernel breaks."""
    if report.num_spill_bytes:
        yield f"{report.num_spill_bytes} bytes spilled"
    if report.num_registers > MAX_REGISTERS:
        yield f"{report.num_registers} registers"
    if report.num_shared_bytes > MAX_SHARED_BYTES:
        yield f"{report.num_shared_bytes} bytes of shared memory"
    if variant.needs_wgmma and not report.num_wgmma:
        yield "no wgmma"
    if variant.reads_kv and not report.num_async_128 + report.num_loads_128:
        yield "no 128-bit loads of keys and values"
    # narrow asynchronous copies may fetch page ids, never keys and values
    if variant.reads_kv and report.num_async_narrow > report.num_async_128:
        yield f"{report.num_async_narrow} narrow copies beside {report.num_async_128} of 128 bits"


def decode_variant(
    dtype: torch.dtype, head_dim: int, num_group_heads: int, page_size: int, **flags: bool
) -> Variant:
    """Give tree_decode for one production configuration, 8 kv heads."""
    config = configs.decode_config(dtype, head_dim, num_group_heads, page_size)
    name, kind = TYPE_NAMES[dtype], "".join(f" {flag.lower()}" for flag in flags)
    return Variant(
        f"tree_decode {name} D{head_dim} R{num_group_heads} page {page_size}{kind}",
        tree_decode_kernel,
        {
            **dict.fromkeys(("q", "kv", "out"), f"*{name}"),
            **dict.fromkeys(("partial", "partial_lse"), "*fp32"),
            **dict.fromkeys(("page_table", "items", "members"), "*i32"),
            "stride_page": "i32",
            **dict.fromkeys(("scale", "soft_cap"), "fp32"),
        },
        {
            "H": 8 * num_group_heads,
            "G": 8,
            "D": head_dim,
            "PAGE": page_size,
            "NARROW": config.narrow_rows,
            "WIDE": config.wide_rows,
            "TOKENS": config.block_tokens,
            "UPCAST": False,
            **FLAGS,
            **flags,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        reads_kv=True,
    )


def extend_variant(
    dtype: torch.dtype, head_dim: int, num_group_heads: int, page_size: int, **flags: bool
) -> Variant:
    """Give extend for one production configuration, 8 kv heads."""
    config = configs.extend_config(dtype, head_dim, num_group_heads, page_size)
    name, kind = TYPE_NAMES[dtype], "".join(f" {flag.lower()}" for flag in flags)
    return Variant(
        f"extend {name} D{head_dim} R{num_group_heads} page {page_size}{kind}",
        extend_kernel,
        {
            **dict.fromkeys(("q", "kv", "out"), f"*{name}"),
            **dict.fromkeys(("page_table", "tiles"), "*i32"),
            **dict.fromkeys(("stride_page", "window"), "i32"),
            **dict.fromkeys(("scale", "soft_cap"), "fp32"),
        },
        {
            "H": 8 * num_group_heads,
            "G": 8,
            "D": head_dim,
            "PAGE": page_size,
            "ROWS": config.block_rows,
            "TOKENS": config.block_tokens,
            "UPCAST": False,
            **FLAGS,
            **flags,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        reads_kv=True,
        needs_wgmma=dtype != torch.float32 and config.block_rows >= MIN_WGMMA_ROWS,
    )
