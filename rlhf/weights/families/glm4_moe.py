"""GLM-4.5 and GLM-4.5-Air: Qwen's attention with DeepSeek's experts."""

from __future__ import annotations

from rlhf.weights.families.blocks import (
    EXPERT_BIAS,
    FLOAT32_ENGINE_ROUTER,
    QK_NORM,
    QKV,
    QKV_BIAS,
    ROUTED_EXPERTS,
    SHARED_EXPERTS,
    dense_mlp,
)
from rlhf.weights.families.family import Family, Stage
from rlhf.weights.model_shape import ModelShape


def glm4_moe(shape: ModelShape) -> Family:
    assert shape.moe is not None
    attention = QKV
    if shape.qkv_bias:
        attention += QKV_BIAS
    if shape.qk_norm:
        attention += QK_NORM
    experts = ROUTED_EXPERTS + FLOAT32_ENGINE_ROUTER + EXPERT_BIAS
    if shape.moe.num_shared_experts:
        experts += SHARED_EXPERTS
    return Family(
        attention=attention,
        dense=dense_mlp("dense"),
        experts=experts,
        engine_head=Stage.EVERY,
        mtp=True,
        redundant_experts=False,
    )
