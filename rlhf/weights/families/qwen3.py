"""Qwen3 (dense): a norm over each query and key head."""

from __future__ import annotations

from dataclasses import replace

from rlhf.weights.families.dense import DENSE
from rlhf.weights.families.family import extend
from rlhf.weights.families.operations import Whole

QWEN3 = replace(
    extend(
        DENSE,
        tensors={"self_attn.q_norm.weight": ("head",), "self_attn.k_norm.weight": ("head",)},
        train={
            "self_attention.q_layernorm.weight": Whole("self_attn.q_norm.weight"),
            "self_attention.k_layernorm.weight": Whole("self_attn.k_norm.weight"),
        },
        rollout={
            "self_attn.q_norm.weight": Whole("self_attn.q_norm.weight"),
            "self_attn.k_norm.weight": Whole("self_attn.k_norm.weight"),
        },
    ),
    attention_dp=True,
)
