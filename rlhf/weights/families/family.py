"""A family's table: what its layers are made of, and where SGLang's class is peculiar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rlhf.weights.families.operations import Operation, Vocab, Whole

Dims = tuple[str, ...]
"""Names of sizes, which ``layouts.py`` takes from the model's shape."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tensors of a layer, and the parameters that each program makes of them.

    Names are relative to the layer. With ``{expert}`` in it, a name stands for those of all
    experts; a Megatron parameter for those of the rank's.
    """

    tensors: Mapping[str, Dims]  # HF names
    train: Mapping[str, Operation]  # Megatron, Transformer Engine's names
    rollout: Mapping[str, Operation]  # SGLang
    float32: frozenset[str] = frozenset()
    """Tensors that are float32 in the files of a model of another dtype."""
    fp8: frozenset[str] = frozenset()
    """Engine parameters that are block fp8 in an engine with such weights."""

    def __add__(self, other: Block) -> Block:
        return Block(
            {**self.tensors, **other.tensors},
            {**self.train, **other.train},
            {**self.rollout, **other.rollout},
            self.float32 | other.float32,
            self.fp8 | other.fp8,
        )


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
class Family:
    """A layer is ``attention`` and then ``dense``, or ``experts`` where it has routed experts."""

    attention: Block
    dense: Block
    experts: Block | None = None
    engine_head: Stage = Stage.LAST
    """SGLang makes an untied head on these stages; only the last one uses it."""
    tied_engine_stages: bool = True
    """SGLang's class can run tied embeddings over pipeline stages."""
    redundant_experts: bool = True
    """SGLang's class has room for copies of experts."""
    attention_dp: bool = True
    """SGLang's class knows DP-attention."""
    block_fp8: bool = True
    """SGLang's class can load weights in block fp8."""
    mtp: bool = False
    """Its checkpoints may have layers for multi-token prediction."""
