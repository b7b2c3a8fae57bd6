"""Argument checks of the GPU kernels: every error names the argument, what was expected and what came."""

from __future__ import annotations

import torch
import triton

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT_LIMIT = 2**31


def is_interpreted() -> bool:
    """Tell whether Triton interprets kernels on the host instead of compiling them (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


def needs_upcast(dtype: torch.dtype) -> bool:
    """Tell whether products must be taken in float32: the interpreter multiplies the raw bits of bfloat16."""
    return dtype == torch.bfloat16 and is_interpreted()


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    is_contiguous: bool = True,
) -> None:
    """Raise ValueError unless a tensor is what a kernel reads.

    Args:
        shape: None stands for any size.
        device: where it must live; None checks only that kernels run there.
        is_contiguous: all dimensions but the first, whose stride kernels are told, must be dense.
    """
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(want not in (None, size) for want, size in zip(shape, got, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{expected}], got {list(got)}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {expected}, got {tensor.dtype}")
    check_device(name, tensor, device)
    inner = tensor if is_contiguous or tensor.dim() < 2 or not len(tensor) else tensor[0]
    if not inner.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} for shape {list(got)}")


def check_device(name: str, tensor: torch.Tensor, device: torch.device | None = None) -> None:
    """Raise ValueError unless a kernel can reach the tensor."""
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if tensor.device.type != "cuda" and not is_interpreted():
        raise ValueError(f"{name} must be on a CUDA device, got {tensor.device}")


def check_kv_layer(kv_layer: torch.Tensor, q: torch.Tensor) -> None:
    """Raise ValueError unless q [T, H, D] can attend to kv_layer [num_pages, 2, page_size, G, D]."""
    check_tensor("q", q, shape=(None, None, None), dtypes=FLOAT_DTYPES)
    _, num_heads, head_dim = q.shape
    check_tensor(
        "kv_layer",
        kv_layer,
        shape=(None, 2, None, None, head_dim),
        dtypes=(q.dtype,),
        device=q.device,
        is_contiguous=False,
    )
    page_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    if num_heads % num_kv_heads:
        raise ValueError(f"q must have a multiple of {num_kv_heads} heads, got {num_heads}")
    check_page_size(page_size)


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless positions split into page and offset by shifts."""
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")


def check_window(sliding_window: int | None) -> None:
    if sliding_window is not None and not 1 <= sliding_window < INT_LIMIT:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")


def check_soft_cap(soft_cap: float | None) -> None:
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"soft_cap must be a positive number, got {soft_cap}")
