"""The families that we know."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlhf.weights.families.deepseek_v3 import deepseek_v3
from rlhf.weights.families.family import Family
from rlhf.weights.families.glm4_moe import glm4_moe
from rlhf.weights.families.llama import llama
from rlhf.weights.families.qwen2 import qwen2
from rlhf.weights.families.qwen3 import qwen3, qwen3_moe
from rlhf.weights.model_shape import FamilyName, ModelShape

FAMILIES: Mapping[FamilyName, Callable[[ModelShape], Family]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
}


def family_of(shape: ModelShape) -> Family:
    """The table of a model's family."""
    return FAMILIES[shape.family](shape)
