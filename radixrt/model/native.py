"""The decoder in C++: one call per step, for CPUs."""

from __future__ import annotations

from pathlib import Path

import torch

from radixrt.errors import ModelLoadError
from radixrt.kv.store import KVStore
from radixrt.memory import advise_huge_pages
from radixrt.model.attention import cpu
from radixrt.model.decoder import DecoderWeights
from radixrt.model.inputs import BatchInputs
from radixrt.model.outputs import GetMasks, Prediction
from radixrt.model.spec import ModelSpec


class NativeDecoder:
    """Compute logits of a ragged batch over paged keys and values, as `decoder.Decoder` does, in one C++ call.

    A row's logits depend on its own tokens alone, to the bit and in every dtype: not on the batch, on chunks, on what
    was cached, or on the number of threads. Holds its own packed copy of the weights (of the head 8 bits a weight besides,
    where the kernels can use them) and its own threads.

    While torch's OpenMP threads spin after a parallel operation, a step waits for the cores that they hold: 16.4 ms
    instead of 8.7 (kernels/RESULTS.md). Who uses this decoder should leave torch one thread.
    """

    def __init__(self, spec: ModelSpec, native: cpu.CpuDecoder) -> None:
        self.spec = spec
        self.native = native

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        weights: DecoderWeights,
        *,
        num_threads: int,
        build_folder: Path,
        variant: str | None = None,
    ) -> NativeDecoder:
        """Compile the kernels if need be, and pack the weights.

        Args:
            weights: float32 or bfloat16 on the CPU; not needed any more afterwards.
            build_folder: where compiled kernels are kept.
            variant: which kernels; default: the fastest that this CPU can run.
        Raises:
            ModelLoadError: no compiler, or a model that the kernels cannot take.
        """
        try:
            library = cpu.load_library(build_folder, variant=variant)
            native = cpu.CpuDecoder(
                library,
                _shape(spec),
                [_layer(weights, spec, layer_index=i) for i in range(spec.num_layers)],
                embedding=weights.embedding,
                head=weights.head,
                final_norm=weights.final_norm,
                num_threads=num_threads,
                allocate=_allocate,
            )
        except (cpu.BuildError, ValueError) as error:
            raise ModelLoadError(f"the native CPU kernels cannot be used: {error}") from error
        return cls(spec, native)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.native.dtype

    def predict(
        self,
        inputs: BatchInputs,
        store: KVStore,
        *,
        num_token_ids: int,
        wants_logits: bool = True,
        get_masks: GetMasks | None = None,
    ) -> Prediction:
        """Compute the step's keys and values, logits and the likeliest of the first num_token_ids tokens.

        Args:
            inputs: the step; at least one sequence.
            store: its layout is `spec.kv_layout` with this decoder's dtype.
            wants_logits: False leaves them out, which is faster.
            get_masks: asked when only the head is left; the likeliest tokens are among those that masks allow.
        Returns: a row per entry of inputs.sample_rows.
        Changes: store.data at inputs.slots, all layers.
        """
        outputs = self.native.step(
            store.data,
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            page_table=inputs.page_table,
            query_start=inputs.query_start,
            context_lens=inputs.context_lens,
            sample_rows=inputs.sample_rows,
            num_token_ids=num_token_ids,
            wants_logits=wants_logits,
            get_masks=get_masks,
        )
        return Prediction(*outputs)


def _shape(spec: ModelSpec) -> cpu.DecoderShape:
    return cpu.DecoderShape(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        norm_epsilon=spec.norm_epsilon,
        inverse_frequencies=spec.rope.inverse_frequencies,
        rope_magnitude=spec.rope.magnitude,
    )


def _layer(weights: DecoderWeights, spec: ModelSpec, *, layer_index: int) -> cpu.LayerTensors:
    layer = weights.layers[layer_index]
    return cpu.LayerTensors(
        attention_norm=layer.attention_norm,
        qkv=layer.qkv.weight,
        qkv_bias=layer.qkv.bias,
        qk_norm=layer.qk_norm,
        output=layer.output.weight,
        output_bias=layer.output.bias,
        mlp_norm=layer.mlp_norm,
        gate_up=layer.gate_up.weight,
        gate_up_bias=layer.gate_up.bias,
        down=layer.down.weight,
        down_bias=layer.down.bias,
        sliding_window=spec.sliding_windows[layer_index],
    )


def _allocate(num_words: int) -> torch.Tensor:
    words = torch.empty(num_words, dtype=torch.int32)
    advise_huge_pages(words)
    return words
