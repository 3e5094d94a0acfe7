"""Where tensors lie over all ranks of a layout at once; what a planner reads. Pure Python.

A list of pieces says what one rank holds. A plan for thousands of ranks cannot look at each rank's
list: here ranks that hold the same stand together, and so do tensors that lie alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlhf.weights.block_scales import is_scale, scale_box, weight_box, weight_name
from rlhf.weights.piece import Box, Piece, moved_box

EXPERT = "{expert}"
"""In a name: the number of an expert, global in names of tensors, local in those of parameters."""

Seats = tuple[int, ...]
"""Positions in the group of ranks that cuts a tensor, such as tp ranks."""
Key = tuple[int, ...] | None
"""Which copy of the group: pipeline stage, expert block. None: seats are global ranks."""


@dataclass(frozen=True, slots=True)
class Place:
    """``tensor[region]`` lies at ``local`` of ``param`` on all ``seats``.

    ``stacked``: ``local`` has one more dim in front, the slot of the expert. ``scales``: the tensor
    is one of block scales, which can be computed from the weights that lie at ``local``.
    ``transposed``: as in a piece.
    """

    region: Box
    param: str
    local: Box
    seats: Seats
    dtype: str | None = None
    stacked: bool = False
    scales: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Alike:
    """A tensor, or all tensors of this name in layers and experts that are built alike."""

    name: str  # with {expert} where there is one for each
    source: tuple[Place, ...]
    destination: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class At:
    """What one instance of the tensors is called on one side."""

    prefix: str = ""  # of parameter names
    slot: int = 0  # number of the expert on its rank

    def param(self, place: Place) -> str:
        """The parameter of this instance."""
        return self.prefix + place.param.replace(EXPERT, str(self.slot))

    def box(self, place: Place, region: Box) -> Box:
        """Where ``region``, a part of the place's, lies in it."""
        if place.scales:
            assert not place.transposed, f"scales are computed from {place.param} as it lies"
            return weight_box(region, place.region, place.local)
        box = moved_box(region, place.region, place.local, place.transposed)
        return ((self.slot, self.slot + 1), *box) if place.stacked else box


@dataclass(frozen=True, slots=True)
class Instance:
    """The tensors of one layer, or of one expert of a layer."""

    prefix: str  # of tensor names
    expert: int
    source: At
    destination: At
    begin: float
    """Where it comes in a movement, in [0, 1): each holder's share is spread over all of it."""
    length: float


@dataclass(frozen=True, slots=True)
class Run:
    """Instances that lie on the same ranks."""

    source: Key
    destination: Key
    instances: tuple[Instance, ...]


class Seating(Protocol):
    """From seats to ranks, on one side."""

    def ranks(self, seats: Seats, key: Key) -> tuple[int, ...]:
        """Global ranks, ascending."""
        ...


@dataclass(frozen=True, slots=True)
class Band:
    """Tensors that are cut alike in all instances."""

    tensors: tuple[Alike, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Spread:
    """All that is to be moved between two layouts of the same ranks."""

    world: int
    bands: tuple[Band, ...]
    source: Seating
    destination: Seating


class GlobalRanks:
    """Seats are ranks."""

    def ranks(self, seats: Seats, key: Key) -> tuple[int, ...]:
        return seats


def spread_of_shards(
    source: Sequence[Sequence[Piece]], destination: Sequence[Sequence[Piece]]
) -> Spread:
    """The same, from lists of pieces by rank; tensors come one after the other.

    Raises:
        ValueError: the two sides are of different numbers of ranks.
    """
    tensors = tensors_of_shards(source, destination)
    bands = tuple(
        band_of_one(tensor, i / len(tensors), 1 / len(tensors)) for i, tensor in enumerate(tensors)
    )
    seating = GlobalRanks()
    return Spread(len(source), bands, seating, seating)


def tensors_of_shards(
    source: Sequence[Sequence[Piece]], destination: Sequence[Sequence[Piece]]
) -> list[Alike]:
    """Every tensor of the destination with its places; seats are ranks."""
    if len(source) != len(destination):
        raise ValueError(
            f"a movement is among the same ranks: {len(source)} source shards, "
            f"{len(destination)} destination shards"
        )
    return alike(_places(source), _places(destination))


def alike(
    source: Mapping[str, tuple[Place, ...]], destination: Mapping[str, tuple[Place, ...]]
) -> list[Alike]:
    """All tensors of the destination; block scales are held wherever their weight is."""
    return [
        Alike(
            name,
            tuple(map(_scales, source.get(weight_name(name), ())))
            if is_scale(name) and name not in source
            else source.get(name, ()),
            places,
        )
        for name, places in destination.items()
    ]


def _scales(weight: Place) -> Place:
    return replace(weight, region=scale_box(weight.region), scales=True)


def band_of_one(tensor: Alike, begin: float, length: float) -> Band:
    """A tensor that is like no other."""
    return Band((tensor,), (Run(None, None, (Instance("", 0, At(), At(), begin, length),)),))


def _places(shards: Sequence[Sequence[Piece]]) -> dict[str, tuple[Place, ...]]:
    ranks: dict[str, dict[Piece, list[int]]] = {}
    for rank, shard in enumerate(shards):
        for piece in shard:
            ranks.setdefault(piece.tensor, {}).setdefault(piece, []).append(rank)
    return {
        name: tuple(
            Place(
                piece.region,
                piece.param,
                piece.local,
                tuple(held),
                piece.dtype,
                transposed=piece.transposed,
            )
            for piece, held in by_piece.items()
        )
        for name, by_piece in ranks.items()
    }
