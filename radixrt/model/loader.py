"""A model folder -> a Decoder."""

from __future__ import annotations

from pathlib import Path

import torch

from radixrt.model.attention import TorchAttention
from radixrt.model.decoder import Decoder
from radixrt.model.spec import ModelSpec
from radixrt.model.weights import read_weights


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Load a folder that `catalog.resolve` gave: config.json and safetensors files.

    Raises:
        ModelLoadError: unsupported architecture or field; missing or corrupt file; unexpected tensor.
    """
    spec = ModelSpec.load(folder)
    weights = read_weights(folder, spec, device=device, dtype=dtype)
    return Decoder(spec, weights, TorchAttention())
