"""A family's table: its full tensors, and how each side's parameters are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from rlhf.weights.families.operations import Operation, Vocab, Whole

Dims = tuple[str, ...]
"""Names of sizes: hidden, ffn, query, kv, head, vocab."""


class Stage(Enum):
    """Pipeline stages that hold a parameter outside the layers."""

    FIRST = "first"
    LAST = "last"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class Outer:
    """A parameter outside the layers."""

    param: str
    operation: Whole | Vocab
    stage: Stage


@dataclass(frozen=True, slots=True)
class Side:
    """Parameters of one program, by the names it uses."""

    outer: tuple[Outer, ...]
    layer_prefix: str  # with {layer}
    layer: Mapping[str, Operation]


@dataclass(frozen=True, slots=True)
class Family:
    """Full tensors in HF names, the trainer's side (Megatron, TE names), the engine's (SGLang).

    ``tied``: with tied embeddings the first tensor is the second one. A parameter that would hold
    a tensor which its stage holds already in an earlier parameter does not exist then.
    """

    outer_tensors: Mapping[str, Dims]
    layer_tensors: Mapping[str, Dims]  # relative to model.layers.{layer}.
    tied: Mapping[str, str]
    train: Side
    rollout: Side
    tied_rollout_pp: bool  # the engine's class can run tied embeddings over pipeline stages
    attention_dp: bool  # the engine's class knows DP-attention


def extend(
    base: Family,
    *,
    tensors: Mapping[str, Dims],
    train: Mapping[str, Operation],
    rollout: Mapping[str, Operation],
) -> Family:
    """``base`` with more tensors and parameters in each layer."""
    return replace(
        base,
        layer_tensors={**base.layer_tensors, **tensors},
        train=replace(base.train, layer={**base.train.layer, **train}),
        rollout=replace(base.rollout, layer={**base.rollout.layer, **rollout}),
    )
