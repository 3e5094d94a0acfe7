"""Model shapes for tests, without files; and hypothesis strategies for layouts they admit."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.weights.families import check_rollout, check_train
from rlhf.weights.families.table import FAMILIES
from rlhf.weights.model_shape import ModelShape, parse_model_shape

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def make_shape(family: str = "llama", **settings: Any) -> ModelShape:
    """Sizes are pairwise different, so that a swapped dim cannot hide."""
    raw = {
        "architectures": [CLASSES[family]],
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
    return parse_model_shape({**raw, **settings})


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    return make_shape(
        draw(st.sampled_from(sorted(CLASSES))),
        vocab_size=draw(st.sampled_from([5, 64, 131, 192])),
        num_hidden_layers=draw(st.integers(1, 7)),
        num_key_value_heads=draw(st.sampled_from([1, 2, 4, 8])),
        tie_word_embeddings=draw(st.booleans()),
    )


@st.composite
def train_layouts(draw: st.DrawFn, shape: ModelShape, world: int | None = None) -> TrainLayout:
    """A layout that the model admits."""
    tp = draw(st.sampled_from([t for t in (1, 2, 4, 8) if shape.num_kv_heads % t == 0]))
    pp = draw(st.integers(1, min(4, shape.num_layers)))
    if world is not None:
        fitting = [
            (t, p)
            for t in (1, 2, 4, 8)
            for p in range(1, shape.num_layers + 1)
            if shape.num_kv_heads % t == 0 and world % (t * p) == 0
        ]
        tp, pp = draw(st.sampled_from(fitting))
    settings = {
        "vpp": draw(st.sampled_from([1, 1, 2])) if pp > 1 else 1,
        "first": draw(st.one_of(st.none(), st.integers(1, 3))),
        "last": draw(st.one_of(st.none(), st.integers(1, 3))),
    }
    size = tp * pp * draw(st.integers(1, 2)) if world is None else world
    layout = TrainLayout(size, tp=tp, pp=pp, **settings)
    try:
        check_train(shape, layout)
        for stage in range(pp):
            layout.layers(shape.num_layers, stage)
    except LayoutError:
        layout = TrainLayout(size, tp=tp, pp=1)
    return layout


@st.composite
def rollout_layouts(draw: st.DrawFn, shape: ModelShape, world: int | None = None) -> RolloutLayout:
    """A layout that the model admits."""
    sizes = [world] if world is not None else [1, 2, 3, 4, 6, 8, 16]
    candidates = []
    for size in sizes:
        for tp in (1, 2, 4, 8):
            for pp in (1, 2, 3):
                for dp in (1, 2):
                    try:
                        layout = RolloutLayout(size, tp=tp, pp=pp, dp=dp)
                        check_rollout(shape, FAMILIES[shape.family], layout)
                    except LayoutError:
                        continue
                    candidates.append(layout)
    return draw(st.sampled_from(candidates))
