"""A whole decoder step in one call: packed weights, and the handle of a model in the library."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixrt_kernels.cpu.draw import DrawRow, DrawTable
from radixrt_kernels.cpu.library import (
    CBatch,
    CInputs,
    CLayer,
    COutputs,
    CShape,
    CStore,
    CWeights,
    Library,
    address,
    check_status,
    is_bfloat16,
    pointer,
)
from radixrt_kernels.cpu.masks import GetMasks, MaskCall

PANEL = 32
INT32, INT64 = "i", "q"  # typecodes of arrays


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the step must know of a model besides its weights. head_dim is even."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    inverse_frequencies: tuple[float, ...]
    rope_magnitude: float


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer, E hidden and I intermediate size; matrices in the model's dtype, any float dtype for vectors.

    Attributes:
        attention_norm, mlp_norm: [E].
        qkv: [(H + 2 G) * D, E]; its bias or None.
        qk_norm: [H + G, D] or None.
        output: [E, H * D]. gate_up: [2 I, E], gates then ups. down: [E, I]. Each with its bias or None.
        sliding_window: positions a token sees, itself included; None = all.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    sliding_window: int | None


class StepOutputs(NamedTuple):
    """What a step gives for each of S wanted rows.

    Attributes:
        logits: [S, V] float32; None where they were not wanted.
        token_ids: the likeliest token that can be drawn, of equal ones the first; 0 where none can be.
        largest: its logit; no number where any of them is none; -inf where no token can be drawn.
    """

    logits: torch.Tensor | None
    token_ids: list[int]
    largest: list[float]


class CpuDecoder:
    """A model in the library: packed weights, threads, and the room for a step's rows.

    Takes no hold of the tensors it is made from. Steps of one decoder run one after another, whoever calls.
    """

    def __init__(
        self,
        library: Library,
        shape: DecoderShape,
        layers: Sequence[LayerTensors],
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        final_norm: torch.Tensor,
        num_threads: int,
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        """Pack the weights.

        Args:
            embedding, head: [V, E]; packed once if they are the same tensor.
            allocate: gives an uninitialized int32 tensor of so many words, contiguous, aligned to 64 bytes.
        Raises:
            ValueError: a type or size that the library cannot take.
        """
        self.library = library
        self.shape = shape
        self.num_layers = len(layers)
        self.dtype = embedding.dtype
        self._is_bfloat16 = is_bfloat16(embedding)
        if not layers:
            raise ValueError("layers must not be empty")
        if shape.head_dim % 2 or shape.hidden_size % 2 or shape.intermediate_size % 2:
            raise ValueError(f"head_dim, hidden_size and intermediate_size must be even, got {shape}")
        self._kept: list[torch.Tensor] = []
        frequencies = self._vector(torch.tensor(shape.inverse_frequencies, dtype=torch.float32))
        self._shape = CShape(
            shape.vocab_size,
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            len(layers),
            shape.norm_epsilon,
            shape.rope_magnitude,
            frequencies,
        )
        weights = self._pack_all(layers, embedding, head, final_norm, allocate)
        self._model = library.functions.rt_model_create(
            ctypes.byref(self._shape), ctypes.byref(weights), self._is_bfloat16, num_threads
        )
        if not self._model:
            raise MemoryError("no memory for the model")
        weakref.finalize(self, library.functions.rt_model_destroy, self._model)

    def step(
        self,
        store: torch.Tensor,
        *,
        token_ids: array[int],
        positions: array[int],
        slots: array[int],
        page_table: array[int],
        query_start: array[int],
        context_lens: array[int],
        sample_rows: array[int],
        num_token_ids: int,
        wants_logits: bool = True,
        get_masks: GetMasks | None = None,
    ) -> StepOutputs:
        """Compute the step's keys and values and the wanted rows' likeliest tokens.

        Args:
            store: [num_pages, L, 2, page_size, G, D], the model's dtype, contiguous.
            token_ids, positions, slots: [T] int64. page_table: [B * P] int32. query_start: [B + 1] int32.
            context_lens: [B] int32. sample_rows: [S] int64.
            num_token_ids: tokens that can be drawn, the first of the vocabulary.
            wants_logits: without them the same tokens are found, sooner where the library has rough products.
            get_masks: gives for each of S rows which tokens can be drawn, [ceil(num_token_ids / 32)] int32, 1 = allowed;
                None = all of them. Called once, on this thread, when only the head is left; must not use this decoder.
        Raises:
            ValueError: a shape or type differs, an id, slot, page or row is out of range.
            Whatever get_masks raises; keys and values are computed then.
        Changes: store at `slots`, all layers.
        """
        num_tokens, num_sampled = len(token_ids), len(sample_rows)
        if not 1 <= num_token_ids <= self.shape.vocab_size:
            raise ValueError(f"num_token_ids must be in [1, {self.shape.vocab_size}], got {num_token_ids}")
        masks = MaskCall(get_masks, num_rows=num_sampled, num_token_ids=num_token_ids)
        inputs = CInputs(
            _batch(num_tokens, page_table, query_start, context_lens),
            address(token_ids, "token_ids", INT64, num_tokens),
            address(positions, "positions", INT64, num_tokens),
            address(slots, "slots", INT64, num_tokens),
            num_sampled,
            address(sample_rows, "sample_rows", INT64, num_sampled),
            num_token_ids,
            masks.function(),
            masks.address,
        )
        logits = torch.empty(num_sampled, self.shape.vocab_size) if wants_logits else None
        likeliest: array[int] = array(INT64, bytes(8 * num_sampled))
        largest: array[float] = array("f", bytes(4 * num_sampled))
        addresses = (likeliest.buffer_info()[0], largest.buffer_info()[0])
        outputs = COutputs(None if logits is None else logits.data_ptr(), *addresses)
        arguments = map(ctypes.byref, (self._shape, inputs, self._pages(store), outputs))
        status = self.library.functions.rt_model_step(self._model, *arguments)
        masks.raise_error()
        check_status(status)
        return StepOutputs(logits, likeliest.tolist(), largest.tolist())

    def draw(
        self, logits: torch.Tensor, rows: Sequence[DrawRow], *, num_token_ids: int
    ) -> tuple[list[int], list[float]]:
        """Draw one token per row (src/draw.h), on the decoder's threads.

        Args:
            logits: [N, at least num_token_ids] float32, raw; a row's are contiguous.
            rows: see draw.py.
        Returns: the tokens, and each row's largest adjusted logit; where that is not finite the token is the likeliest.
        Raises:
            ValueError: a type or shape differs, a number is out of range.
        """
        table = DrawTable(logits, rows, num_token_ids=num_token_ids)
        token_ids: array[int] = array(INT64, bytes(8 * len(rows)))
        largest: array[float] = array("f", bytes(4 * len(rows)))
        addresses = (token_ids.buffer_info()[0], largest.buffer_info()[0])
        arguments = (table.draws, len(rows), num_token_ids, *addresses)
        check_status(self.library.functions.rt_model_draw(self._model, *arguments))
        return token_ids.tolist(), largest.tolist()

    def _pages(self, store: torch.Tensor) -> CStore:
        num_pages, page_size = store.shape[0], store.shape[3]
        shape = (num_pages, self.num_layers, 2, page_size, self.shape.num_kv_heads, self.shape.head_dim)
        return CStore(pointer(store, "store", self.dtype, shape), num_pages, page_size)

    def _pack_all(
        self,
        layers: Sequence[LayerTensors],
        embedding: torch.Tensor,
        head: torch.Tensor,
        final_norm: torch.Tensor,
        allocate: Callable[[int], torch.Tensor],
    ) -> CWeights:
        """Pack every matrix into one buffer, in the order in which a step reads them."""
        matrices = [
            (matrix, {"is_paired": matrix is layer.gate_up})
            for layer in layers
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        matrices.append((head, {"is_layer": False}))
        if embedding is not head:
            matrices.append((embedding, {"is_layer": False}))
        counts = [self.library.packed_words(matrix, **kind) for matrix, kind in matrices]
        buffer = allocate(sum(counts))
        self._kept.append(buffer)
        packed = torch.split(buffer, counts)
        for (matrix, kind), target in zip(matrices, packed, strict=True):
            if matrix.dtype != self.dtype:
                raise ValueError(f"all weights must have the same type, got {matrix.dtype} and {self.dtype}")
            self.library.pack(matrix, target, **kind)
        addresses = [target.data_ptr() for target in packed]
        table = (CLayer * len(layers))(
            *(self._layer(layer, addresses[4 * i : 4 * i + 4]) for i, layer in enumerate(layers))
        )
        rough = self._pack_rough(head, allocate)
        return CWeights(addresses[-1], addresses[4 * len(layers)], *rough, self._vector(final_norm), table)

    def _pack_rough(
        self, head: torch.Tensor, allocate: Callable[[int], torch.Tensor]
    ) -> tuple[int | None, int | None]:
        """Pack the head once more, in 8 bits; give the addresses of words and bounds, if the library can use them."""
        num_words, num_bytes = self.library.rough_sizes(head)
        if not num_words:
            return None, None
        words, bounds = allocate(num_words), torch.empty(num_bytes, dtype=torch.uint8)
        self.library.pack_rough(head, words, bounds)
        self._kept += [words, bounds]
        return words.data_ptr(), bounds.data_ptr()

    def _layer(self, layer: LayerTensors, packed: Sequence[int]) -> CLayer:
        qkv, output, gate_up, down = packed
        bias = layer.gate_up_bias
        if bias is not None:
            bias = pair(bias)
        return CLayer(
            attention_norm=self._vector(layer.attention_norm),
            qkv=qkv,
            qkv_bias=self._bias(layer.qkv_bias),
            qk_norm=None if layer.qk_norm is None else self._vector(layer.qk_norm),
            output=output,
            output_bias=self._bias(layer.output_bias),
            mlp_norm=self._vector(layer.mlp_norm),
            gate_up=gate_up,
            gate_up_bias=self._bias(bias),
            down=down,
            down_bias=self._bias(layer.down_bias),
            window=layer.sliding_window or 0,
        )

    def _bias(self, bias: torch.Tensor | None) -> int | None:
        if bias is None:
            return None
        return self._vector(torch.nn.functional.pad(bias, (0, -len(bias) % PANEL)))

    def _vector(self, vector: torch.Tensor) -> int:
        """Keep a float32 copy; give its address."""
        copy = vector.detach().to(torch.float32, copy=True).contiguous()
        self._kept.append(copy)
        return copy.data_ptr()


def _batch(
    num_tokens: int, page_table: array[int], query_start: array[int], context_lens: array[int]
) -> CBatch:
    num_sequences = len(context_lens)
    num_columns, rest = divmod(len(page_table), max(num_sequences, 1))
    if rest or not (num_sequences and num_columns):
        raise ValueError(f"page_table must have as many pages for each of {num_sequences} sequences")
    return CBatch(
        num_tokens,
        num_sequences,
        num_columns,
        address(page_table, "page_table", INT32, num_sequences * num_columns),
        address(query_start, "query_start", INT32, num_sequences + 1),
        address(context_lens, "context_lens", INT32, num_sequences),
    )


def pair(bias: torch.Tensor) -> torch.Tensor:
    """Order a bias of gates, then ups, as a paired weight's panels: 16 gates, their 16 ups, and so on. Pure."""
    halves = bias.view(2, -1)
    padded = torch.nn.functional.pad(halves, (0, -halves.shape[1] % (PANEL // 2)))
    return padded.view(2, -1, PANEL // 2).transpose(0, 1).reshape(-1)
