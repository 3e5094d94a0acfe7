"""Multiplications and parameters of a model's layers, from its shape. Pure.

FLOPs are 2 for each multiplication with an addition, of a forward pass; a backward pass has twice
as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.weights.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Of one layer. Parameters count matrices only; norms and biases are left out."""

    attention_params: int
    mlp_params: int  # dense: of the MLP, or of the shared experts and the router
    expert_params: int  # of one routed expert
    num_experts: int
    experts_per_token: int
    context_flops: int  # of attention, per token and per token that it sees

    @property
    def has_experts(self) -> bool:
        return self.num_experts > 0

    @property
    def dense_params(self) -> int:
        return self.attention_params + self.mlp_params

    @property
    def params(self) -> int:
        return self.dense_params + self.num_experts * self.expert_params

    @property
    def dense_flops(self) -> int:
        """Per token."""
        return 2 * self.dense_params

    @property
    def routed_flops(self) -> int:
        """Per token, in all experts that it visits."""
        return 2 * self.experts_per_token * self.expert_params


def layer_work(shape: ModelShape, number: int) -> LayerWork:
    """Of layer ``number``."""
    hidden = shape.hidden_size
    attention, context = _attention(shape)
    if not shape.has_experts(number):
        return LayerWork(attention, 3 * hidden * shape.ffn_size, 0, 0, 0, context)
    assert shape.moe is not None
    moe = shape.moe
    shared = 3 * hidden * moe.ffn_size * moe.num_shared_experts
    return LayerWork(
        attention_params=attention,
        mlp_params=shared + hidden * moe.num_experts,
        expert_params=3 * hidden * moe.ffn_size,
        num_experts=moe.num_experts,
        experts_per_token=moe.num_experts_per_token,
        context_flops=context,
    )


def layer_counts(shape: ModelShape, layers: Sequence[range]) -> list[tuple[LayerWork, int]]:
    """The kinds of layers in some runs of them, and how many there are of each."""
    first = 0 if shape.moe is None else shape.moe.first_dense
    dense = sum(len(range(r.start, min(r.stop, first))) for r in layers) if first else 0
    rest = sum(map(len, layers)) - dense
    found = ((0, dense), (first, rest))  # a layer of the kind, and how many
    return [(layer_work(shape, number), count) for number, count in found if count]


def _attention(shape: ModelShape) -> tuple[int, int]:
    """(parameters, FLOPs per pair of tokens)."""
    hidden, heads, width = shape.hidden_size, shape.num_heads, shape.head_dim
    if shape.mla is None:
        params = hidden * width * (2 * heads + 2 * shape.num_kv_heads)
        return params, 4 * heads * width
    mla = shape.mla
    low = mla.q_lora_rank
    query = hidden * heads * width if low is None else low * (hidden + heads * width)
    key_value = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    key_value += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    params = query + key_value + heads * mla.v_head_dim * hidden
    return params, 2 * heads * (width + mla.v_head_dim)


def decode_context_flops(shape: ModelShape) -> int:
    """Per layer, token and token of the context while decoding. Latent attention then works on the
    latent itself (arXiv:2405.04434, section 2.1.2): more FLOPs, fewer bytes."""
    if shape.mla is None:
        return _attention(shape)[1]
    latent = shape.mla.kv_lora_rank
    return 2 * shape.num_heads * (2 * latent + shape.mla.qk_rope_head_dim)


def outer_params(shape: ModelShape) -> int:
    """Of the embedding or of the head, each."""
    return shape.vocab_size * shape.hidden_size


def num_params(shape: ModelShape) -> int:
    """Of the whole model."""
    counts = layer_counts(shape, [range(shape.num_layers)])
    layers = sum(work.params * count for work, count in counts)
    return layers + outer_params(shape) * (1 if shape.tied_embeddings else 2)
