"""Layers for multi-token prediction (arXiv:2412.19437, section 2.2): a decoder layer and before it
a projection of a token's embedding beside the hidden state of the token before.

In the checkpoint they are numbered behind the model's layers. Its copies of embedding and head are
no tensors here: both programs take the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from rlhf.weights.families.family import Block
from rlhf.weights.families.operations import Rows, Whole

TRAIN_PREFIX = "mtp.layers.{index}."
DRAFT_PREFIX = "draft.model."
"""SGLang has a model of its own for it, the draft model, whose names come behind ``draft.``."""
_TRAIN_LAYER = "transformer_layer."
_DRAFT_LAYER = "decoder."

_Value = TypeVar("_Value")

_PROJECTION = Block(
    tensors={
        "enorm.weight": ("hidden",),
        "hnorm.weight": ("hidden",),
        "eh_proj.weight": ("hidden", "embedding_and_hidden"),
        "shared_head.norm.weight": ("hidden",),
    },
    train={
        "enorm.weight": Whole("enorm.weight"),
        "hnorm.weight": Whole("hnorm.weight"),
        "eh_proj.weight": Rows(("eh_proj.weight",)),
        "final_layernorm.weight": Whole("shared_head.norm.weight"),
    },
    rollout={
        "enorm.weight": Whole("enorm.weight"),
        "hnorm.weight": Whole("hnorm.weight"),
        "eh_proj.weight": Whole("eh_proj.weight"),
        "shared_head.norm.weight": Whole("shared_head.norm.weight"),
    },
)


def mtp_block(layer: Block) -> Block:
    """All of one MTP layer, from the block of the decoder layer in it."""
    inner = Block(
        tensors=layer.tensors,
        train=_behind(_TRAIN_LAYER, layer.train),
        rollout=_behind(_DRAFT_LAYER, layer.rollout),
        float32=layer.float32,
        fp8=frozenset(_DRAFT_LAYER + name for name in layer.fp8),
    )
    return _PROJECTION + inner


def mtp_faults(num_mtp_layers: int, has_mtp: bool, family: str) -> Iterator[str]:
    """Why there are no pieces of MTP layers of this model."""
    if not has_mtp:
        yield f"mtp: must be false: {family} has no layers for multi-token prediction"
    elif num_mtp_layers == 0:
        yield "mtp: must be false: num_nextn_predict_layers of the model is 0"


def draft_faults(num_mtp_layers: int, pp: int) -> Iterator[str]:
    """Why SGLang has no draft model of them."""
    if num_mtp_layers > 1:
        yield f"mtp: SGLang's draft model has 1 MTP layer, the model has {num_mtp_layers}"
    if pp > 1:
        yield f"rollout.pp: must be 1, is {pp}: a draft model has no stages; use rollout.tp instead"


def _behind(prefix: str, table: Mapping[str, _Value]) -> dict[str, _Value]:
    return {prefix + name: value for name, value in table.items()}
