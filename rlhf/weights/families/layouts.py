"""From a family table and a layout to pieces and parameter shapes of one rank. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.weights.families.blocks import OUTER_TENSORS, TIED, TRAIN_OUTER, rollout_outer
from rlhf.weights.families.checks import check_rollout, check_train
from rlhf.weights.families.family import Block, Family, Outer, Stage
from rlhf.weights.families.grids import (
    Grid,
    frame_of,
    rollout_grid,
    shapes_of,
    train_grid,
)
from rlhf.weights.families.mtp import (
    DRAFT_PREFIX,
    TRAIN_PREFIX,
    draft_faults,
    mtp_block,
    mtp_faults,
)
from rlhf.weights.families.operations import Laid, Operation, Shape
from rlhf.weights.families.quantized import quantized
from rlhf.weights.families.table import family_of
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.piece import FLOAT32, ITEMSIZES, Piece, full_box
from rlhf.weights.spread import EXPERT

HF_LAYER_PREFIX = "model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A run of layers that one rank holds, and what stands before and after it."""

    prefix: str  # of every parameter name
    layers: range  # global numbers
    first_name: int  # number that the first layer has in parameter names
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Side:
    """One program, as seen by one rank."""

    outer: tuple[Outer, ...]
    layer_prefix: str  # with {layer}
    layer: Callable[[Block], Mapping[str, Operation]]
    grid: Grid
    chunks: list[_Chunk]
    mtp_prefix: str | None = None  # with {index}; of MTP layers, which are on the last chunk


@dataclass(frozen=True, slots=True)
class _Param:
    """A local parameter; ``hf_prefix`` goes before the tensor names of its parts."""

    name: str
    hf_prefix: str
    laid: Laid


def full_shapes(shape: ModelShape, *, mtp: bool = False) -> dict[str, Shape]:
    """HF name -> shape of every tensor in the model's checkpoint (no lm_head when tied)."""
    pieces = full_pieces(shape, mtp=mtp)
    return {piece.tensor: tuple(n for _, n in piece.region) for piece in pieces}


def full_pieces(shape: ModelShape, *, mtp: bool = False) -> list[Piece]:
    """Every tensor of the model's checkpoint as a piece of itself.

    Args:
        mtp: with the layers for multi-token prediction, but for their copies of embedding and head.
    """
    family = family_of(shape)
    outer = {n: d for n, d in OUTER_TENSORS.items() if not (shape.tied_embeddings and n in TIED)}
    out = [_full_piece(name, dims) for name, dims in shapes_of(shape, outer).items()]
    by_kind = {
        has_experts: _full_layer(shape, layer_block(family, has_experts))
        for has_experts in {shape.has_experts(n) for n in range(shape.num_layers)}
    }
    for number in range(shape.num_layers):
        prefix = HF_LAYER_PREFIX.format(layer=number)
        for piece in by_kind[shape.has_experts(number)]:
            name = prefix + piece.tensor
            out.append(replace(piece, tensor=name, param=name))
    for number in mtp_layers(shape) if mtp else ():
        for piece in _full_layer(shape, _mtp_block(shape, number)):
            name = HF_LAYER_PREFIX.format(layer=number) + piece.tensor
            out.append(replace(piece, tensor=name, param=name))
    return out


def mtp_layers(shape: ModelShape) -> range:
    """Numbers that the MTP layers have in the checkpoint.

    Raises:
        LayoutError: the model has none.
    """
    family = family_of(shape)
    if faults := list(mtp_faults(shape.num_mtp_layers, family.mtp, shape.family)):
        raise LayoutError(faults)
    return range(shape.num_layers, shape.num_layers + shape.num_mtp_layers)


def train_pieces(
    shape: ModelShape, layout: TrainLayout, rank: int, *, mtp: bool = False
) -> list[Piece]:
    """What ``rank`` holds of the model in Megatron, by TE's parameter names.

    Layer numbers are local, as in ``decoder.layers.0.``; with vpp > 1 every name begins with the
    virtual chunk, as in ``chunk1.decoder.layers.0.``.

    Args:
        mtp: with the layers for multi-token prediction, which are on the last stage beside a copy
            of the embedding.

    Raises:
        LayoutError: the layout does not fit the model.
    """
    return _pieces(_train_params(shape, layout, rank, mtp))


def train_param_shapes(
    shape: ModelShape, layout: TrainLayout, rank: int, *, mtp: bool = False
) -> dict[str, Shape]:
    """Megatron parameter -> local shape, vocabulary padding included."""
    return {p.name: p.laid.shape for p in _train_params(shape, layout, rank, mtp)}


def rollout_pieces(
    shape: ModelShape, layout: RolloutLayout, rank: int, *, mtp: bool = False
) -> list[Piece]:
    """What ``rank`` holds of the model in its SGLang engine, by the live parameter names.

    With ``layout.quantization`` block_fp8 the matrices of the layers are float8_e4m3fn and have
    their scales behind them, pieces of ``scale_name(tensor)`` in blocks (float32).

    Args:
        mtp: with the parameters of the draft model, whose names begin with ``draft.``; its
            embedding and head are the model's own.

    Raises:
        LayoutError: the layout does not fit the model.
    """
    return _pieces(_rollout_params(shape, layout, rank, mtp))


def rollout_param_shapes(
    shape: ModelShape, layout: RolloutLayout, rank: int, *, mtp: bool = False
) -> dict[str, Shape]:
    """SGLang parameter -> local shape, vocabulary padding included."""
    return {p.name: p.laid.shape for p in _rollout_params(shape, layout, rank, mtp)}


def rollout_bytes(shape: ModelShape, layout: RolloutLayout, rank: int, itemsize: int) -> int:
    """Bytes of all of ``rank``'s SGLang parameters, vocabulary padding included.

    Args:
        itemsize: of the model's dtype; a parameter may have one of its own.
    """
    return sum(
        math.prod(p.laid.shape) * (itemsize if p.laid.dtype is None else ITEMSIZES[p.laid.dtype])
        for p in _rollout_params(shape, layout, rank)
    )


def rollout_padding_params(shape: ModelShape, layout: RolloutLayout, rank: int) -> set[str]:
    """SGLang parameters that hold nothing but vocabulary padding on ``rank``."""
    return {p.name for p in _rollout_params(shape, layout, rank) if not p.laid.parts}


def engine_layers(num_layers: int, pp: int, stage: int) -> range:
    """Global layer numbers on an SGLang stage: even, extra layers to the last stages."""
    even, extra = divmod(num_layers, pp)
    counts = [even + (s >= pp - extra) for s in range(pp)]
    start = sum(counts[:stage])
    return range(start, start + counts[stage])


def _train_params(shape: ModelShape, layout: TrainLayout, rank: int, mtp: bool) -> Iterator[_Param]:
    check_train(shape, layout)
    return _params(shape, _train_side(shape, layout, rank, mtp))


def _train_side(shape: ModelShape, layout: TrainLayout, rank: int, mtp: bool = False) -> _Side:
    at = layout.coord(rank)
    chunks = [
        _Chunk(
            prefix=f"chunk{v}." if layout.vpp > 1 else "",
            layers=layout.layers(shape.num_layers, at.pp, v),
            first_name=0,
            is_first=at.pp == 0 and v == 0,
            is_last=at.pp == layout.pp - 1 and v == layout.vpp - 1,
        )
        for v in range(layout.vpp)
    ]
    return _Side(
        outer=TRAIN_OUTER,
        layer_prefix="decoder.layers.{layer}.",
        layer=lambda block: block.train,
        grid=train_grid(shape, layout, rank),
        chunks=chunks,
        mtp_prefix=TRAIN_PREFIX if mtp else None,
    )


def _rollout_params(
    shape: ModelShape, layout: RolloutLayout, rank: int, mtp: bool = False
) -> Iterator[_Param]:
    check_rollout(shape, layout)
    return _params(shape, _rollout_side(shape, layout, rank, mtp))


def _rollout_side(shape: ModelShape, layout: RolloutLayout, rank: int, mtp: bool = False) -> _Side:
    if mtp and (faults := list(draft_faults(shape.num_mtp_layers, layout.pp))):
        raise LayoutError(faults)
    at = layout.coord(rank)
    layers = engine_layers(shape.num_layers, layout.pp, at.pp)
    plain = layout.quantization == "none"
    return _Side(
        outer=rollout_outer(family_of(shape).engine_head),
        layer_prefix="model.layers.{layer}.",
        layer=lambda block: (block if plain else quantized(block)).rollout,
        grid=rollout_grid(shape, layout, rank),
        chunks=[_Chunk("", layers, layers.start, at.pp == 0, at.pp == layout.pp - 1)],
        mtp_prefix=DRAFT_PREFIX if mtp else None,
    )


def outer_pieces(
    shape: ModelShape, layout: TrainLayout | RolloutLayout, rank: int, *, mtp: bool = False
) -> list[Piece]:
    """What ``rank`` holds of the tensors outside the layers; MTP layers are none of these."""
    side = (
        _train_side(shape, layout, rank, mtp)
        if isinstance(layout, TrainLayout)
        else _rollout_side(shape, layout, rank, mtp)
    )
    params: list[_Param] = []
    for chunk in side.chunks:
        params += (param for param, _ in _outer_params(shape, side, chunk))
        params += _mtp_params(shape, side, chunk)
    return _pieces(params)


def _params(shape: ModelShape, side: _Side) -> Iterator[_Param]:
    """Parameters in the order embedding, layers, norm, head."""
    family = family_of(shape)
    kinds = {shape.has_experts(n) for chunk in side.chunks for n in chunk.layers}
    by_kind = {kind: _lay_layer(shape, side, layer_block(family, kind)) for kind in kinds}
    for chunk in side.chunks:
        outer = list(_outer_params(shape, side, chunk))
        yield from (p for p, stage in outer if stage is Stage.FIRST)
        for offset, number in enumerate(chunk.layers):
            own = chunk.prefix + side.layer_prefix.format(layer=chunk.first_name + offset)
            hf_prefix = HF_LAYER_PREFIX.format(layer=number)
            for name, laid in by_kind[shape.has_experts(number)]:
                yield _Param(own + name, hf_prefix, laid)
        yield from (p for p, stage in outer if stage is not Stage.FIRST)
        yield from _mtp_params(shape, side, chunk)


def _mtp_params(shape: ModelShape, side: _Side, chunk: _Chunk) -> Iterator[_Param]:
    """None but on the last chunk."""
    if side.mtp_prefix is None or not chunk.is_last:
        return
    prefix = chunk.prefix + side.mtp_prefix
    for index, number in enumerate(mtp_layers(shape)):
        hf_prefix = HF_LAYER_PREFIX.format(layer=number)
        for name, laid in _lay_layer(shape, side, _mtp_block(shape, number)):
            yield _Param(prefix.format(index=index) + name, hf_prefix, laid)


def _mtp_block(shape: ModelShape, number: int) -> Block:
    return mtp_block(layer_block(family_of(shape), shape.has_experts(number)))


def layer_block(family: Family, has_experts: bool) -> Block:
    """All of one layer."""
    if not has_experts:
        return family.attention + family.dense
    assert family.experts is not None
    return family.attention + family.experts


def _lay_layer(shape: ModelShape, side: _Side, block: Block) -> list[tuple[str, Laid]]:
    """Parameters of one layer on this rank; the same for all layers of its kind."""
    frame = frame_of(shape, side.grid, block.tensors)
    out = []
    for name, operation in side.layer(block).items():
        laid = operation.lay(frame)
        if EXPERT not in name:
            out.append((name, laid))
            continue
        for slot, number in enumerate(side.grid.experts):
            out.append((name.replace(EXPERT, str(slot)), laid.of_expert(number)))
    return out


def _outer_params(shape: ModelShape, side: _Side, chunk: _Chunk) -> Iterator[tuple[_Param, Stage]]:
    frame = frame_of(shape, side.grid, OUTER_TENSORS)
    tied = TIED if shape.tied_embeddings else {}
    # MTP layers embed the tokens that they predict from
    first = chunk.is_first or (side.mtp_prefix is not None and chunk.is_last)
    here = {Stage.FIRST: first, Stage.LAST: chunk.is_last, Stage.EVERY: True}
    held: set[str] = set()
    for outer in side.outer:
        if not here[outer.stage]:
            continue
        tensor = tied.get(outer.operation.tensor, outer.operation.tensor)
        if tensor in held:
            continue
        held.add(tensor)
        laid = replace(outer.operation, tensor=tensor).lay(frame)
        yield _Param(chunk.prefix + outer.param, "", laid), outer.stage


def _pieces(params: Iterable[_Param]) -> list[Piece]:
    return [
        Piece(
            param.hf_prefix + part.tensor,
            part.region,
            param.name,
            part.local,
            param.laid.dtype,
            part.transposed,
        )
        for param in params
        for part in param.laid.parts
    ]


def _full_layer(shape: ModelShape, block: Block) -> list[Piece]:
    """A layer's tensors as pieces of themselves, its experts one after the other."""
    experts = range(shape.moe.num_experts) if shape.moe is not None else range(0)
    dtypes = dict.fromkeys(block.float32, FLOAT32)
    shapes = shapes_of(shape, block.tensors)
    whole = [_full_piece(n, s, dtypes.get(n)) for n, s in shapes.items() if EXPERT not in n]
    return whole + [
        _full_piece(name.replace(EXPERT, str(number)), dims)
        for number in experts
        for name, dims in shapes.items()
        if EXPERT in name
    ]


def _full_piece(name: str, dims: Shape, dtype: str | None = None) -> Piece:
    return Piece(name, full_box(dims), name, full_box(dims), dtype)
