"""The kernels as they are used, each compiled for sm_90 without a GPU.

    python -m radixrt_kernels.gpu.production [--all] [--json]

Prints a line per kernel; exit status 1 when one breaks a rule of compile.faults. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch

from radixrt_kernels.gpu import configs, copy_pages, rope_write, rows, sample, tree_decode
from radixrt_kernels.gpu.compile import Report, Variant, compile_variant
from radixrt_kernels.gpu.extend import extend_kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPE_NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
NUM_KV_HEADS = 8
NUM_WGMMA_ROWS = 64  # Hopper's matrix instruction takes at least so many rows
GROUPS = (1, 3, 4, 8)
PAGE_SIZES = (1, 16, 64)
NO_FLAGS = {"HAS_WINDOW": False, "HAS_CAP": False}
FLAGS = {"HAS_WINDOW": True, "HAS_CAP": True}


def decode_variant(
    dtype: torch.dtype, head_dim: int, num_group_heads: int, page_size: int, flags: dict[str, bool]
) -> Variant:
    """Give tree_decode with its production tiles. Pure."""
    config = configs.decode_config(dtype, head_dim, num_group_heads, page_size)
    tiles = {"NARROW": config.narrow_rows, "WIDE": config.wide_rows, "TOKENS": config.block_tokens}
    return Variant(
        _name("tree_decode", dtype, head_dim, num_group_heads, page_size, flags),
        tree_decode.tree_decode_kernel,
        {
            **_attention_signature(dtype),
            **dict.fromkeys(("partial", "partial_lse"), "*fp32"),
            **dict.fromkeys(("items", "members"), "*i32"),
        },
        {**_shape(head_dim, num_group_heads, page_size), **tiles, **flags, "UPCAST": False},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        reads_kv=True,
    )


def extend_variant(
    dtype: torch.dtype, head_dim: int, num_group_heads: int, page_size: int, flags: dict[str, bool]
) -> Variant:
    """Give extend with its production tiles. Pure."""
    config = configs.extend_config(dtype, head_dim, num_group_heads, page_size)
    tiles = {"ROWS": config.block_rows, "TOKENS": config.block_tokens}
    return Variant(
        _name("extend", dtype, head_dim, num_group_heads, page_size, flags),
        extend_kernel,
        {**_attention_signature(dtype), "tiles": "*i32", "window": "i32"},
        {**_shape(head_dim, num_group_heads, page_size), **tiles, **flags, "UPCAST": False},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        reads_kv=True,
        needs_wgmma=dtype != FP32 and config.block_rows >= NUM_WGMMA_ROWS,
    )


def _name(
    kernel: str,
    dtype: torch.dtype,
    head_dim: int,
    num_group_heads: int,
    page_size: int,
    flags: dict[str, bool],
) -> str:
    extra = "".join(f" {flag.lower()}" for flag, is_set in flags.items() if is_set)
    return f"{kernel} {TYPE_NAMES[dtype]} D{head_dim} R{num_group_heads} page {page_size}{extra}"


def _attention_signature(dtype: torch.dtype) -> dict[str, str]:
    return {
        **dict.fromkeys(("q", "kv", "out"), f"*{TYPE_NAMES[dtype]}"),
        "page_table": "*i32",
        "stride_page": "i32",
        **dict.fromkeys(("scale", "soft_cap"), "fp32"),
    }


def _shape(head_dim: int, num_group_heads: int, page_size: int) -> dict[str, int]:
    return {"H": NUM_KV_HEADS * num_group_heads, "G": NUM_KV_HEADS, "D": head_dim, "PAGE": page_size}


def merge_variant(dtype: torch.dtype, head_dim: int) -> Variant:
    """Give the second kernel of tree_decode. Pure."""
    return Variant(
        f"merge_parts {TYPE_NAMES[dtype]} D{head_dim}",
        tree_decode.merge_parts_kernel,
        {
            **dict.fromkeys(("partial", "partial_lse"), "*fp32"),
            "out": f"*{TYPE_NAMES[dtype]}",
            "merges": "*i32",
        },
        {"H": 32, "D": head_dim, "PARTS": tree_decode.MERGE_PARTS},
        num_warps=tree_decode.MERGE_WARPS,
    )


def row_variants(dtype: torch.dtype) -> Iterator[Variant]:
    """Give the kernels over rows of activations, for hidden sizes of 4096 and 576. Pure."""
    name = TYPE_NAMES[dtype]
    for head_dim, has_norm in ((128, False), (64, True)):
        yield Variant(
            f"rope_write {name} D{head_dim}{' norm' * has_norm}",
            rope_write.rope_write_kernel,
            {
                **dict.fromkeys(("qkv", "q_out", "kv", "qk_norm"), f"*{name}"),
                **dict.fromkeys(("slots", "positions"), "*i64"),
                "rotation": "*fp32",
                **dict.fromkeys(("stride_token", "stride_page"), "i32"),
                "epsilon": "fp32",
            },
            {**_shape(head_dim, 4, 16), "HEADS": rope_write.BLOCK_HEADS, "HAS_NORM": has_norm},
            num_warps=rope_write.rope_warps(head_dim),
            aligned=("stride_token", "stride_page"),
            moves_128_bits=True,
        )
    for block, has_residual in ((4096, True), (1024, False)):
        yield Variant(
            f"add_norm {name} {block}{' residual' * has_residual}",
            rows.add_norm_kernel,
            {
                **dict.fromkeys(("x", "residual", "weight", "out"), f"*{name}"),
                "num_columns": "i32",
                "epsilon": "fp32",
            },
            {"BLOCK": block, "HAS_RESIDUAL": has_residual},
            num_warps=rows.norm_warps(block),
            aligned=("num_columns",),
            moves_128_bits=True,
        )
    yield Variant(
        f"silu_mul {name}",
        rows.silu_mul_kernel,
        {**dict.fromkeys(("gate_up", "out"), f"*{name}"), "num_columns": "i32"},
        {"BLOCK": rows.SILU_BLOCK},
        aligned=("num_columns",),
        moves_128_bits=True,
    )


def copy_variant() -> Variant:
    """Give copy_pages, which sees words whatever the dtype. Pure."""
    return Variant(
        "copy_pages",
        copy_pages.copy_pages_kernel,
        {**dict.fromkeys(("source", "target", "pairs"), "*i32"), "num_words": "i32"},
        {"BLOCK": copy_pages.BLOCK_WORDS},
        num_warps=copy_pages.NUM_WARPS,
        aligned=("num_words",),
        moves_128_bits=True,
    )


def sample_variants(dtype: torch.dtype) -> Iterator[Variant]:
    """Give the sampler's two kernels for logits of this type and up to 262,144 tokens. Pure."""
    name, floats = TYPE_NAMES[dtype], ("adjusted", "chunk_top", "raw_top", "raw_sum")
    shared = {
        "logits": f"*{name}",
        **dict.fromkeys(floats, "*fp32"),
        "chunk_best": "*i32",
        "chunk_sum": "*fp64",
    }
    sizes = dict.fromkeys(("stride_logits", "num_columns", "num_tokens", "num_chunks"), "i32")
    tables = ("mask", "mask_rows", "bias_rows", "output_counts", "prompt_bits", "penalty_rows")
    yield Variant(
        f"sample adjust {name}",
        sample.adjust_kernel,
        {**shared, **dict.fromkeys(tables, "*i32"), "bias": "*fp32", "numbers": "*fp64", **sizes},
        {"CHUNK": sample.CHUNK, "CHUNKS": sample.BLOCK_CHUNKS},
        num_warps=sample.ADJUST_WARPS,
        aligned=("stride_logits", "num_tokens"),
        moves_128_bits=True,
        has_fp_fusion=False,
    )
    for num_chunks in (1024, 2048):
        yield Variant(
            f"sample draw {name} {num_chunks} chunks",
            sample.draw_kernel,
            {
                **shared,
                **dict.fromkeys(("values", "logprobs", "bests"), "*fp32"),
                **dict.fromkeys(("ids", "chunk_list", "top_ks"), "*i32"),
                **dict.fromkeys(("keys", "token_ids"), "*i64"),
                "numbers": "*fp64",
                **{key: kind for key, kind in sizes.items() if key != "num_columns"},
            },
            {
                "CHUNK": sample.CHUNK,
                "CHUNKS": num_chunks,
                "GROUP": sample.DRAW_GROUP,
                "BLOCK": sample.DRAW_BLOCK,
            },
            num_warps=sample.DRAW_WARPS,
            aligned=("stride_logits", "num_tokens"),
            has_fp_fusion=False,
        )


def usual_variants() -> Iterator[Variant]:
    """Give one or two of each kernel: what every run of the suite compiles. Pure."""
    yield decode_variant(BF16, 128, 4, 16, NO_FLAGS)
    yield extend_variant(BF16, 128, 4, 16, NO_FLAGS)
    yield extend_variant(BF16, 64, 3, 16, FLAGS)
    yield merge_variant(BF16, 128)
    yield from row_variants(BF16)
    yield copy_variant()
    yield from sample_variants(BF16)


def all_variants() -> Iterator[Variant]:
    """Give every entry of the tables: every group and page size in bfloat16, one of each in the other types. Pure."""
    for attention in (decode_variant, extend_variant):
        for head_dim in configs.HEAD_DIMS:
            for num_group_heads in GROUPS:
                for page_size in PAGE_SIZES:
                    yield attention(BF16, head_dim, num_group_heads, page_size, NO_FLAGS)
            for dtype in (BF16, FP16, FP32):
                yield attention(dtype, head_dim, 4, 16, FLAGS)
            for dtype in (FP16, FP32):
                yield attention(dtype, head_dim, 4, 16, NO_FLAGS)
    for dtype in (BF16, FP16, FP32):
        yield from (merge_variant(dtype, head_dim) for head_dim in configs.HEAD_DIMS)
        yield from row_variants(dtype)
        yield from sample_variants(dtype)
    yield copy_variant()


def describe(report: Report) -> str:
    """Give a line about one compiled kernel. Pure."""
    verdict = "; ".join(report.faults) or "ok"
    return (
        f"{report.name:48} {report.num_registers:4} registers {report.num_spills:3} spills "
        f"{report.num_shared_bytes / 1024:6.1f} KB {report.num_wgmma:3} wgmma {report.num_async_128:3} copies "
        f"{report.num_loads_128:3} loads of 128 bits  {verdict}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compile the GPU kernels for sm_90.")
    parser.add_argument("--all", action="store_true", help="every entry of the tables (minutes)")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    options = parser.parse_args(arguments)
    reports = []
    for variant in all_variants() if options.all else usual_variants():
        reports.append(report := compile_variant(variant))
        if not options.json:
            sys.stdout.write(describe(report) + "\n")
            sys.stdout.flush()
    if options.json:
        sys.stdout.write(json.dumps([asdict(report) for report in reports]) + "\n")
    return int(any(report.faults for report in reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
