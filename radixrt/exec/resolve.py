"""EngineConfig + this machine + this model -> ResolvedConfig, once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from radixrt.config import EngineConfig, KVConfig, ModelConfig
from radixrt.errors import InvalidRequest
from radixrt.kv.store import KVLayout
from radixrt.model.spec import ModelSpec

MAX_CPU_KV_BYTES = 4 << 30
FREE_MEMORY_SHARE = 0.25
GPU_MEMORY_SHARE = 0.8
NATIVE_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Every choice that was left open, made.

    Attributes:
        num_threads: CPU threads of the model.
        num_pages: pages of the pool, padding included.
        max_context: most tokens of a sequence, prompt and output together.
        num_token_ids: ids that both tokenizer and model have.
    """

    options: EngineConfig
    num_threads: int
    folder: Path
    device: torch.device
    dtype: torch.dtype
    layout: KVLayout
    num_pages: int
    max_context: int
    num_token_ids: int

    @property
    def num_kv_tokens(self) -> int:
        """Token positions that the pool holds."""
        return (self.num_pages - 1) * self.layout.page_size


def resolve_device(config: ModelConfig) -> torch.device:
    """Choose the device.

    Raises:
        InvalidRequest: cuda was asked for and is not there.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise InvalidRequest(
            "device must be cpu or auto here: no CUDA device was found", parameter="device", value="cuda"
        )
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def resolve_threads(config: ModelConfig) -> int:
    """Choose the number of CPU threads: as many as there are physical cores that this process may use."""
    if config.threads is not None:
        return config.threads
    num_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min(num_usable, psutil.cpu_count(logical=False) or num_usable), 1)


def resolve_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Choose the type of weights and KV: bfloat16 where the device multiplies it natively, else float32."""
    if config.dtype != "auto":
        return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    is_native = torch.cuda.is_bf16_supported() if device.type == "cuda" else bool(native_bfloat16_flags())
    return torch.bfloat16 if is_native else torch.float32


def native_bfloat16_flags() -> set[str]:
    """Give which bfloat16 instructions the CPU has (empty where that cannot be told)."""
    return cpu_flags() & NATIVE_BFLOAT16_FLAGS


def cpu_flags() -> set[str]:
    """Give the CPU's feature flags from /proc/cpuinfo; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return set()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(values.split())
    return set()


def resolve(
    options: EngineConfig, *, folder: Path, spec: ModelSpec, num_tokenizer_ids: int
) -> ResolvedConfig:
    """Make all open choices.

    Raises:
        InvalidRequest: options that contradict each other, the model or the machine.
    """
    device = resolve_device(options.model)
    dtype = resolve_dtype(options.model, device)
    layout = spec.kv_layout(page_size=options.kv.page_size, dtype=dtype)
    max_context = options.model.max_context or spec.max_context
    if max_context > spec.max_context:
        raise InvalidRequest(
            f"max_context must be at most the model's {spec.max_context}, got {max_context}",
            parameter="max_context",
            value=max_context,
        )
    return ResolvedConfig(
        options=options,
        num_threads=resolve_threads(options.model),
        folder=folder,
        device=device,
        dtype=dtype,
        layout=layout,
        num_pages=_num_pages(options.kv, layout, device, num_weight_bytes=spec.num_weights * dtype.itemsize),
        max_context=max_context,
        num_token_ids=min(spec.vocab_size, num_tokenizer_ids),
    )


def _num_pages(config: KVConfig, layout: KVLayout, device: torch.device, *, num_weight_bytes: int) -> int:
    if config.num_pages is not None and config.kv_memory_bytes is not None:
        raise InvalidRequest(
            "give num_pages or kv_memory_bytes, not both", parameter="num_pages", value=config.num_pages
        )
    if config.num_pages is not None:
        return config.num_pages
    num_bytes = config.kv_memory_bytes or _default_kv_bytes(device, num_weight_bytes)
    num_pages = num_bytes // layout.num_page_bytes
    if num_pages < 2:
        raise InvalidRequest(
            f"kv_memory_bytes must hold 2 pages of {layout.num_page_bytes} bytes, got {num_bytes}",
            parameter="kv_memory_bytes",
            value=num_bytes,
        )
    return num_pages


def _default_kv_bytes(device: torch.device, num_weight_bytes: int) -> int:
    """Give a share of the memory that is free; on a GPU the weights, which are not there yet, are set aside first."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free <= num_weight_bytes:
            raise InvalidRequest(
                f"the model's weights need {num_weight_bytes} bytes, the device has {free} free",
                parameter="model",
                value=num_weight_bytes,
            )
        return int((free - num_weight_bytes) * GPU_MEMORY_SHARE)
    return min(int(psutil.virtual_memory().available * FREE_MEMORY_SHARE), MAX_CPU_KV_BYTES)
