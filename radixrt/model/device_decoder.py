"""The decoder on a CUDA device: matrix products of torch, everything between them in Triton's kernels.

It reads device tensors only and asks the host for nothing, so that a CUDA graph can hold a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixrt.kv.store import KVStore
from radixrt.model.decoder import DecoderWeights
from radixrt.model.device_kernels import TRITON, DeviceBatchPlan, Kernels
from radixrt.model.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """One step on the device. T new tokens; S rows of logits are wanted.

    Attributes:
        token_ids, positions, slots: [T] int64, as in BatchInputs; rows that pad a captured graph write into page 0.
        sample_rows: [S] int64, rows of [0, T) whose logits are wanted.
        plans: the attention's work items, one set per distinct sliding window of the model.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sample_rows: torch.Tensor
    plans: tuple[DeviceBatchPlan, ...]


class DeviceDecoder:
    """Compute logits of a ragged batch over paged keys and values, as `decoder.Decoder` does, with other roundings.

    Immutable: the weights, the spec and the table of rotations, 4 * D bytes per position.

    Args:
        max_context: positions that can occur.
        kernels: others than Triton's are for tests.
    """

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, *, max_context: int, kernels: Kernels = TRITON
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        self._rotation = rotation_table(spec.rope, max_context, device=self.device)
        windows = list(dict.fromkeys(spec.sliding_windows))
        self._plan_of_layer = [windows.index(window) for window in spec.sliding_windows]

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def forward(self, inputs: DeviceInputs, store: KVStore) -> torch.Tensor:
        """Compute the step's keys and values and the wanted logits.

        Returns: [S, V], dtype of the weights.
        Changes: store.data at inputs.slots, all layers.
        """
        weights, kernels, epsilon = self.weights, self.kernels, self.spec.norm_epsilon
        hidden = F.embedding(inputs.token_ids, weights.embedding)
        normed = kernels.add_norm(hidden, None, weight=weights.layers[0].attention_norm, epsilon=epsilon)
        next_norms = [layer.attention_norm for layer in weights.layers[1:]]
        for layer_index, layer in enumerate(weights.layers):
            attended = self._attend(normed, inputs, store, layer_index)
            # add_norm adds to the residual stream `hidden` in place.
            normed = kernels.add_norm(layer.output(attended), hidden, weight=layer.mlp_norm, epsilon=epsilon)
            update = layer.down(kernels.silu_mul(layer.gate_up(normed)))
            if layer_index < len(next_norms):
                normed = kernels.add_norm(update, hidden, weight=next_norms[layer_index], epsilon=epsilon)
        sampled = hidden[inputs.sample_rows]
        normed = kernels.add_norm(
            update[inputs.sample_rows], sampled, weight=weights.final_norm, epsilon=epsilon
        )
        return F.linear(normed, weights.head)

    def _attend(
        self, normed: torch.Tensor, inputs: DeviceInputs, store: KVStore, layer_index: int
    ) -> torch.Tensor:
        spec, layer, kv_layer = self.spec, self.weights.layers[layer_index], store.layer(layer_index)
        qkv = layer.qkv(normed).view(len(normed), -1, spec.head_dim)
        q = self.kernels.rope_write(
            qkv,
            kv_layer,
            slots=inputs.slots,
            positions=inputs.positions,
            rotation=self._rotation,
            qk_norm=layer.qk_norm,
            epsilon=spec.norm_epsilon,
        )
        plan = inputs.plans[self._plan_of_layer[layer_index]]
        return self.kernels.attend(q, kv_layer, plan, scale=spec.head_dim**-0.5).view(len(normed), -1)


def rotation_table(rope: RopeSpec, num_positions: int, *, device: torch.device) -> torch.Tensor:
    """Give [num_positions, D] float32: per position D/2 cosines, then D/2 sines, times the magnitude. Pure."""
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=device)
    angles = torch.arange(num_positions, device=device)[:, None].float() * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1) * rope.magnitude
