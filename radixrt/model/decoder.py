"""One decoder for the Llama family; its ModelSpec says what differs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixrt.kv.store import KVStore
from radixrt.model.attention import AttentionBackend, AttentionPlan
from radixrt.model.inputs import BatchInputs
from radixrt.model.outputs import GetMasks, Prediction
from radixrt.model.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection: weight [out, in] and bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. E hidden, I intermediate size.

    Attributes:
        attention_norm, mlp_norm: [E].
        qkv: [(H + 2 G) * D, E], rows of queries, then keys, then values.
        qk_norm: [H + G, D], or None without norms of queries and keys.
        output: [E, H * D].
        gate_up: [2 I, E], rows of gates, then ups.
        down: [E, I].
    """

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights, one dtype, one device. With a tied head, `head` is `embedding`.

    Attributes:
        embedding, head: [V, E].
        final_norm: [E].
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of one step's T positions: [T, 1, D] each."""

    cosine: torch.Tensor
    signed_sine: torch.Tensor

    @classmethod
    def at(cls, positions: torch.Tensor, rope: RopeSpec, *, dtype: torch.dtype) -> Rotation:
        """Compute in float32, as the models were trained, then round to `dtype`."""
        frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=positions.device)
        angles = positions[:, None, None].float() * frequencies
        cosine, sine = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
        return cls(torch.cat((cosine, cosine), -1).to(dtype), torch.cat((-sine, sine), -1).to(dtype))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn x [T, any, D]: the pair (x[i], x[i + D/2]) by its angle."""
        halves_swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * self.cosine, halves_swapped, self.signed_sine)


class Decoder:
    """Compute logits of a ragged batch over paged keys and values.

    Immutable: the weights and the spec; all state is in the KVStore that `forward` is given.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, attention: AttentionBackend) -> None:
        self.spec = spec
        self.weights = weights
        self.attention = attention

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @torch.inference_mode()
    def forward(self, inputs: BatchInputs, store: KVStore) -> torch.Tensor:
        """Compute the step's keys and values and the wanted logits.

        Args:
            inputs: the step; at least one sequence.
            store: its layout is `spec.kv_layout` with this decoder's dtype.
        Returns: [S, V] float32, a row per entry of inputs.sample_rows.
        Changes: store.data at inputs.slots, all layers.
        """
        weights, batch = self.weights, inputs.to(self.device)
        plan = self.attention.plan(batch, self.spec, page_size=store.layout.page_size)
        rotation = Rotation.at(batch.positions, self.spec.rope, dtype=self.dtype)
        hidden = F.embedding(batch.token_ids, weights.embedding)
        for layer_index, layer in enumerate(weights.layers):
            kv_layer = store.layer(layer_index)
            normed = self._norm(hidden, layer.attention_norm)
            hidden = hidden + self._attend(normed, layer, rotation, plan, kv_layer, layer_index)
            gates, ups = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, -1)
            hidden = hidden + layer.down(F.silu(gates) * ups)
        sampled = self._norm(hidden[batch.sample_rows], weights.final_norm)
        return F.linear(sampled, weights.head).float()

    def predict(
        self,
        inputs: BatchInputs,
        store: KVStore,
        *,
        num_token_ids: int,
        wants_logits: bool = True,
        get_masks: GetMasks | None = None,
    ) -> Prediction:
        """Do `forward`, and give with its logits the likeliest of the first num_token_ids tokens.

        Args:
            wants_logits, get_masks: there are logits all the same, and masks are left to who reads them.
        """
        return Prediction.of(self.forward(inputs, store), num_token_ids=num_token_ids)

    def _attend(
        self,
        normed: torch.Tensor,
        layer: LayerWeights,
        rotation: Rotation,
        plan: AttentionPlan,
        kv_layer: torch.Tensor,
        layer_index: int,
    ) -> torch.Tensor:
        spec = self.spec
        num_heads, num_rotated = spec.num_heads, spec.num_heads + spec.num_kv_heads
        qkv = layer.qkv(normed).view(-1, num_rotated + spec.num_kv_heads, spec.head_dim)
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if layer.qk_norm is not None:
            qk = self._norm(qk, None) * layer.qk_norm
        qk = rotation(qk)
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        plan.write(k, v, kv_layer)
        attended = plan.attend(q.contiguous(), kv_layer, layer_index=layer_index)
        return layer.output(attended.view(-1, num_heads * spec.head_dim))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMSNorm over the last dimension; the mean square is taken in float32 whatever the dtype."""
        return F.rms_norm(x, x.shape[-1:], weight, self.spec.norm_epsilon)
