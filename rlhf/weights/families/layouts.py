"""From a family table and a layout to pieces and parameter shapes of one rank. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.weights.families.checks import check_rollout, check_train, engine_vocab, padded_vocab
from rlhf.weights.families.family import Dims, Family, Side, Stage
from rlhf.weights.families.operations import Frame, Group, GroupName, Laid, Shape
from rlhf.weights.families.table import FAMILIES
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.piece import Piece

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
class _Param:
    """A local parameter; ``hf_prefix`` goes before the tensor names of its parts."""

    name: str
    hf_prefix: str
    laid: Laid


def full_shapes(shape: ModelShape) -> dict[str, Shape]:
    """HF name -> shape of every tensor in the model's checkpoint (no lm_head when tied)."""
    family = FAMILIES[shape.family]
    out = _shapes(shape, family.outer_tensors)
    if shape.tied_embeddings:
        for name in family.tied:
            del out[name]
    per_layer = _shapes(shape, family.layer_tensors)
    for layer in range(shape.num_layers):
        prefix = HF_LAYER_PREFIX.format(layer=layer)
        out.update((prefix + name, dims) for name, dims in per_layer.items())
    return out


def train_pieces(shape: ModelShape, layout: TrainLayout, rank: int) -> list[Piece]:
    """What ``rank`` holds of the model in Megatron, by TE's parameter names.

    Layer numbers are local, as in ``decoder.layers.0.``; with vpp > 1 every name begins with the
    virtual chunk, as in ``chunk1.decoder.layers.0.``.

    Raises:
        LayoutError: the layout does not fit the model.
    """
    return _pieces(shape, _train_params(shape, layout, rank))


def train_param_shapes(shape: ModelShape, layout: TrainLayout, rank: int) -> dict[str, Shape]:
    """Megatron parameter -> local shape, vocabulary padding included."""
    return {p.name: p.laid.shape for p in _train_params(shape, layout, rank)}


def rollout_pieces(shape: ModelShape, layout: RolloutLayout, rank: int) -> list[Piece]:
    """What ``rank`` holds of the model in its SGLang engine, by the live parameter names.

    Raises:
        LayoutError: the layout does not fit the model.
    """
    return _pieces(shape, _rollout_params(shape, layout, rank))


def rollout_param_shapes(shape: ModelShape, layout: RolloutLayout, rank: int) -> dict[str, Shape]:
    """SGLang parameter -> local shape, vocabulary padding included."""
    return {p.name: p.laid.shape for p in _rollout_params(shape, layout, rank)}


def rollout_padding_params(shape: ModelShape, layout: RolloutLayout, rank: int) -> set[str]:
    """SGLang parameters that hold nothing but vocabulary padding on ``rank``."""
    return {p.name for p in _rollout_params(shape, layout, rank) if not p.laid.parts}


def engine_layers(num_layers: int, pp: int, stage: int) -> range:
    """Global layer numbers on an SGLang stage: even, extra layers to the last stages."""
    even, extra = divmod(num_layers, pp)
    counts = [even + (s >= pp - extra) for s in range(pp)]
    start = sum(counts[:stage])
    return range(start, start + counts[stage])


def _train_params(shape: ModelShape, layout: TrainLayout, rank: int) -> Iterator[_Param]:
    check_train(shape, layout)
    family, at = FAMILIES[shape.family], layout.coord(rank)
    group = Group(layout.tp, at.tp)
    groups: dict[GroupName, Group] = {"tp": group, "attention": group}
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
    return _params(shape, family, family.train, groups, padded_vocab(shape, layout.tp), chunks)


def _rollout_params(shape: ModelShape, layout: RolloutLayout, rank: int) -> Iterator[_Param]:
    family, at = FAMILIES[shape.family], layout.coord(rank)
    check_rollout(shape, family, layout)
    attention_tp = layout.tp // layout.dp
    groups: dict[GroupName, Group] = {
        "tp": Group(layout.tp, at.tp),
        "attention": Group(attention_tp, at.tp % attention_tp),
    }
    layers = engine_layers(shape.num_layers, layout.pp, at.pp)
    chunk = _Chunk("", layers, layers.start, at.pp == 0, at.pp == layout.pp - 1)
    return _params(shape, family, family.rollout, groups, engine_vocab(shape), [chunk])


def _params(
    shape: ModelShape,
    family: Family,
    side: Side,
    groups: Mapping[GroupName, Group],
    vocab_rows: int,
    chunks: list[_Chunk],
) -> Iterator[_Param]:
    """Parameters in the order embedding, layers, norm, head."""
    frame = Frame(_shapes(shape, family.layer_tensors), groups, shape.num_kv_heads, vocab_rows)
    layer = [(name, operation.lay(frame)) for name, operation in side.layer.items()]
    for chunk in chunks:
        outer = list(_outer_params(shape, family, side, groups, vocab_rows, chunk))
        before = [p for p, stage in outer if stage is Stage.FIRST]
        yield from before
        for offset, number in enumerate(chunk.layers):
            own = chunk.prefix + side.layer_prefix.format(layer=chunk.first_name + offset)
            hf_prefix = HF_LAYER_PREFIX.format(layer=number)
            for name, laid in layer:
                yield _Param(own + name, hf_prefix, laid)
        yield from (p for p, stage in outer if stage is not Stage.FIRST)


def _outer_params(
    shape: ModelShape,
    family: Family,
    side: Side,
    groups: Mapping[GroupName, Group],
    vocab_rows: int,
    chunk: _Chunk,
) -> Iterator[tuple[_Param, Stage]]:
    frame = Frame(_shapes(shape, family.outer_tensors), groups, shape.num_kv_heads, vocab_rows)
    tied = family.tied if shape.tied_embeddings else {}
    here = {Stage.FIRST: chunk.is_first, Stage.LAST: chunk.is_last, Stage.EVERY: True}
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


def _pieces(shape: ModelShape, params: Iterator[_Param]) -> list[Piece]:
    return [
        Piece(param.hf_prefix + part.tensor, part.region, param.name, part.local)
        for param in params
        for part in param.laid.parts
    ]


def _shapes(shape: ModelShape, tensors: Mapping[str, Dims]) -> dict[str, Shape]:
    sizes = {
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_size,
        "query": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "head": shape.head_dim,
        "vocab": shape.vocab_size,
    }
    return {name: tuple(sizes[dim] for dim in dims) for name, dims in tensors.items()}
