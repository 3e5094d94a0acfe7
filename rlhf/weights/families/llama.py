"""Llama."""

from __future__ import annotations

from rlhf.weights.families.blocks import QKV, dense_mlp
from rlhf.weights.families.family import Family, Stage
from rlhf.weights.model_shape import ModelShape


def llama(_: ModelShape) -> Family:
    return Family(
        attention=QKV,
        dense=dense_mlp("tp"),
        engine_head=Stage.EVERY,
        tied_engine_stages=False,
        attention_dp=False,
        block_fp8=False,
    )
