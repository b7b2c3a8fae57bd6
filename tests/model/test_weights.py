"""Every tensor of a model folder is accounted for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.errors import ModelLoadError
from radixrt.memory import Arena
from radixrt.model.loader import load_model
from tests.support.models import tiny_model

CPU = torch.device("cpu")


def load(folder):
    return load_model(folder, device=CPU, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path):
    return tiny_model("llama", tmp_path)


@pytest.fixture
def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_missing_tensor_is_named(folder, tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_unexpected_tensor_is_named(folder, tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"unexpected tensors: model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        load(folder)


def test_shape_must_follow_the_config(folder, tensors):
    tensors["model.norm.weight"] = torch.ones(32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight must have shape \[64\].*got \[32\]"):
        load(folder)


def test_integer_weights_are_refused(folder, tensors):
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"unsupported type torch\.int8"):
        load(folder)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(folder, tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    assert load(folder).spec.num_layers == 3


def test_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder)


def test_absent_weights_are_an_error(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="neither"):
        load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "weights.bin", 3])
def test_index_names_only_safetensors_of_its_folder(folder, name):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="not a safetensors file of this folder"):
        load(folder)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": 3}', "[]"])
def test_broken_index_is_named(folder, index):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match="is not a readable index"):
        load(folder)


def test_missing_shard_is_named(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00001\.safetensors is missing"):
        load(folder)


def test_arena_cuts_disjoint_aligned_tensors():
    arena = Arena(7 + 12, 2, dtype=torch.float32, device=CPU)
    first, second = arena.cut((7,)), arena.cut((3, 4))
    first.fill_(1)
    second.fill_(2)
    assert first.eq(1).all()
    assert (second.data_ptr() - first.data_ptr()) % 64 == 0
    with pytest.raises(ValueError, match="the arena has"):
        arena.cut((100,))
