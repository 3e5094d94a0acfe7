"""Which layouts leave the blocks of block-fp8 weights whole. Pure Python.

A block has one scale. So one rank of the training layout must hold all of it, and one rank of the
engine too, whose parameters have blocks of their own that must be those of the tensor. Messages
begin with the key that is at fault, as in a configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.weights.block_scales import BLOCK, split_blocks
from rlhf.weights.families.layouts import full_shapes, rollout_pieces, train_pieces
from rlhf.weights.families.table import family_of
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.piece import Piece, show_box

_QUANTIZATION = "rollout.quantization"
_LAYER = re.compile(r"(?<=layers\.)\d+|(?<=experts\.)\d+")


def check_blocks(shape: ModelShape, train: TrainLayout, rollout: RolloutLayout) -> None:
    """
    Raises:
        LayoutError: the engine keeps block fp8, and one of the layouts cuts through a block.
    """
    faults = [*engine_block_faults(shape, rollout), *train_block_faults(shape, train, rollout)]
    if faults:
        raise LayoutError(faults)


def engine_block_faults(shape: ModelShape, rollout: RolloutLayout) -> Iterator[str]:
    """Why the engine cannot have block fp8 under this layout, which fits the model otherwise."""
    if rollout.quantization == "none":
        return
    if not family_of(shape).block_fp8:
        yield f"{_QUANTIZATION}: must be none: SGLang's {shape.family} drops scales of blocks"
        return
    never = _engine_cuts(shape, RolloutLayout(1))
    for tensor, text in _engine_cuts(shape, rollout).items():
        if tensor in never:
            yield f"{_QUANTIZATION}: must be none: {never[tensor]}, even on one rank"
            continue
        more = ""
        if ".self_attn." in tensor:
            more = ", raise rollout.dp"
        elif ".experts." in tensor:
            more = ", raise rollout.ep"
        yield f"rollout.tp: {text}; lower rollout.tp{more}, or set {_QUANTIZATION} to none"


def train_block_faults(
    shape: ModelShape, train: TrainLayout, rollout: RolloutLayout
) -> Iterator[str]:
    """Why no rank in training has whole blocks of what the engine keeps in block fp8."""
    if rollout.quantization == "none" or not family_of(shape).block_fp8:
        return
    scaled = {piece.tensor for piece in _fp8_pieces(shape, RolloutLayout(1))}
    small = _one_of_each(shape, 1)
    world = math.lcm(train.tp, train.expert_tp)
    layout = TrainLayout(world, tp=train.tp, etp=train.etp)
    sizes = full_shapes(small)
    found: dict[str, str] = {}
    for rank in range(world):
        for piece in train_pieces(small, layout, rank):
            if piece.tensor in scaled:
                for cut in split_blocks(piece.region, sizes[piece.tensor]):
                    found.setdefault(_star(piece.tensor), _cut_text(piece, cut))
    for tensor, text in found.items():
        key = "train.etp" if ".experts." in tensor and train.etp is not None else "train.tp"
        yield f"{key}: {text}; lower {key}, or set {_QUANTIZATION} to none"


def _engine_cuts(shape: ModelShape, layout: RolloutLayout) -> dict[str, str]:
    """Tensor, with stars for its numbers -> the first cut through its blocks on any rank."""
    sizes = full_shapes(_one_of_each(shape, layout.ep))
    found: dict[str, str] = {}
    for piece in _fp8_pieces(shape, layout):
        name = _star(piece.tensor)
        for cut in split_blocks(piece.region, sizes[piece.tensor]):
            found.setdefault(name, _cut_text(piece, cut))
        for start, _ in piece.local[-2:]:
            if start % BLOCK:
                begins = f"{name} begins at {start} of {_star(piece.param)}"
                found.setdefault(name, f"{begins}, which must be {_multiple()}")
    return found


def _fp8_pieces(shape: ModelShape, layout: RolloutLayout) -> Iterator[Piece]:
    """Of the parameters that would be fp8, on every rank of a stage that has a layer of each."""
    small, family = _one_of_each(shape, layout.ep), family_of(shape)
    blocks = [family.attention, family.dense, *([family.experts] if family.experts else [])]
    names = {name for block in blocks for name in block.fp8}
    stage = replace(layout, world=layout.tp, pp=1, quantization="none", redundant_experts=0)
    for rank in range(stage.world):
        for piece in rollout_pieces(small, stage, rank):
            if piece.param.split(".", 3)[-1] in names:
                yield piece


def _one_of_each(shape: ModelShape, num_experts: int) -> ModelShape:
    """The model with one layer of each kind: those of a kind are cut alike, and so are experts."""
    if shape.moe is None:
        return replace(shape, num_layers=1)
    dense = int(not shape.has_experts(0))
    moe = replace(shape.moe, num_experts=num_experts, first_dense=dense)
    return replace(shape, num_layers=dense + 1, moe=moe)


def _cut_text(piece: Piece, cut: int) -> str:
    return (
        f"a rank holds {show_box(piece.region)} of {_star(piece.tensor)}, whose cut at {cut} must "
        f"be {_multiple()}"
    )


def _multiple() -> str:
    return f"a multiple of {BLOCK}, the rows and columns that share a scale"


def _star(name: str) -> str:
    return _LAYER.sub("*", name)
