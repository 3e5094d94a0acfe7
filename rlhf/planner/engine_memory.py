"""Bytes of an SGLang engine's weights and KV cache, of each rank. Pure: from shapes and layouts."""

from __future__ import annotations

from rlhf.dist.layout import RolloutLayout
from rlhf.weights.families import engine_layers, rollout_bytes
from rlhf.weights.model_shape import ModelShape


def engine_weight_bytes(shape: ModelShape, layout: RolloutLayout, itemsize: int) -> tuple[int, ...]:
    """Parameters by global rank: elements times their dtype's bytes, padded vocabulary rows and
    copies of KV heads and experts included. All engines are alike."""
    one = [rollout_bytes(shape, layout, rank, itemsize) for rank in layout.engine_ranks(0)]
    return tuple(one * layout.num_engines)


def derived_bytes(shape: ModelShape, layout: RolloutLayout, itemsize: int) -> tuple[int, ...]:
    """What an engine computes from its weights and keeps, by global rank.

    With latent attention the two halves of ``kv_b_proj`` as matrices of their own (w_kc, w_vc):
    ``heads / attention tp * (nope + v) * kv_lora_rank * itemsize`` per layer; otherwise nothing.
    Counted in the model's dtype, as SGLang has them unless it keeps block fp8 ones.
    """
    if shape.mla is None:
        return (0,) * layout.world
    mla = shape.mla
    width = mla.qk_nope_head_dim + mla.v_head_dim
    layer = shape.num_heads // layout.attention_tp * width * mla.kv_lora_rank * itemsize
    return tuple(layer * layers for layers in _layers(shape, layout))


def kv_token_bytes(shape: ModelShape, layout: RolloutLayout, itemsize: int) -> tuple[int, ...]:
    """Bytes of one token in a rank's KV cache, by global rank.

    ``layers of the stage * 2 * KV heads of the rank * head_dim * itemsize``, where a rank has at
    least one head, copied when attention tp is above the number of KV heads. With latent attention
    ``layers * (kv_lora_rank + rope) * itemsize``: every rank of an attention group has the latent.
    """
    if shape.mla is not None:
        layer = (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim) * itemsize
    else:
        heads = max(1, shape.num_kv_heads // layout.attention_tp)
        layer = 2 * heads * shape.head_dim * itemsize
    return tuple(layer * layers for layers in _layers(shape, layout))


def _layers(shape: ModelShape, layout: RolloutLayout) -> list[int]:
    counts = [len(engine_layers(shape.num_layers, layout.pp, pp)) for pp in range(layout.pp)]
    return [counts[layout.coord(rank).pp] for rank in range(layout.world)]
