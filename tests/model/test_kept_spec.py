"""A kept spec is the one that the config gives, and spares importing transformers."""

import json
import os
import subprocess
import sys

import pytest

from radixrt.errors import ModelLoadError
from radixrt.model import spec as spec_module
from radixrt.model.kept_spec import load_spec
from radixrt.model.spec import ModelSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 24}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "defaults": LLAMA,
    "yarn": LLAMA | {"rope_parameters": YARN, "max_position_embeddings": 256},
    "windows": QWEN3 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
}


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def never(*arguments, **options):
    raise AssertionError("the config is read anew")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_kept_spec_is_that_of_the_config(tmp_path, monkeypatch, config):
    folder = write(tmp_path / "model", config)
    first = load_spec(folder, kept_in=tmp_path / "specs")
    monkeypatch.setattr(ModelSpec, "parse", never)
    kept = load_spec(folder, kept_in=tmp_path / "specs")
    monkeypatch.undo()
    assert kept == first == ModelSpec.load(folder)
    assert hash(kept) == hash(first)


def test_another_config_has_a_spec_of_its_own(tmp_path):
    for num_layers in (4, 3, 4):
        folder = write(tmp_path / "model", LLAMA | {"num_hidden_layers": num_layers})
        assert load_spec(folder, kept_in=tmp_path / "specs").num_layers == num_layers
    assert len(list((tmp_path / "specs").iterdir())) == 2


def test_other_code_reads_the_config_anew(tmp_path, monkeypatch):
    folder = write(tmp_path / "model", LLAMA)
    load_spec(folder, kept_in=tmp_path / "specs")
    changed = tmp_path / "spec.py"
    changed.write_text("# changed")
    monkeypatch.setattr(spec_module, "__file__", str(changed))
    monkeypatch.setattr(ModelSpec, "parse", never)
    with pytest.raises(AssertionError, match="anew"):
        load_spec(folder, kept_in=tmp_path / "specs")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"rope": 3}', '{"rope": {"inverse_frequencies": 1}}', "[" * 100_000]
)
def test_broken_kept_spec_is_made_anew(tmp_path, text):
    folder = write(tmp_path / "model", LLAMA)
    spec = load_spec(folder, kept_in=tmp_path / "specs")
    (kept,) = (tmp_path / "specs").iterdir()
    good = kept.read_text()
    kept.write_text(text)
    assert load_spec(folder, kept_in=tmp_path / "specs") == spec
    assert kept.read_text() == good


def test_folder_that_cannot_be_written_is_done_without(tmp_path):
    folder = write(tmp_path / "model", LLAMA)
    (tmp_path / "specs").write_text("a file")
    assert load_spec(folder, kept_in=tmp_path / "specs") == ModelSpec.load(folder)


def test_config_that_changes_while_it_is_read_is_not_kept_for_the_old_one(tmp_path, monkeypatch):
    folder = write(tmp_path / "model", LLAMA)
    parse = ModelSpec.parse

    def parse_late(*arguments, **options):
        write(folder, LLAMA | {"vocab_size": 7})
        return parse(*arguments, **options)

    monkeypatch.setattr(ModelSpec, "parse", parse_late)
    assert load_spec(folder, kept_in=tmp_path / "specs").vocab_size == 100
    monkeypatch.undo()
    assert load_spec(folder, kept_in=tmp_path / "specs").vocab_size == 7
    write(folder, LLAMA)
    assert load_spec(folder, kept_in=tmp_path / "specs").vocab_size == 100


def test_spec_of_another_kind_of_cpu_is_not_taken(tmp_path):
    """torch's pow rounds differently there: with this base and 128 dimensions between plain x86 and AVX2."""
    folder = write(tmp_path / "model", LLAMA | {"head_dim": 128, "rope_theta": 1e6})
    code = (
        "import pathlib\n"
        "from radixrt.model.kept_spec import load_spec\n"
        "from radixrt.model.spec import ModelSpec\n"
        f"folder, kept_in = pathlib.Path({str(folder)!r}), pathlib.Path({str(tmp_path / 'specs')!r})\n"
        "assert load_spec(folder, kept_in=kept_in) == ModelSpec.load(folder)\n"
    )
    for capability in ("default", "avx2"):
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_refused_config_is_refused_every_time(tmp_path):
    folder = write(tmp_path / "model", LLAMA | {"hidden_act": "gelu"})
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="hidden_act"):
            load_spec(folder, kept_in=tmp_path / "specs")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_spec(tmp_path / "none", kept_in=tmp_path / "specs")
    assert not (tmp_path / "specs").exists()


def test_transformers_is_not_imported_for_a_kept_spec(tmp_path):
    folder = write(tmp_path / "model", LLAMA)
    load_spec(folder, kept_in=tmp_path / "specs")
    code = (
        "import sys, pathlib, radixrt.engine\n"
        "from radixrt.model.kept_spec import load_spec\n"
        f"load_spec(pathlib.Path({str(folder)!r}), kept_in=pathlib.Path({str(tmp_path / 'specs')!r}))\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
