"""What a config.json means, kept from one start to the next.

transformers knows the defaults and old spellings of every family, but takes 1.7 s to import: a third of the time to the first
token. So it is asked once for each config.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from radixrt.model import spec as spec_module
from radixrt.model.spec import ModelSpec, RopeSpec


def load_spec(folder: Path, *, kept_in: Path) -> ModelSpec:
    """Give `ModelSpec.load(folder)`, from `kept_in` if the same code has read the same config.json before.

    Args:
        kept_in: folder of kept specs; made when missing, done without where it cannot be written.
    Raises:
        ModelLoadError: as `ModelSpec.load`.
    """
    config_path = folder / "config.json"
    try:
        config = config_path.read_bytes()  # once: what is kept under its hash is made from the same bytes
    except OSError:
        return ModelSpec.load(folder)  # raises what it deserves
    path = kept_in / f"{_key(config)}.json"
    if spec := _read(path):
        return spec
    spec = ModelSpec.parse(config, path=config_path)
    with suppress(OSError):
        _write(path, spec)
    return spec


def _key(config: bytes) -> str:
    """Hash all that a spec depends on. Frequencies differ in their last bits from one kind of CPU to another."""
    code = Path(spec_module.__file__).read_bytes()
    versions = f"transformers {importlib.metadata.version('transformers')} torch {torch.__version__}"
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    parts = [hashlib.sha256(part).digest() for part in (config, code, versions.encode(), machine.encode())]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def _read(path: Path) -> ModelSpec | None:
    """Give the kept spec; None if there is none that can be read."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rope = RopeSpec(tuple(fields["rope"]["inverse_frequencies"]), fields["rope"]["magnitude"])
        return ModelSpec(**fields | {"rope": rope, "sliding_windows": tuple(fields["sliding_windows"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(path: Path, spec: ModelSpec) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(spec), file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
