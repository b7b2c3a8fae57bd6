"""What `radixrt bench gpu` runs: every kernel at the shapes of a served model, with its floor and its check.

A floor is the least time the card could take: bytes at its copy bandwidth or operations at its matrix rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from radixrt_kernels import reference, reference_sampling
from radixrt_kernels.gpu import configs, production
from radixrt_kernels.gpu.compile import Variant
from radixrt_kernels.gpu.copy_pages import copy_pages
from radixrt_kernels.gpu.decode_plan import plan_decode
from radixrt_kernels.gpu.extend import extend, plan_extend
from radixrt_kernels.gpu.rope_write import rope_write
from radixrt_kernels.gpu.rows import add_norm, silu_mul
from radixrt_kernels.gpu.sample import sample
from radixrt_kernels.gpu.tree_decode import tree_decode

# One H200, measured: bytes per second of a device copy, bfloat16 operations per second of a matrix product.
COPY_BYTES_PER_S = 4.3e12
MATRIX_FLOPS_PER_S = 790e12
DTYPE = torch.bfloat16
ITEM_BYTES = 2
MAX_ERROR = 5e-3  # of norms; bfloat16 keeps 8 bits
EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes."""

    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    hidden_size: int = 4096
    intermediate_size: int = 14336
    vocab_size: int = 128256

    @property
    def num_group_heads(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * ITEM_BYTES


LLAMA_3_8B = Shape()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its tensors.

    Attributes:
        run: launch the kernel once.
        error: run it and give |got - float64 reference| / |reference|, or the share of wrong rows.
        peers: other ways to the same result, by name.
        is_graphable: a CUDA graph can hold the launch.
    """

    run: Callable[[], object]
    error: Callable[[], float]
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    is_graphable: bool = True


class Case(Protocol):
    """One kernel at one shape."""

    @property
    def name(self) -> str: ...

    @property
    def floor_s(self) -> float:
        """Seconds that the card needs at least."""

    @property
    def max_error(self) -> float: ...

    def variants(self) -> list[Variant]:
        """Give what must be compiled."""

    def prepare(self, device: torch.device) -> Prepared: ...


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(DTYPE)


def scattered_pages(num_pages: int) -> torch.Tensor:
    """Give the pages 1 to num_pages in random order, int32."""
    return (1 + torch.randperm(num_pages)).int()


def random_kv(num_pages: int, shape: Shape, device: torch.device) -> torch.Tensor:
    return random(1 + num_pages, 2, shape.page_size, shape.num_kv_heads, shape.head_dim, device=device)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """tree_decode: `batch` sequences of `context` tokens, the first `num_shared_tokens` of them common to all."""

    batch: int
    context: int
    num_shared_tokens: int = 0
    is_merged: bool = True
    shape: Shape = LLAMA_3_8B
    max_error: float = MAX_ERROR

    @property
    def name(self) -> str:
        shared = f", {self.num_shared_tokens} shared" if self.num_shared_tokens else ""
        return f"tree_decode {self.batch} x {self.context}{shared}{'' if self.is_merged else ', not merged'}"

    @property
    def floor_s(self) -> float:
        num_own = self.batch * (self.context - self.num_shared_tokens)
        num_read = num_own + self.num_shared_tokens * (1 if self.is_merged else self.batch)
        rows = 2 * self.batch * self.shape.num_heads * self.shape.head_dim * ITEM_BYTES
        return (num_read * self.shape.kv_token_bytes + rows) / COPY_BYTES_PER_S

    def variants(self) -> list[Variant]:
        shape = self.shape
        sizes = (shape.head_dim, shape.num_group_heads, shape.page_size)
        return [
            production.decode_variant(DTYPE, *sizes, production.NO_FLAGS),
            production.merge_variant(DTYPE, shape.head_dim),
        ]

    def prepare(self, device: torch.device) -> Prepared:
        shape = self.shape
        num_columns = -(-self.context // shape.page_size)
        page_table = scattered_pages(self.batch * num_columns).view(self.batch, num_columns)
        page_table[:, : self.num_shared_tokens // shape.page_size] = page_table[
            0, : self.num_shared_tokens // shape.page_size
        ]
        config = configs.decode_config(DTYPE, shape.head_dim, shape.num_group_heads, shape.page_size)
        plan = plan_decode(
            page_table.numpy(),
            np.full(self.batch, self.context),
            page_size=shape.page_size,
            num_group_heads=shape.num_group_heads,
            num_kv_heads=shape.num_kv_heads,
            config=config if self.is_merged else configs.unmerged(config),
        ).to_device(device)
        kv_layer = random_kv(self.batch * num_columns, shape, device)
        q = random(self.batch, shape.num_heads, shape.head_dim, device=device)
        table, scale = page_table.to(device), shape.head_dim**-0.5

        def run() -> torch.Tensor:
            return tree_decode(q, kv_layer, page_table=table, plan=plan, scale=scale)

        def error() -> float:
            expected = reference.paged_attention(
                q.double(),
                kv_layer.double(),
                page_table=table,
                num_query_tokens=(1,) * self.batch,
                num_context_tokens=(self.context,) * self.batch,
                scale=scale,
            )
            return relative_error(run(), expected)

        return Prepared(run, error)


@dataclass(frozen=True, slots=True)
class ExtendCase:
    """extend: one sequence's `num_new` last tokens of `context`."""

    num_new: int
    context: int
    shape: Shape = LLAMA_3_8B
    max_error: float = MAX_ERROR

    @property
    def name(self) -> str:
        return f"extend {self.num_new} of {self.context}"

    @property
    def floor_s(self) -> float:
        num_pairs = self.num_new * (self.context - self.num_new) + self.num_new * (self.num_new + 1) / 2
        return 4 * num_pairs * self.shape.num_heads * self.shape.head_dim / MATRIX_FLOPS_PER_S

    def variants(self) -> list[Variant]:
        shape = self.shape
        sizes = (shape.head_dim, shape.num_group_heads, shape.page_size)
        return [production.extend_variant(DTYPE, *sizes, production.NO_FLAGS)]

    def prepare(self, device: torch.device) -> Prepared:
        shape = self.shape
        num_pages = -(-self.context // shape.page_size)
        table = scattered_pages(num_pages)[None].to(device)
        kv_layer = random_kv(num_pages, shape, device)
        q = random(self.num_new, shape.num_heads, shape.head_dim, device=device)
        scale = shape.head_dim**-0.5
        config = configs.extend_config(DTYPE, shape.head_dim, shape.num_group_heads, shape.page_size)
        plan = plan_extend(
            q_start=np.array([0]),
            num_new=np.array([self.num_new]),
            contexts=np.array([self.context]),
            sequences=np.array([0]),
            num_columns=num_pages,
            num_group_heads=shape.num_group_heads,
            config=config,
        ).to_device(device)

        def run() -> torch.Tensor:
            return extend(q, kv_layer, page_table=table, plan=plan, scale=scale)

        def error() -> float:
            # The last tokens only: float64 scores of all pairs would not fit.
            num_checked = min(self.num_new, 64)
            expected = reference.paged_attention(
                q[-num_checked:].double(),
                kv_layer.double(),
                page_table=table,
                num_query_tokens=(num_checked,),
                num_context_tokens=(self.context,),
                scale=scale,
            )
            return relative_error(run()[-num_checked:], expected)

        return Prepared(run, error, {"sdpa, not paged": self._sdpa(q)} if self._is_whole else {})

    @property
    def _is_whole(self) -> bool:
        return self.num_new == self.context

    def _sdpa(self, q: torch.Tensor) -> Callable[[], torch.Tensor]:
        queries = q.transpose(0, 1)[None].contiguous()
        keys, values = (random(*queries.shape, device=q.device)[:, : self.shape.num_kv_heads] for _ in "kv")

        def run() -> torch.Tensor:
            return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

        return run


@dataclass(frozen=True, slots=True)
class RopeCase:
    """rope_write of num_tokens."""

    num_tokens: int
    shape: Shape = LLAMA_3_8B
    max_error: float = MAX_ERROR

    @property
    def name(self) -> str:
        return f"rope_write {self.num_tokens}"

    @property
    def floor_s(self) -> float:
        num_heads = self.shape.num_heads + 2 * self.shape.num_kv_heads
        return 2 * self.num_tokens * num_heads * self.shape.head_dim * ITEM_BYTES / COPY_BYTES_PER_S

    def variants(self) -> list[Variant]:
        return [v for v in production.row_variants(DTYPE) if v.name.startswith("rope_write")]

    def prepare(self, device: torch.device) -> Prepared:
        shape = self.shape
        num_heads = shape.num_heads + 2 * shape.num_kv_heads
        num_pages = -(-self.num_tokens // shape.page_size)
        qkv = random(self.num_tokens, num_heads, shape.head_dim, device=device)
        kv_layer = torch.zeros_like(random_kv(num_pages, shape, device))
        slots = (shape.page_size + torch.randperm(num_pages * shape.page_size)[: self.num_tokens]).to(device)
        positions = torch.arange(self.num_tokens, device=device)
        angles = positions[:, None].float() * torch.logspace(0, -4, shape.head_dim // 2, device=device)
        rotation = torch.cat((angles.cos(), angles.sin()), 1)

        def run() -> torch.Tensor:
            return rope_write(qkv, kv_layer, slots=slots, positions=positions, rotation=rotation)

        def error() -> float:
            got, expected_kv = run(), torch.zeros_like(kv_layer).double()
            expected = reference.rope_write(
                qkv.double(), expected_kv, slots=slots, positions=positions, rotation=rotation
            )
            return max(relative_error(got, expected), relative_error(kv_layer, expected_kv))

        return Prepared(run, error)


@dataclass(frozen=True, slots=True)
class NormCase:
    """add_norm of num_rows."""

    num_rows: int
    shape: Shape = LLAMA_3_8B
    max_error: float = MAX_ERROR

    @property
    def name(self) -> str:
        return f"add_norm {self.num_rows}"

    @property
    def floor_s(self) -> float:
        return 4 * self.num_rows * self.shape.hidden_size * ITEM_BYTES / COPY_BYTES_PER_S

    def variants(self) -> list[Variant]:
        return [v for v in production.row_variants(DTYPE) if v.name.startswith("add_norm")]

    def prepare(self, device: torch.device) -> Prepared:
        x, residual = (random(self.num_rows, self.shape.hidden_size, device=device) for _ in range(2))
        weight = random(self.shape.hidden_size, device=device)

        def run() -> torch.Tensor:
            return add_norm(x, residual, weight=weight, epsilon=EPSILON)

        def error() -> float:
            hidden = residual.clone()
            expected = reference.add_norm(x, hidden, weight=weight, epsilon=EPSILON).double()
            return max(relative_error(run(), expected), relative_error(residual, hidden.double()))

        return Prepared(run, error)


@dataclass(frozen=True, slots=True)
class SiluCase:
    """silu_mul of num_rows."""

    num_rows: int
    shape: Shape = LLAMA_3_8B
    max_error: float = MAX_ERROR

    @property
    def name(self) -> str:
        return f"silu_mul {self.num_rows}"

    @property
    def floor_s(self) -> float:
        return 3 * self.num_rows * self.shape.intermediate_size * ITEM_BYTES / COPY_BYTES_PER_S

    def variants(self) -> list[Variant]:
        return [v for v in production.row_variants(DTYPE) if v.name.startswith("silu_mul")]

    def prepare(self, device: torch.device) -> Prepared:
        gate_up = random(self.num_rows, 2 * self.shape.intermediate_size, device=device)

        def error() -> float:
            gates, ups = gate_up.double().chunk(2, -1)
            return relative_error(silu_mul(gate_up), F.silu(gates) * ups)

        return Prepared(lambda: silu_mul(gate_up), error)


@dataclass(frozen=True, slots=True)
class SampleCase:
    """sample of `batch` rows; filters: top-k 50, top-p 0.9, and temperature 0.8, else temperature only."""

    batch: int
    has_filters: bool
    shape: Shape = LLAMA_3_8B
    max_error: float = 0.0

    @property
    def name(self) -> str:
        return f"sample {self.batch}{', top-k and top-p' if self.has_filters else ''}"

    @property
    def floor_s(self) -> float:
        return self.batch * self.shape.vocab_size * ITEM_BYTES / COPY_BYTES_PER_S

    def variants(self) -> list[Variant]:
        return list(production.sample_variants(DTYPE))

    def prepare(self, device: torch.device) -> Prepared:
        vocab_size, batch = self.shape.vocab_size, self.batch
        logits = (torch.randn(batch, vocab_size, device=device) * 3).to(DTYPE)
        top_p, top_k = (0.9, 50) if self.has_filters else (1.0, 0)
        none = torch.full((batch,), -1, dtype=torch.int32, device=device)
        bits = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32, device=device)
        inputs = reference_sampling.SampleInputs(
            numbers=torch.tensor([[0.8, top_p, 0.0, 1.0, 0.0, 0.0]] * batch, dtype=torch.float64).to(device),
            top_k=torch.full((batch,), top_k, dtype=torch.int32, device=device),
            keys=torch.tensor([[row, 0, 100] for row in range(batch)], device=device),
            mask=bits,
            mask_rows=none,
            bias=torch.zeros(0, vocab_size, device=device),
            bias_rows=none,
            output_counts=torch.zeros(0, vocab_size, dtype=torch.int32, device=device),
            prompt_bits=bits,
            penalty_rows=none,
        )

        def error() -> float:
            expected = reference_sampling.sample(logits, inputs, num_token_ids=vocab_size)
            got = sample(logits, inputs, num_token_ids=vocab_size)
            return float((got.token_ids != expected.token_ids).double().mean())

        return Prepared(lambda: sample(logits, inputs, num_token_ids=vocab_size), error)


@dataclass(frozen=True, slots=True)
class CopyCase:
    """copy_pages of num_pages, all layers."""

    num_pages: int
    shape: Shape = LLAMA_3_8B
    max_error: float = 0.0

    @property
    def name(self) -> str:
        return f"copy_pages {self.num_pages}"

    @property
    def floor_s(self) -> float:
        # A device copy's bandwidth counts its reads and its writes, too.
        page_bytes = self.shape.num_layers * self.shape.page_size * self.shape.kv_token_bytes
        return 2 * self.num_pages * page_bytes / COPY_BYTES_PER_S

    def variants(self) -> list[Variant]:
        return [production.copy_variant()]

    def prepare(self, device: torch.device) -> Prepared:
        shape = self.shape
        page = (shape.num_layers, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
        store = random(2 * self.num_pages, *page, device=device)
        pairs = [(index, self.num_pages + index) for index in range(self.num_pages)]

        def error() -> float:
            copy_pages(store, store, pairs)
            halves = store.view(2, self.num_pages, -1)
            return float((halves[0] != halves[1]).double().mean())

        # Its pairs travel from the host at each call.
        return Prepared(lambda: copy_pages(store, store, pairs), error, is_graphable=False)


def all_cases() -> list[Case]:
    """Give what is run, in order. Pure."""
    return [
        DecodeCase(1, 2048),
        DecodeCase(1, 32768),
        DecodeCase(64, 2048),
        DecodeCase(64, 2176, num_shared_tokens=2048, is_merged=False),
        DecodeCase(64, 2176, num_shared_tokens=2048),
        ExtendCase(2048, 2048),
        ExtendCase(8192, 8192),
        ExtendCase(512, 8192),
        RopeCase(64),
        RopeCase(8192),
        NormCase(64),
        NormCase(8192),
        SiluCase(64),
        SiluCase(8192),
        SampleCase(64, has_filters=False),
        SampleCase(64, has_filters=True),
        CopyCase(64),
    ]
