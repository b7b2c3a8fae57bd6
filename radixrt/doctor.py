"""What this machine has, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from radixrt.config import EngineConfig
from radixrt.errors import RadixrtError, first_line
from radixrt.exec.resolve import cpu_flags, resolve_device, resolve_dtype, resolve_threads
from radixrt.model import catalog

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "gguf",
    "llguidance",
    "outlines-core",
    "lark",
    "greenlet",
    "pydantic",
)
OPTIONAL_PACKAGES = ("triton",)
WATCHED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        is_ok: False = something does not work until `remedy` is run.
        remedy: a command or an instruction, or "".
    """

    topic: str
    text: str
    is_ok: bool = True
    remedy: str = ""


def examine(config: EngineConfig, *, home: Path) -> Iterator[Finding]:
    """Give the findings in the order in which they matter. Changes: nothing; hashes the model's files."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        yield _package(name)
    for name in OPTIONAL_PACKAGES:
        yield _optional_package(name)
    yield from _machine(config)
    yield from _models(config, home)


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", is_ok=False, remedy=f"pip install {name}")


def _optional_package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing (optional, for GPUs)", remedy="pip install radixrt[gpu]")


def _machine(config: EngineConfig) -> Iterator[Finding]:
    try:
        device = resolve_device(config.model)
    except RadixrtError as error:
        yield Finding("device", first_line(error), is_ok=False, remedy="use --device cpu")
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    yield Finding("device", f"{device.type} ({name})")
    dtype = str(resolve_dtype(config.model, device)).removeprefix("torch.")
    yield Finding("dtype", f"{dtype} (option dtype = {config.model.dtype})")
    flags = cpu_flags()
    yield Finding("cpu features", " ".join(flag for flag in WATCHED_FLAGS if flag in flags) or "none of note")
    cores = psutil.cpu_count(logical=False)
    yield Finding("threads", f"{resolve_threads(config.model)} used, {cores} physical cores")
    memory = psutil.virtual_memory()
    yield Finding("memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free")
    compiler = shutil.which("g++")  # as the kernels are built
    missing = "none found: the slower torch decoder is used on a CPU"
    yield Finding("compiler", compiler or missing, remedy="" if compiler else "install g++")


def _model_folder(folder: Path) -> Finding:
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return Finding("model folder", str(folder))
    if folder.is_dir():
        return Finding("model folder", f"{folder}, which cannot be written: nothing can be fetched")
    remedy = "set RADIXRT_HOME to a folder that can be written"
    return Finding(
        "model folder", f"{folder} cannot be made: {place} is in the way", is_ok=False, remedy=remedy
    )


def _models(config: EngineConfig, home: Path) -> Iterator[Finding]:
    wanted = config.model.model
    yield _model_folder(home / "models")
    for entry in catalog.list_models(home):
        if entry.folder is None:
            continue
        try:
            catalog.resolve(entry.name, home=home)
        except RadixrtError as error:
            yield Finding(
                f"model {entry.name}",
                first_line(error),
                is_ok=False,
                remedy=f"radixrt models pull {entry.name}",
            )
        else:
            yield Finding(
                f"model {entry.name}", f"sound, {entry.num_bytes / 1e6:.0f} MB, from {entry.source}"
            )
    names = {entry.name for entry in catalog.list_models(home) if entry.folder is not None}
    if wanted not in names and not Path(wanted).exists():
        yield Finding(f"model {wanted}", "not here", is_ok=False, remedy=f"radixrt models pull {wanted}")
