# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Copy whole pages, all layers in one launch: copy-on-write within a store, gather and scatter between stores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from radixrt_kernels.gpu.checks import check_device, check_tensor

BLOCK_WORDS = 4096
NUM_WARPS = 8
WORD_BYTES = 4
VECTOR_BYTES = 16


@triton.jit
def copy_pages_kernel(source, target, pairs, num_words, BLOCK: tl.constexpr):
    """One program per (pair, BLOCK words). A page is num_words consecutive 32-bit words."""
    pair = pairs + tl.program_id(0) * 2
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_word = word < num_words
    read_from = source + tl.load(pair).to(tl.int64) * num_words
    write_to = target + tl.load(pair + 1).to(tl.int64) * num_words
    tl.store(write_to + word, tl.load(read_from + word, mask=is_word), mask=is_word)


def copy_pages(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole pages of all layers.

    Args:
        source, target: [num_pages, ...] contiguous, equal page shape and dtype, one device; may be one store.
        pairs: (source page, target page); target pages distinct and, within one store, no source.
    Raises:
        ValueError: stores do not match, or pairs name a page that is not there or make the order of copies matter.
    Changes: target at the target pages.
    Cost: one launch and one small transfer; a page's bytes are read once and written once.
    """
    _check_stores(source, target)
    _check_pairs(pairs, len(source), len(target), source.data_ptr() == target.data_ptr())
    if pairs:
        copy_listed_pages(source, target, torch.tensor(pairs, dtype=torch.int32).to(source.device))


def copy_listed_pages(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole pages of all layers; what copy_pages checks of the pairs holds already.

    Args:
        pairs: [C, 2] int32 on the device: source page, target page.
    Raises:
        ValueError: stores do not match, or pairs are no such tensor.
    Changes: target at the target pages.
    Cost: one launch; a page's bytes are read once and written once.
    """
    _check_stores(source, target)
    check_tensor("pairs", pairs, shape=(None, 2), dtypes=(torch.int32,), device=source.device)
    if not len(pairs):
        return
    num_words = source[0].numel() * source.element_size() // WORD_BYTES
    copy_pages_kernel[(len(pairs), triton.cdiv(num_words, BLOCK_WORDS))](
        source.view(len(source), -1).view(torch.int32),
        target.view(len(target), -1).view(torch.int32),
        pairs,
        num_words,
        BLOCK=BLOCK_WORDS,
        num_warps=NUM_WARPS,
    )


def _check_stores(source: torch.Tensor, target: torch.Tensor) -> None:
    check_device("source", source)
    check_device("target", target, source.device)
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"target must have pages of {list(source.shape[1:])} {source.dtype}, "
            f"got {list(target.shape[1:])} {target.dtype}"
        )
    for name, store in (("source", source), ("target", target)):
        if not store.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {store.stride()}")
    page_bytes = source[0].numel() * source.element_size()
    if page_bytes % VECTOR_BYTES:
        raise ValueError(f"a page must be a multiple of {VECTOR_BYTES} bytes, got {page_bytes}")


def _check_pairs(
    pairs: Sequence[tuple[int, int]], num_sources: int, num_targets: int, is_one_store: bool
) -> None:
    targets = {target for _, target in pairs}
    if len(targets) != len(pairs):
        raise ValueError(f"pairs must have distinct target pages, got {list(pairs)}")
    for source, target in pairs:
        if not (0 <= source < num_sources and 0 <= target < num_targets):
            raise ValueError(
                f"pairs must name pages below {num_sources} and {num_targets}, got ({source}, {target})"
            )
        if is_one_store and source in targets:
            raise ValueError(f"pairs must not read a page that they write, got source {source}")
