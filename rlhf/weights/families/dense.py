"""What all dense decoder families share: attention with KV groups, a gated MLP, RMS norms."""

from __future__ import annotations

from rlhf.weights.families.family import Family, Outer, Side, Stage
from rlhf.weights.families.operations import (
    Cols,
    QKVBlocks,
    QKVGroups,
    Rows,
    Vocab,
    Whole,
)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
QKV_WEIGHTS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")

DENSE = Family(
    outer_tensors={
        EMBEDDING: ("vocab", "hidden"),
        "model.norm.weight": ("hidden",),
        HEAD: ("vocab", "hidden"),
    },
    layer_tensors={
        "input_layernorm.weight": ("hidden",),
        "self_attn.q_proj.weight": ("query", "hidden"),
        "self_attn.k_proj.weight": ("kv", "hidden"),
        "self_attn.v_proj.weight": ("kv", "hidden"),
        "self_attn.o_proj.weight": ("hidden", "query"),
        "post_attention_layernorm.weight": ("hidden",),
        "mlp.gate_proj.weight": ("ffn", "hidden"),
        "mlp.up_proj.weight": ("ffn", "hidden"),
        "mlp.down_proj.weight": ("hidden", "ffn"),
    },
    tied={HEAD: EMBEDDING},
    train=Side(
        outer=(
            Outer("embedding.word_embeddings.weight", Vocab(EMBEDDING), Stage.FIRST),
            Outer("decoder.final_layernorm.weight", Whole("model.norm.weight"), Stage.LAST),
            Outer("output_layer.weight", Vocab(HEAD), Stage.LAST),
        ),
        layer_prefix="decoder.layers.{layer}.",
        layer={
            "self_attention.linear_qkv.layer_norm_weight": Whole("input_layernorm.weight"),
            "self_attention.linear_qkv.weight": QKVGroups(*QKV_WEIGHTS),
            "self_attention.linear_proj.weight": Cols("self_attn.o_proj.weight"),
            "mlp.linear_fc1.layer_norm_weight": Whole("post_attention_layernorm.weight"),
            "mlp.linear_fc1.weight": Rows(GATE_UP),
            "mlp.linear_fc2.weight": Cols("mlp.down_proj.weight"),
        },
    ),
    rollout=Side(
        outer=(
            Outer(EMBEDDING, Vocab(EMBEDDING, "attention"), Stage.FIRST),
            Outer("model.norm.weight", Whole("model.norm.weight"), Stage.LAST),
            Outer(HEAD, Vocab(HEAD), Stage.LAST),
        ),
        layer_prefix="model.layers.{layer}.",
        layer={
            "input_layernorm.weight": Whole("input_layernorm.weight"),
            "self_attn.qkv_proj.weight": QKVBlocks(*QKV_WEIGHTS),
            "self_attn.o_proj.weight": Cols("self_attn.o_proj.weight", "attention"),
            "post_attention_layernorm.weight": Whole("post_attention_layernorm.weight"),
            "mlp.gate_up_proj.weight": Rows(GATE_UP),
            "mlp.down_proj.weight": Cols("mlp.down_proj.weight"),
        },
    ),
    tied_rollout_pp=True,
    attention_dp=False,
)
