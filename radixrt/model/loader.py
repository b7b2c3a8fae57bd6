"""A model folder -> a decoder: in C++ on a CPU where it can be compiled, else in torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch

from radixrt.config import home_folder
from radixrt.errors import ModelLoadError
from radixrt.model.attention import AttentionBackend, TorchAttention, TritonAttention
from radixrt.model.decoder import Decoder
from radixrt.model.native import NativeDecoder
from radixrt.model.spec import ModelSpec
from radixrt.model.weights import read_weights

LOGGER = logging.getLogger(__name__)


def load_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Literal["auto", "torch", "native"] = "torch",
    num_threads: int | None = None,
    build_folder: Path | None = None,
) -> Decoder | NativeDecoder:
    """Load a folder that `catalog.resolve` gave: config.json and safetensors files.

    Args:
        kernels: native = the C++ step, for CPUs; torch = the reference, anywhere; auto = native on a CPU, Triton's
            attention on a CUDA device, and torch with one warning where these cannot be had.
        num_threads: threads of the native decoder; default: as many as torch uses now.
        build_folder: where compiled kernels are kept; default: `build` in radixrt's home folder.

    Raises:
        ModelLoadError: unsupported architecture or field; missing or corrupt file; unexpected tensor; native kernels
            asked for that cannot be had.
    """
    if kernels == "native" and device.type != "cpu":
        raise ModelLoadError(f"native kernels are for CPUs, the device is {device}")
    spec = ModelSpec.load(folder)
    weights = read_weights(folder, spec, device=device, dtype=dtype)
    if kernels == "torch":
        return Decoder(spec, weights, TorchAttention())
    if device.type != "cpu":
        return Decoder(spec, weights, device_attention(spec, device=device, dtype=dtype))
    try:
        return NativeDecoder.build(
            spec,
            weights,
            num_threads=num_threads or torch.get_num_threads(),
            build_folder=build_folder or home_folder() / "build",
        )
    except ModelLoadError as error:
        if kernels == "native":
            raise
        LOGGER.warning("%s; the slower torch decoder is used instead", error)
        return Decoder(spec, weights, TorchAttention())


def device_attention(spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Give the attention for a device other than a CPU; warns once when Triton's cannot be had on CUDA."""
    if device.type != "cuda":
        return TorchAttention()
    try:
        return TritonAttention(spec, dtype=dtype)
    except (ImportError, ValueError) as error:
        LOGGER.warning("%s; the slower torch attention is used instead", error)
        return TorchAttention()
