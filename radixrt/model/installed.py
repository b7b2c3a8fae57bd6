"""Model folders in our cache: complete or absent, with a manifest that tells when a file has changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from radixrt.errors import ModelLoadError, first_line

MANIFEST_FILE = "manifest.json"
STAGING_PREFIX = ".partial-"
# A partial folder this old belongs to a process that died.
MAX_STAGING_AGE_S = 24 * 3600.0
# Up to this many bytes every file is hashed at every start (1.7 GB/s measured on one core with SHA instructions,
# 0.3 s for the default model). Larger models are hashed when a size or time stamp differs, and by `pull`.
MAX_ALWAYS_HASHED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was installed; `modified_ns` since the epoch."""

    num_bytes: int
    modified_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was installed, from where."""

    name: str
    source: str
    files: dict[str, FileRecord]

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files.values())


def install(target: Path, *, name: str, fill: Callable[[Path], str], is_replacing: bool = False) -> None:
    """Make the folder `target` in one step: other processes see all of it or nothing.

    Args:
        fill: writes the files into the folder it is given and returns the source's label.
        is_replacing: take the place of a folder that is there. Else, if another process installs the same
            model meanwhile, its folder stays and ours is dropped.
    Raises: what `fill` raises; ModelLoadError when the disk refuses. Nothing is left behind.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=target.parent))
    except OSError as error:
        raise ModelLoadError(f"{target.parent} cannot be written: {first_line(error)}") from error
    try:
        staging.chmod(0o755)
        write_manifest(staging, name=name, source=fill(staging))
        if is_replacing:
            discard(target)
        if not target.exists():
            _rename_unless_taken(staging, target)
    except OSError as error:
        raise ModelLoadError(f"{target} cannot be written: {first_line(error)}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def discard(folder: Path) -> bool:
    """Remove a folder in one step; tell whether there was one."""
    trash = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=folder.parent)) if folder.exists() else None
    if trash is None:
        return False
    try:
        folder.rename(trash / folder.name)
    except FileNotFoundError:  # another process was faster
        return False
    finally:
        shutil.rmtree(trash, ignore_errors=True)
    return True


def write_manifest(folder: Path, *, name: str, source: str) -> None:
    """Record every file of a folder. Cost: one read of all of them."""
    files = {path.name: _record(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST_FILE}
    manifest = asdict(Manifest(name, source, files))
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest.

    Raises:
        ModelLoadError: missing or not readable.
    """
    path = folder / MANIFEST_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        files = {name: FileRecord(**record) for name, record in values["files"].items()}
        return Manifest(str(values["name"]), str(values["source"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is missing or corrupt: {first_line(error)}") from error


def verify(folder: Path, *, is_thorough: bool = False, with_weights: bool = True) -> None:
    """Check that every file is as it was installed.

    Args:
        is_thorough: hash every file, whatever its size and time stamp.
        with_weights: False leaves the weight files out.
    Raises:
        ModelLoadError: a file is missing or has changed; the text names it.
    """
    manifest = read_manifest(folder)
    hashes_all = is_thorough or manifest.num_bytes <= MAX_ALWAYS_HASHED_BYTES
    for name, record in manifest.files.items():
        if not with_weights and name.endswith(".safetensors"):
            continue
        path = folder / name
        try:
            status = path.stat()
            if status.st_size != record.num_bytes:
                raise ModelLoadError(
                    f"{path} is corrupt: it has {status.st_size} bytes, expected {record.num_bytes}"
                )
            is_trusted = not hashes_all and status.st_mtime_ns == record.modified_ns
            if not is_trusted and _sha256(path) != record.sha256:
                raise ModelLoadError(f"{path} is corrupt: its sha256 has changed")
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {first_line(error)}") from error


def _rename_unless_taken(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        # A folder that is not empty is never overwritten: another process has installed the model.
        if not (target / MANIFEST_FILE).is_file():
            raise


def _record(path: Path) -> FileRecord:
    status = path.stat()
    return FileRecord(status.st_size, status.st_mtime_ns, _sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sweep(folder: Path) -> None:
    """Remove what processes that died have left."""
    for path in folder.glob(STAGING_PREFIX + "*"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - path.stat().st_mtime > MAX_STAGING_AGE_S:
                shutil.rmtree(path, ignore_errors=True)
