"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from __future__ import annotations

from rlhf.weights.families.dense import DENSE
from rlhf.weights.families.family import extend
from rlhf.weights.families.operations import QKVBlocks, QKVGroups

QKV_BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")

QWEN2 = extend(
    DENSE,
    tensors={
        "self_attn.q_proj.bias": ("query",),
        "self_attn.k_proj.bias": ("kv",),
        "self_attn.v_proj.bias": ("kv",),
    },
    train={"self_attention.linear_qkv.bias": QKVGroups(*QKV_BIASES)},
    rollout={"self_attn.qkv_proj.bias": QKVBlocks(*QKV_BIASES)},
)
