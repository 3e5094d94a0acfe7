"""Qwen3: a norm over each query and key head; dense, or with experts in every layer."""

from __future__ import annotations

from rlhf.weights.families.blocks import QK_NORM, QKV, ROUTED_EXPERTS, dense_mlp
from rlhf.weights.families.family import Family, Stage
from rlhf.weights.model_shape import ModelShape


def qwen3(_: ModelShape) -> Family:
    return Family(attention=QKV + QK_NORM, dense=dense_mlp("tp"))


def qwen3_moe(_: ModelShape) -> Family:
    return Family(
        attention=QKV + QK_NORM,
        dense=dense_mlp("dense"),
        experts=ROUTED_EXPERTS,
        engine_head=Stage.EVERY,
    )
