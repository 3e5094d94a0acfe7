"""A model between its training layout and its engines, for all ranks at once. Pure Python.

Layers of one kind are cut alike, and so are experts: each is laid out once for each rank of the
group that cuts it, not once for each rank of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.weights.families.checks import check_rollout, check_train
from rlhf.weights.families.family import Block
from rlhf.weights.families.grids import (
    Grid,
    engine_experts,
    frame_of,
    local_experts,
    rollout_grid,
    train_grid,
)
from rlhf.weights.families.layouts import (
    HF_LAYER_PREFIX,
    engine_layers,
    layer_block,
    outer_pieces,
)
from rlhf.weights.families.operations import ExpertStack, Operation
from rlhf.weights.families.quantized import quantized
from rlhf.weights.families.table import family_of
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.piece import Piece
from rlhf.weights.spread import (
    EXPERT,
    Alike,
    At,
    Band,
    Instance,
    Key,
    Place,
    Run,
    Seating,
    Seats,
    Spread,
    alike,
    band_of_one,
    tensors_of_shards,
)


class TrainSeating:
    """Megatron's groups: a key is a stage, or a stage and an expert-parallel rank."""

    def __init__(self, layout: TrainLayout) -> None:
        self._layout = layout
        self._per_stage = layout.world // layout.pp

    def ranks(self, seats: Seats, key: Key) -> tuple[int, ...]:
        if key is None:
            return seats
        first, layout = key[0] * self._per_stage, self._layout
        if len(key) == 1:
            step, starts = layout.tp, seats
        else:
            step = layout.expert_tp * layout.ep
            starts = tuple(seat + layout.expert_tp * key[1] for seat in seats)
        return tuple(
            first + start + base for base in range(0, self._per_stage, step) for start in starts
        )


class RolloutSeating:
    """Groups inside all engines: a key is a stage, or a stage and an expert-parallel rank."""

    def __init__(self, layout: RolloutLayout) -> None:
        self._layout = layout

    def ranks(self, seats: Seats, key: Key) -> tuple[int, ...]:
        if key is None:
            return seats
        layout = self._layout
        first = key[0] * layout.tp + (key[1] * layout.expert_tp if len(key) > 1 else 0)
        return tuple(
            engine + first + seat
            for engine in range(0, layout.world, layout.engine_size)
            for seat in seats
        )


@dataclass(frozen=True, slots=True)
class _Side:
    """One program: how it cuts, and where layers and experts are."""

    grids: tuple[Grid, ...]  # by seat of the tensor group
    expert_grids: tuple[Grid, ...]  # by seat of the group that cuts an expert
    table: Callable[[Block], Mapping[str, Operation]]
    layers: Mapping[int, tuple[int, str]]  # layer -> stage, prefix of its parameters
    experts: list[Sequence[int]]  # by expert-parallel rank: what lies in its slots
    shards: list[list[Piece]]  # outside the layers, MTP layers among it, by rank
    seating: Seating


def reshard_spread(
    shape: ModelShape, train: TrainLayout, rollout: RolloutLayout, *, mtp: bool = False
) -> Spread:
    """From training to the engines.

    Args:
        mtp: with the layers for multi-token prediction, into the engines' draft models.

    Raises:
        LayoutError: a layout does not fit the model, or the model has no such layers.
    """
    sides = _train_side(shape, train, mtp), _rollout_side(shape, rollout, mtp)
    return _spread(shape, *sides, train)


def restore_spread(shape: ModelShape, train: TrainLayout, rollout: RolloutLayout) -> Spread:
    """From the engines back to training.

    Raises:
        LayoutError: a layout does not fit the model.
    """
    return _spread(shape, _rollout_side(shape, rollout), _train_side(shape, train), train)


def _train_side(shape: ModelShape, layout: TrainLayout, mtp: bool = False) -> _Side:
    check_train(shape, layout)
    layers: dict[int, tuple[int, str]] = {}
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            prefix = f"chunk{chunk}." if layout.vpp > 1 else ""
            for i, number in enumerate(layout.layers(shape.num_layers, stage, chunk)):
                layers[number] = (stage, f"{prefix}decoder.layers.{i}.")
    ranks = [layout.rank(tp=seat) for seat in range(layout.tp)]
    return _Side(
        grids=tuple(train_grid(shape, layout, rank) for rank in ranks),
        expert_grids=tuple(train_grid(shape, layout, seat) for seat in range(layout.expert_tp)),
        table=lambda block: block.train,
        layers=layers,
        experts=[local_experts(shape, layout.ep, rank) for rank in range(layout.ep)],
        shards=[outer_pieces(shape, layout, rank, mtp=mtp) for rank in range(layout.world)],
        seating=TrainSeating(layout),
    )


def _rollout_side(shape: ModelShape, layout: RolloutLayout, mtp: bool = False) -> _Side:
    check_rollout(shape, layout)
    layers = {
        number: (stage, f"model.layers.{number}.")
        for stage in range(layout.pp)
        for number in engine_layers(shape.num_layers, layout.pp, stage)
    }
    plain = layout.quantization == "none"
    engine = [outer_pieces(shape, layout, rank, mtp=mtp) for rank in range(layout.engine_size)]
    return _Side(
        grids=tuple(rollout_grid(shape, layout, seat) for seat in range(layout.tp)),
        expert_grids=tuple(rollout_grid(shape, layout, seat) for seat in range(layout.expert_tp)),
        table=lambda block: (block if plain else quantized(block)).rollout,
        layers=layers,
        experts=[engine_experts(shape, layout, rank) for rank in range(layout.ep)],
        shards=engine * layout.num_engines,
        seating=RolloutSeating(layout),
    )


def _spread(shape: ModelShape, source: _Side, destination: _Side, train: TrainLayout) -> Spread:
    bands = []
    sides = (source, destination)
    for kind in sorted({shape.has_experts(n) for n in range(shape.num_layers)}):
        layers = [n for n in range(shape.num_layers) if shape.has_experts(n) == kind]
        whole, experts = _alike(shape, layer_block(family_of(shape), kind), sides)
        spans = _spans(shape, train)
        bands.append(Band(whole, tuple(_layer_runs(layers, spans, sides))))
        if experts:
            bands += _expert_bands(experts, layers, spans, sides)
    tensors = tensors_of_shards(source.shards, destination.shards)
    outer = [band_of_one(tensor, 0.0, 1.0) for tensor in tensors]
    return Spread(train.world, (*outer, *bands), source.seating, destination.seating)


def _spans(shape: ModelShape, train: TrainLayout) -> dict[int, tuple[float, float]]:
    """Layer -> its begin in the movement and its length: each stage's layers share all of it."""
    out = {}
    for stage in range(train.pp):
        numbers = [n for v in range(train.vpp) for n in train.layers(shape.num_layers, stage, v)]
        for i, number in enumerate(numbers):
            out[number] = (i / len(numbers), 1 / len(numbers))
    return out


def _layer_runs(
    layers: list[int], spans: Mapping[int, tuple[float, float]], sides: tuple[_Side, _Side]
) -> Iterator[Run]:
    by_keys: dict[tuple[Key, Key], list[Instance]] = {}
    for number in layers:
        (stage, prefix), (to_stage, to_prefix) = (side.layers[number] for side in sides)
        begin, length = spans[number]
        instance = Instance(
            HF_LAYER_PREFIX.format(layer=number), 0, At(prefix), At(to_prefix), begin, length
        )
        by_keys.setdefault(((stage,), (to_stage,)), []).append(instance)
    for (key, to_key), instances in by_keys.items():
        yield Run(key, to_key, tuple(instances))


def _expert_bands(
    experts: tuple[Alike, ...],
    layers: list[int],
    spans: Mapping[int, tuple[float, float]],
    sides: tuple[_Side, _Side],
) -> Iterator[Band]:
    """One for all experts that lie in one slot of either side, one for each of the others."""
    slots, to_slots = (_slots(side) for side in sides)
    single: dict[tuple[Key, Key], list[Instance]] = {}
    for number in layers:
        (stage, prefix), (to_stage, to_prefix) = (side.layers[number] for side in sides)
        begin, length = spans[number]
        hf_prefix = HF_LAYER_PREFIX.format(layer=number)
        for expert, ((block, slot), *_) in slots.items():
            (to_block, to_slot), *more = to_slots[expert]
            if more:
                continue
            step = length / len(sides[0].experts[block])
            single.setdefault(((stage, block), (to_stage, to_block)), []).append(
                Instance(
                    hf_prefix,
                    expert,
                    At(prefix, slot),
                    At(to_prefix, to_slot),
                    begin + slot * step,
                    step,
                )
            )
    yield Band(experts, tuple(Run(*keys, tuple(found)) for keys, found in single.items()))
    for expert, found in to_slots.items():
        if len(found) > 1:
            yield _copied_expert(experts, expert, slots[expert][0], layers, spans, sides)


def _slots(side: _Side) -> dict[int, list[tuple[int, int]]]:
    """Expert -> expert-parallel rank and slot of each copy."""
    out: dict[int, list[tuple[int, int]]] = {}
    for block, experts in enumerate(side.experts):
        for slot, expert in enumerate(experts):
            out.setdefault(expert, []).append((block, slot))
    return out


def _copied_expert(
    experts: tuple[Alike, ...],
    expert: int,
    at: tuple[int, int],
    layers: list[int],
    spans: Mapping[int, tuple[float, float]],
    sides: tuple[_Side, _Side],
) -> Band:
    """An expert in several slots of an engine: each is a place of its own, seats are its ranks."""
    block, slot = at
    size = len(sides[1].expert_grids)
    tensors = tuple(
        replace(
            alike,
            destination=tuple(
                replace(
                    place,
                    local=((to_slot, to_slot + 1), *place.local),
                    seats=tuple(to_block * size + seat for seat in place.seats),
                    stacked=False,
                )
                for place in alike.destination
                for to_block, to_slot in _slots(sides[1])[expert]
            ),
        )
        for alike in experts
    )
    runs = []
    for number in layers:
        (stage, prefix), (to_stage, to_prefix) = (side.layers[number] for side in sides)
        instance = Instance(
            HF_LAYER_PREFIX.format(layer=number),
            expert,
            At(prefix, slot),
            At(to_prefix),
            *spans[number],
        )
        runs.append(Run((stage, block), (to_stage,), (instance,)))
    return Band(tensors, tuple(runs))


def _alike(
    shape: ModelShape, block: Block, sides: tuple[_Side, _Side]
) -> tuple[tuple[Alike, ...], tuple[Alike, ...]]:
    """Tensors of a layer, and of one of its experts."""
    places = [_places(shape, block, side) for side in sides]
    all_alike = alike(places[0], places[1])
    whole = tuple(a for a in all_alike if EXPERT not in a.name)
    return whole, tuple(a for a in all_alike if EXPERT in a.name)


def _places(shape: ModelShape, block: Block, side: _Side) -> dict[str, tuple[Place, ...]]:
    """Tensor -> its rectangles, each with the seats that hold it."""
    found: dict[str, dict[Place, list[int]]] = {}
    for param, operation in side.table(block).items():
        stacked = isinstance(operation, ExpertStack)
        one = operation.expert if isinstance(operation, ExpertStack) else operation
        of_expert = stacked or EXPERT in param
        for seat, grid in enumerate(side.expert_grids if of_expert else side.grids):
            laid = one.lay(frame_of(shape, grid, block.tensors))
            for part in laid.parts:
                place = Place(
                    part.region,
                    param,
                    part.local,
                    (),
                    laid.dtype,
                    stacked,
                    transposed=part.transposed,
                )
                found.setdefault(part.tensor, {}).setdefault(place, []).append(seat)
    return {
        tensor: tuple(replace(place, seats=tuple(seats)) for place, seats in by_place.items())
        for tensor, by_place in found.items()
    }
