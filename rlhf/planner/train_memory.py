"""Bytes of models in Megatron, of each rank. Pure: from shapes and layouts.

All ranks of a pipeline stage hold parameters of the same shapes; what differs between them is the
shard of the optimizer state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlhf.dist.layout import TrainLayout
from rlhf.planner.buffers import Buffer, TrainParam, bucket_size, lay_out
from rlhf.weights.families import full_pieces, train_param_shapes, train_pieces
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.piece import FLOAT32, ITEMSIZES, box_size

Head = Literal["logprobs", "values"]
GRADIENT_BYTES = 4
"""Gradients are added up and reduced in float32."""
MOMENT_BYTES = 8
"""Adam's two, in float32."""
MASTER_BYTES = 4
EMBEDDING_PARAM = "embedding.word_embeddings.weight"
HEAD_PARAM = "output_layer.weight"
ROUTER_PARAM = ".mlp.router.weight"
EXPERT_PARAM = ".mlp.experts."
LAYER = re.compile(r"(?:chunk\d+\.)?decoder\.layers\.\d+")
ATTENTION_ORDER = ("linear_q_", "linear_kv_", "linear_proj", "linear_qkv")
"""As Megatron's attention makes its modules; the table has them in another order."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """How a model is held for training or scoring."""

    shape: ModelShape
    itemsize: int
    head: Head = "logprobs"
    trainable: bool = True
    overlap: bool = True
    """Gradient reduction overlaps the backward pass (``train.overlap``)."""
    freeze_router: bool = False


@dataclass(frozen=True, slots=True)
class TrainBytes:
    """By global rank."""

    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]


def train_bytes(use: ModelUse, layout: TrainLayout) -> TrainBytes:
    """Weights, gradients and optimizer state of every rank.

    - weights, trainable: the parameter buffers, ``buffer elements * itemsize``; frozen ones: the
      parameters' own elements. Expert biases come on top, 4 bytes each.
    - gradients: ``buffer elements * 4``; none of a frozen model.
    - optimizer: ``12 bytes`` (master, two moments) per element that the rank owns; 8 for a float32
      model, whose weights are their own masters. A rank owns its shard of each bucket: of
      ``1 / (dp * cp)`` of the dense parameters, of ``1 / edp`` of experts that are spread (ep > 1).
    """
    stages = [_stage(use, layout, pp) for pp in range(layout.pp)]
    owned = [(_owned(stage.dense), _owned(stage.experts)) for stage in stages]
    coords = [layout.coord(rank) for rank in range(layout.world)]
    per_element = state_bytes_per_element(use.itemsize)
    return TrainBytes(
        weights=tuple(stages[at.pp].weights for at in coords),
        gradients=tuple(stages[at.pp].gradients for at in coords),
        optimizer=tuple(
            per_element * sum(_at(owned[at.pp], at.cp + layout.cp * at.dp, at.edp)) for at in coords
        ),
    )


def _owned(buffers: Sequence[Buffer]) -> list[int]:
    """By replica, in all buffers."""
    return [sum(parts) for parts in zip(*(buffer.owned() for buffer in buffers), strict=True)]


def _at(owned: tuple[list[int], list[int]], replica: int, expert_replica: int) -> Iterator[int]:
    """What a rank owns of dense parameters and of experts; nothing where there are none."""
    for shares, number in zip(owned, (replica, expert_replica), strict=True):
        yield shares[number] if shares else 0


def state_bytes_per_element(itemsize: int) -> int:
    """Of an optimizer state, for a model whose weights have ``itemsize`` bytes."""
    return MOMENT_BYTES + (0 if itemsize == 4 else MASTER_BYTES)


@dataclass(frozen=True, slots=True)
class _Stage:
    weights: int
    gradients: int
    dense: tuple[Buffer, ...]
    experts: tuple[Buffer, ...]


def _stage(use: ModelUse, layout: TrainLayout, pp: int) -> _Stage:
    """``pp``: the number of the stage."""
    rank = layout.rank(pp=pp)
    chunks = _chunks(use, layout, rank)
    biases = _bias_bytes(use.shape, layout, rank)
    if not use.trainable:
        elements = sum(param.num_elements for chunk in chunks for param in chunk)
        return _Stage(elements * use.itemsize + biases, 0, (), ())
    dense: list[Buffer] = []
    experts: list[Buffer] = []
    frozen = 0
    replicas = layout.dp * layout.cp
    for number, chunk in enumerate(chunks):
        in_buckets = use.overlap and replicas > 1 and pp == 0 and number == 0
        size = bucket_size(layout.dp) if in_buckets else None
        trained = [param for param in chunk if param.trainable]
        frozen += sum(param.num_elements for param in chunk if not param.trainable)
        for found, buffers, sharers in (
            ([param for param in trained if not param.is_expert], dense, replicas),
            ([param for param in trained if param.is_expert], experts, layout.edp),
        ):
            if found:
                buffers.append(lay_out(found, sharers, size))
    elements = sum(buffer.num_elements for buffer in (*dense, *experts))
    return _Stage(
        weights=(elements + frozen) * use.itemsize + biases,
        gradients=elements * GRADIENT_BYTES,
        dense=tuple(dense),
        experts=tuple(experts),
    )


def _chunks(use: ModelUse, layout: TrainLayout, rank: int) -> list[list[TrainParam]]:
    """A value head is one row, whole on every rank, in place of the vocabulary's."""
    values = use.head == "values"
    shape = replace(use.shape, tied_embeddings=False) if values else use.shape
    out: list[list[TrainParam]] = [[] for _ in range(layout.vpp)]
    biases = _float32_params(shape, layout, rank)
    sizes = train_param_shapes(shape, layout, rank)
    for name in _in_module_order(name for name in sizes if name not in biases):
        size = sizes[name]
        chunk = int(name[len("chunk") :].partition(".")[0]) if layout.vpp > 1 else 0
        outer = name.endswith((EMBEDDING_PARAM, HEAD_PARAM))
        if values and name.endswith(HEAD_PARAM):
            size = (1, shape.hidden_size)
        out[chunk].append(
            TrainParam(
                num_elements=math.prod(size),
                is_expert=EXPERT_PARAM in name and layout.ep > 1,
                alone=shape.tied_embeddings and outer and layout.pp > 1,
                trainable=not (use.freeze_router and name.endswith(ROUTER_PARAM)),
            )
        )
    return out


def _in_module_order(names: Iterable[str]) -> list[str]:
    """The order decides where shards are cut; a weight comes before the norm that it holds."""
    first: dict[str, int] = {}
    keys = {}
    for position, name in enumerate(names):
        layer = LAYER.match(name)
        module, _, leaf = name.rpartition(".")
        words = [f".self_attention.{word}" in name for word in ATTENTION_ORDER]
        keys[name] = (
            first.setdefault(layer.group() if layer else name, position),
            [".input_layernorm." in name, *words, True].index(True),
            first.setdefault(module, position),
            leaf.startswith("layer_norm"),
        )
    return sorted(keys, key=lambda name: keys[name])


def _float32_params(shape: ModelShape, layout: TrainLayout, rank: int) -> set[str]:
    """Expert biases: buffers of the module, which no gradient reaches."""
    return {p.param for p in train_pieces(shape, layout, rank) if p.dtype == FLOAT32}


def _bias_bytes(shape: ModelShape, layout: TrainLayout, rank: int) -> int:
    return sum(
        box_size(piece.local) * ITEMSIZES[FLOAT32]
        for piece in train_pieces(shape, layout, rank)
        if piece.dtype == FLOAT32
    )


@dataclass(frozen=True, slots=True)
class DiskBytes:
    """``export``: a Hugging Face folder. ``state``: a checkpoint to go on from."""

    export: int
    state: int


def disk_bytes(shape: ModelShape, itemsize: int) -> DiskBytes:
    """Each tensor once: in its dtype in an export; in a state with a float32 master and two moments
    beside it, 12 bytes more per element."""
    pieces = full_pieces(shape)
    elements = sum(box_size(piece.region) for piece in pieces)
    own = sum(
        box_size(piece.region) * (ITEMSIZES[piece.dtype] - itemsize)
        for piece in pieces
        if piece.dtype is not None
    )
    export = elements * itemsize + own
    return DiskBytes(export, export + elements * (MASTER_BYTES + MOMENT_BYTES))
