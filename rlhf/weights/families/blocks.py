"""The blocks that families are made of, and what stands before and after the layers."""

from __future__ import annotations

from rlhf.weights.families.family import Block, Outer, Stage
from rlhf.weights.families.operations import (
    Cols,
    ExpertStack,
    GroupName,
    QKVBlocks,
    QKVGroups,
    Rows,
    Stacked,
    Vocab,
    Whole,
)
from rlhf.weights.piece import FLOAT32

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
OUTER_TENSORS = {EMBEDDING: ("vocab", "hidden"), NORM: ("hidden",), HEAD: ("vocab", "hidden")}
TIED = {HEAD: EMBEDDING}
"""With tied embeddings the first tensor is the second one, and a stage that holds it already has no
parameter for it."""
TRAIN_OUTER = (
    Outer("embedding.word_embeddings.weight", Vocab(EMBEDDING), Stage.FIRST),
    Outer("decoder.final_layernorm.weight", Whole(NORM), Stage.LAST),
    Outer("output_layer.weight", Vocab(HEAD), Stage.LAST),
)


def rollout_outer(head: Stage) -> tuple[Outer, ...]:
    """The engine's; with DP-attention each attention group has the whole vocabulary."""
    return (
        Outer(EMBEDDING, Vocab(EMBEDDING, "attention"), Stage.FIRST),
        Outer(NORM, Whole(NORM), Stage.LAST),
        Outer(HEAD, Vocab(HEAD, "attention"), head),
    )


def _qkv(kind: str) -> tuple[str, str, str]:
    return f"self_attn.q_proj.{kind}", f"self_attn.k_proj.{kind}", f"self_attn.v_proj.{kind}"


# Attention whose query heads share KV heads in groups.
QKV = Block(
    tensors={
        "input_layernorm.weight": ("hidden",),
        "self_attn.q_proj.weight": ("query", "hidden"),
        "self_attn.k_proj.weight": ("kv", "hidden"),
        "self_attn.v_proj.weight": ("kv", "hidden"),
        "self_attn.o_proj.weight": ("hidden", "query"),
    },
    train={
        "self_attention.linear_qkv.layer_norm_weight": Whole("input_layernorm.weight"),
        "self_attention.linear_qkv.weight": QKVGroups(*_qkv("weight")),
        "self_attention.linear_proj.weight": Cols("self_attn.o_proj.weight"),
    },
    rollout={
        "input_layernorm.weight": Whole("input_layernorm.weight"),
        "self_attn.qkv_proj.weight": QKVBlocks(*_qkv("weight")),
        "self_attn.o_proj.weight": Cols("self_attn.o_proj.weight", "attention"),
    },
    fp8=frozenset({"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"}),
)
QKV_BIAS = Block(
    tensors={
        "self_attn.q_proj.bias": ("query",),
        "self_attn.k_proj.bias": ("kv",),
        "self_attn.v_proj.bias": ("kv",),
    },
    train={"self_attention.linear_qkv.bias": QKVGroups(*_qkv("bias"))},
    rollout={"self_attn.qkv_proj.bias": QKVBlocks(*_qkv("bias"))},
)
QK_NORM = Block(
    tensors={"self_attn.q_norm.weight": ("head",), "self_attn.k_norm.weight": ("head",)},
    train={
        "self_attention.q_layernorm.weight": Whole("self_attn.q_norm.weight"),
        "self_attention.k_layernorm.weight": Whole("self_attn.k_norm.weight"),
    },
    rollout={
        "self_attn.q_norm.weight": Whole("self_attn.q_norm.weight"),
        "self_attn.k_norm.weight": Whole("self_attn.k_norm.weight"),
    },
)

# Multi-head latent attention: down projections on every rank, up projections cut by heads.
LATENT_KV = Block(
    tensors={
        "input_layernorm.weight": ("hidden",),
        "self_attn.kv_a_proj_with_mqa.weight": ("kv_lora_and_rope", "hidden"),
        "self_attn.kv_a_layernorm.weight": ("kv_lora",),
        "self_attn.kv_b_proj.weight": ("key_and_value", "kv_lora"),
        "self_attn.o_proj.weight": ("hidden", "value"),
    },
    train={
        "input_layernorm.weight": Whole("input_layernorm.weight"),
        "self_attention.linear_kv_down_proj.weight": Whole("self_attn.kv_a_proj_with_mqa.weight"),
        "self_attention.linear_kv_up_proj.layer_norm_weight": Whole(
            "self_attn.kv_a_layernorm.weight"
        ),
        "self_attention.linear_kv_up_proj.weight": Rows(("self_attn.kv_b_proj.weight",)),
        "self_attention.linear_proj.weight": Cols("self_attn.o_proj.weight"),
    },
    rollout={
        "input_layernorm.weight": Whole("input_layernorm.weight"),
        "self_attn.kv_a_layernorm.weight": Whole("self_attn.kv_a_layernorm.weight"),
        "self_attn.kv_b_proj.weight": Rows(("self_attn.kv_b_proj.weight",), "attention"),
        "self_attn.o_proj.weight": Cols("self_attn.o_proj.weight", "attention"),
    },
    fp8=frozenset({"self_attn.kv_b_proj.weight", "self_attn.o_proj.weight"}),
)
LATENT_QUERY = Block(
    tensors={
        "self_attn.q_a_proj.weight": ("q_lora", "hidden"),
        "self_attn.q_a_layernorm.weight": ("q_lora",),
        "self_attn.q_b_proj.weight": ("query", "q_lora"),
    },
    train={
        "self_attention.linear_q_down_proj.weight": Whole("self_attn.q_a_proj.weight"),
        "self_attention.linear_q_up_proj.layer_norm_weight": Whole(
            "self_attn.q_a_layernorm.weight"
        ),
        "self_attention.linear_q_up_proj.weight": Rows(("self_attn.q_b_proj.weight",)),
    },
    rollout={
        "self_attn.fused_qkv_a_proj_with_mqa.weight": Stacked(
            ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
        ),
        "self_attn.q_a_layernorm.weight": Whole("self_attn.q_a_layernorm.weight"),
        "self_attn.q_b_proj.weight": Rows(("self_attn.q_b_proj.weight",), "attention"),
    },
    fp8=frozenset({"self_attn.fused_qkv_a_proj_with_mqa.weight", "self_attn.q_b_proj.weight"}),
)
PLAIN_QUERY = Block(
    tensors={"self_attn.q_proj.weight": ("query", "hidden")},
    train={"self_attention.linear_q_proj.weight": Rows(("self_attn.q_proj.weight",))},
    rollout={
        "self_attn.q_proj.weight": Rows(("self_attn.q_proj.weight",), "attention"),
        "self_attn.kv_a_proj_with_mqa.weight": Whole("self_attn.kv_a_proj_with_mqa.weight"),
    },
    fp8=frozenset({"self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"}),
)


def _norm(train_name: str) -> Block:
    """The norm before the second half of a layer."""
    hf_name = "post_attention_layernorm.weight"
    return Block({hf_name: ("hidden",)}, {train_name: Whole(hf_name)}, {hf_name: Whole(hf_name)})


def _gated_mlp(name: str, ffn: str, group: GroupName) -> Block:
    """``name`` is the same in all three programs; the engine cuts it over ``group``."""
    hf = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
    down = f"{name}.down_proj.weight"
    return Block(
        tensors={hf[0]: (ffn, "hidden"), hf[1]: (ffn, "hidden"), down: ("hidden", ffn)},
        train={f"{name}.linear_fc1.weight": Rows(hf), f"{name}.linear_fc2.weight": Cols(down)},
        rollout={f"{name}.gate_up_proj.weight": Rows(hf, group), down: Cols(down, group)},
        fp8=frozenset({f"{name}.gate_up_proj.weight", down}),
    )


def dense_mlp(group: GroupName) -> Block:
    """The MLP of a layer without experts, over this group in the engine."""
    return _norm("mlp.linear_fc1.layer_norm_weight") + _gated_mlp("mlp", "ffn", group)


_ROUTER = "mlp.gate.weight"
_GATE_UP = ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
_DOWN = "mlp.experts.{expert}.down_proj.weight"
ROUTED_EXPERTS = _norm("pre_mlp_layernorm.weight") + Block(
    tensors={
        _ROUTER: ("experts", "hidden"),
        _GATE_UP[0]: ("expert_ffn", "hidden"),
        _GATE_UP[1]: ("expert_ffn", "hidden"),
        _DOWN: ("hidden", "expert_ffn"),
    },
    train={
        "mlp.router.weight": Whole(_ROUTER),
        "mlp.experts.linear_fc1.weight{expert}": Rows(_GATE_UP, "expert"),
        "mlp.experts.linear_fc2.weight{expert}": Cols(_DOWN, "expert"),
    },
    rollout={
        _ROUTER: Whole(_ROUTER),
        "mlp.experts.w13_weight": ExpertStack(Rows(_GATE_UP, "expert")),
        "mlp.experts.w2_weight": ExpertStack(Cols(_DOWN, "expert")),
    },
    fp8=frozenset({"mlp.experts.w13_weight", "mlp.experts.w2_weight"}),
)
FLOAT32_ENGINE_ROUTER = Block({}, {}, {_ROUTER: Whole(_ROUTER, FLOAT32)})
"""After :data:`ROUTED_EXPERTS`: SGLang's class keeps the router's weight in float32."""
_BIAS = "mlp.gate.e_score_correction_bias"
EXPERT_BIAS = Block(
    tensors={_BIAS: ("experts",)},
    train={"mlp.router.expert_bias": Whole(_BIAS, FLOAT32)},
    rollout={_BIAS: Whole(_BIAS, FLOAT32)},
    float32=frozenset({_BIAS}),
)
SHARED_EXPERTS = _gated_mlp("mlp.shared_experts", "shared_ffn", "shared")
