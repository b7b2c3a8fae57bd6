"""Compile the C++ kernels on first use, once per source, compiler and kind of CPU."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent / "src"
MAIN_SOURCE = "api.cpp"
COMPILER = "g++"
# gnu++20: vector extension and waiting on atomics. Products and sums contract to one rounding wherever the CPU can,
# in every copy of a loop alike. Rows of bfloat16 are read as words.
FLAGS = (
    "-std=gnu++20",
    "-O3",
    "-ffp-contract=fast",
    "-fno-strict-aliasing",
    "-Wno-psabi",
    "-Wno-uninitialized",
)
LINK_FLAGS = ("-fPIC", "-shared", "-pthread")
COMPILE_TIMEOUT_S = 300


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the text says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile the source.

    Attributes:
        flags: what to tell the compiler about the CPU.
        needs: CPU features, as /proc/cpuinfo names them.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512_bf16", "avx512_vnni")
_AVX512_FP16 = (*_AVX512_BF16, "avx512_fp16")


def _variant(name: str, features: Sequence[str]) -> Variant:
    flags = tuple("-m" + feature.replace("avx512_", "avx512").replace("_", "-") for feature in features)
    return Variant(name, flags, frozenset(features))


def _emulated(name: str, features: Sequence[str], unit: str) -> Variant:
    variant = _variant(name, features)
    return replace(variant, flags=(*variant.flags, f"-DRADIXRT_EMULATE_{unit}"))


# Fastest first.
VARIANTS = (
    _variant("amx_bf16", (*_AVX512_BF16, "amx_tile", "amx_bf16")),
    _variant("avx512_fp16", _AVX512_FP16),
    _variant("avx512_bf16", _AVX512_BF16),
    _variant("avx512", _AVX512),
    _variant("avx2", _AVX2),
    _variant("plain", ()),
)


# Found by name only, for tests: the matrix unit of amx_bf16 (src/amx.h), and the float16 of avx512_fp16 (src/half.h), in
# plain C++, which is slow.
EMULATED_VARIANTS = (
    _emulated("amx_emulated", _AVX512_BF16, "AMX"),
    _emulated("amx_emulated_plain", (), "AMX"),
    _emulated("fp16_emulated", _AVX512, "FP16"),
)


def supported_variants(
    cpu_flags: Iterable[str], variants: Iterable[Variant] = VARIANTS
) -> tuple[Variant, ...]:
    """Give the variants that a CPU with these features can run, fastest first. Pure."""
    flags = frozenset(cpu_flags)
    return tuple(variant for variant in variants if variant.needs <= flags)


def read_cpu_flags() -> frozenset[str]:
    """Give this CPU's features from /proc/cpuinfo; empty where there is none or the CPU is not an x86-64."""
    path = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not path.is_file():
        return frozenset()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, values = line.partition(":")
        if name.strip() == "flags":
            return frozenset(values.split())
    return frozenset()


def choose_variants(name: str | None = None) -> tuple[Variant, ...]:
    """Give the named variant, or all that this CPU can run, fastest first: the next is for where one cannot be used.

    Raises:
        BuildError: no such variant, or the CPU lacks what it needs.
    """
    flags = read_cpu_flags()
    supported = supported_variants(flags)
    if name is None:
        return supported
    for variant in (*supported, *supported_variants(flags, EMULATED_VARIANTS)):
        if variant.name == name:
            return (variant,)
    raise BuildError(
        f"variant must be one of {', '.join(variant.name for variant in supported)} on this CPU, got {name!r}"
    )


def build(folder: Path, variant: Variant, *, compiler: str = COMPILER) -> Path:
    """Give the path of the compiled library, compiling it unless `folder` has it already.

    Safe beside other processes: each compiles into a file of its own, and the finished file is renamed.

    Raises:
        BuildError: no compiler, or it failed.
    Cost: some 20 seconds once, then a hash of the sources and one start of the compiler.
    """
    program = shutil.which(compiler)
    if program is None:
        raise BuildError(f"no C++ compiler: {compiler!r} was not found (Debian, Ubuntu: apt install g++)")
    command = [program, *FLAGS, *variant.flags, *LINK_FLAGS, str(SOURCE_FOLDER / MAIN_SOURCE)]
    path = folder / f"radixrt-cpu-{variant.name}-{_key(program, command)}.so"
    if path.is_file():
        return path
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=folder)
    except OSError as error:
        raise BuildError(f"the folder for compiled kernels cannot be written: {error}") from error
    os.close(descriptor)
    unfinished = Path(name)
    try:
        _run([*command, "-o", str(unfinished)])
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _key(program: str, command: Sequence[str]) -> str:
    """Hash everything that the compiled library depends on."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE_FOLDER.iterdir()):
        text = source.read_bytes()
        digest.update(f"{source.name} {len(text)}\n".encode())
        digest.update(text)
    digest.update(_run([program, "--version"]).encode())
    digest.update("\n".join(command).encode())
    return digest.hexdigest()[:16]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        first_lines = "\n".join(done.stderr.strip().splitlines()[:5])
        raise BuildError(f"{command[0]} failed with status {done.returncode}:\n{first_lines}")
    return done.stdout
