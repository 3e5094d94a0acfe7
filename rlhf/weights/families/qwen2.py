"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from __future__ import annotations

from rlhf.weights.families.blocks import QKV, QKV_BIAS, dense_mlp
from rlhf.weights.families.family import Family
from rlhf.weights.model_shape import ModelShape


def qwen2(_: ModelShape) -> Family:
    return Family(attention=QKV + QKV_BIAS, dense=dense_mlp("tp"), attention_dp=False)
