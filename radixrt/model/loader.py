"""A model folder -> a decoder: in C++ on a CPU, on Triton's kernels on a CUDA device, else in torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from radixrt.config import home_folder
from radixrt.errors import ModelLoadError
from radixrt.model.attention import TorchAttention
from radixrt.model.decoder import Decoder, DecoderWeights
from radixrt.model.kept_spec import load_spec
from radixrt.model.native import NativeDecoder
from radixrt.model.spec import ModelSpec
from radixrt.model.weights import read_weights

if TYPE_CHECKING:
    from radixrt.model.device_decoder import DeviceDecoder

AnyDecoder: TypeAlias = "Decoder | NativeDecoder | DeviceDecoder"
LOGGER = logging.getLogger(__name__)


def load_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Literal["auto", "torch", "native"] = "torch",
    num_threads: int | None = None,
    build_folder: Path | None = None,
    page_size: int = 16,
    max_context: int | None = None,
) -> AnyDecoder:
    """Load a folder that `catalog.resolve` gave: config.json and safetensors files.

    Args:
        kernels: native = the C++ step, for CPUs; torch = the reference, anywhere; auto = native on a CPU, Triton's
            kernels on a CUDA device, and torch with one warning where these cannot be had.
        num_threads: threads of the native decoder; default: as many as torch uses now.
        build_folder: where compiled kernels are kept; default: `build` in radixrt's home folder.
        page_size: of the pages that the model will be given.
        max_context: longest sequence that it will be given; default: the model's own limit.

    Raises:
        ModelLoadError: unsupported architecture or field; missing or corrupt file; unexpected tensor; native kernels
            asked for that cannot be had.
    """
    if kernels == "native" and device.type != "cpu":
        raise ModelLoadError(f"native kernels are for CPUs, the device is {device}")
    spec = load_spec(folder, kept_in=home_folder() / "specs")
    weights = read_weights(folder, spec, device=device, dtype=dtype)
    if kernels == "torch":
        return Decoder(spec, weights, TorchAttention())
    if device.type != "cpu":
        max_context = max_context or spec.max_context
        return device_decoder(spec, weights, device=device, page_size=page_size, max_context=max_context)
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


def device_decoder(
    spec: ModelSpec, weights: DecoderWeights, *, device: torch.device, page_size: int, max_context: int
) -> Decoder | DeviceDecoder:
    """Give the decoder for a device other than a CPU; warns once when Triton's kernels cannot be had on CUDA."""
    if device.type != "cuda":
        return Decoder(spec, weights, TorchAttention())
    try:
        from radixrt.model.device_decoder import DeviceDecoder
        from radixrt.model.device_kernels import refusals
    except ImportError as error:
        reasons = [f"Triton is missing ({error})"]
    else:
        reasons = refusals(spec, page_size=page_size)
        if not reasons:
            return DeviceDecoder(spec, weights, max_context=max_context)
    LOGGER.warning("%s; the slower torch decoder is used instead", "; ".join(reasons))
    return Decoder(spec, weights, TorchAttention())
