"""DeepSeek-V3; Kimi-K2 and Moonlight too, the latter without a latent query."""

from __future__ import annotations

from rlhf.weights.families.blocks import (
    EXPERT_BIAS,
    LATENT_KV,
    LATENT_QUERY,
    PLAIN_QUERY,
    ROUTED_EXPERTS,
    SHARED_EXPERTS,
    dense_mlp,
)
from rlhf.weights.families.family import Family
from rlhf.weights.model_shape import ModelShape


def deepseek_v3(shape: ModelShape) -> Family:
    assert shape.mla is not None and shape.moe is not None
    experts = ROUTED_EXPERTS + EXPERT_BIAS
    return Family(
        attention=LATENT_KV + (LATENT_QUERY if shape.mla.q_lora_rank else PLAIN_QUERY),
        dense=dense_mlp("dense"),
        experts=experts + SHARED_EXPERTS if shape.moe.num_shared_experts else experts,
        mtp=True,
    )
