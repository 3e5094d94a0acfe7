"""Model shapes for tests, without files; and hypothesis strategies for layouts they admit."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import strategies as st

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.weights.families import check_rollout, check_train
from rlhf.weights.model_shape import ModelShape, MoEShape, parse_model_shape

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 10,
        "kv_lora_rank": 7,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 2,
        "v_head_dim": 6,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
"""What a family has beside the sizes of :func:`make_shape`."""
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "deepseek_v3": [{}, {"q_lora_rank": None}, {"n_shared_experts": None}],
    "glm4_moe": [{}, {"use_qk_norm": False}, {"attention_bias": False}],
}


def make_shape(family: str = "llama", **settings: Any) -> ModelShape:
    """Sizes are pairwise different, so that a swapped dim cannot hide."""
    return parse_model_shape(make_raw(family, **settings))


def make_raw(family: str = "llama", **settings: Any) -> dict[str, Any]:
    """The ``config.json`` object of :func:`make_shape`."""
    raw = {
        "vocab_size": 131,
        "hidden_size": 20,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 3,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    return {**raw, **MODELS[family], **settings}


def make_experts(**changes: Any) -> MoEShape:
    """Eight experts of which a token sees two, chosen as Qwen3-MoE does it."""
    facts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_token": 2,
        "ffn_size": 96,
        "num_shared_experts": 0,
        "first_dense": 0,
        "scoring": "softmax",
        "normalize_topk": True,
        "scaling_factor": 1.0,
        "num_groups": 1,
        "topk_groups": 1,
        "expert_bias": False,
    }
    return MoEShape(**{**facts, **changes})


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    family = draw(st.sampled_from(sorted(MODELS)))
    settings = dict(draw(st.sampled_from(VARIANTS.get(family, [{}]))))
    num_layers = draw(st.integers(1, 7))
    if "first_k_dense_replace" in MODELS[family]:
        settings["first_k_dense_replace"] = draw(st.integers(0, num_layers))
    else:
        settings["tie_word_embeddings"] = family != "qwen3_moe" and draw(st.booleans())
    return make_shape(
        family,
        vocab_size=draw(st.sampled_from([5, 64, 131, 192])),
        num_hidden_layers=num_layers,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4, 8])),
        **settings,
    )


@st.composite
def train_layouts(draw: st.DrawFn, shape: ModelShape, world: int | None = None) -> TrainLayout:
    """A layout that the model admits."""
    sizes = [world] if world is not None else [1, 2, 3, 4, 6, 8, 12, 16]
    grids = [
        {"world": size, "tp": tp, "pp": pp, "ep": ep, "etp": etp}
        for size in sizes
        for tp, pp in product((1, 2, 4, 8), (1, 2, 3, 4))
        for ep, etp in (product((1, 2, 4), (None, 1, 2)) if shape.moe else [(1, None)])
    ]
    fitting = [grid for grid in grids if _admits(shape, grid)]
    grid = draw(st.sampled_from(fitting))
    ends = {
        "vpp": draw(st.sampled_from([1, 1, 2])) if grid["pp"] > 1 else 1,
        "first": draw(st.one_of(st.none(), st.integers(1, 3))),
        "last": draw(st.one_of(st.none(), st.integers(1, 3))),
    }
    return TrainLayout(**grid, **(ends if _admits(shape, {**grid, **ends}) else {}))


def _admits(shape: ModelShape, grid: dict[str, Any]) -> bool:
    try:
        layout = TrainLayout(**grid)
        check_train(shape, layout)
        for stage in range(layout.pp):
            layout.layers(shape.num_layers, stage)
    except LayoutError:
        return False
    return True


@st.composite
def rollout_layouts(draw: st.DrawFn, shape: ModelShape, world: int | None = None) -> RolloutLayout:
    """A layout that the model admits."""
    sizes = [world] if world is not None else [1, 2, 3, 4, 6, 8, 16]
    experts = [(1, "none", 0)]
    if shape.moe:
        experts += [(2, "none", 0), (4, "none", 0), (2, "deepep", 0), (2, "none", 4)]
    candidates = []
    for size, tp, pp, dp in product(sizes, (1, 2, 4, 8), (1, 2, 3), (1, 2)):
        for ep, a2a, redundant in experts:
            try:
                layout = RolloutLayout(size, tp, dp, ep, pp, a2a, redundant_experts=redundant)
                check_rollout(shape, layout)
            except LayoutError:
                continue
            candidates.append(layout)
    return draw(st.sampled_from(candidates))
