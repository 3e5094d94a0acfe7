"""What can travel together: rectangles with the same holders and the same needers. Pure.

The places of both sides cut a tensor into atoms, which every place has whole or not at all. Atoms
that the same ranks hold and the same ranks need make a bundle, up to a size that fits a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlhf.reshard.topology import Topology
from rlhf.reshard.wire import align
from rlhf.weights.block_scales import BLOCK
from rlhf.weights.piece import FLOAT8, ITEMSIZES, Box, box_size, intersect, show_box
from rlhf.weights.spread import Alike, Key, Place, Run, Seating, Seats, Spread


@dataclass(frozen=True, slots=True)
class Atom:
    """A rectangle of a tensor, and the places of both sides that contain it."""

    name: str  # of the tensor, as in Alike
    region: Box
    source: tuple[Place, ...]
    destination: tuple[Place, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Who gives to whom. What a rank needs it takes from itself, else from its node, else from far.

    Each node without a holder gets it once and passes it on inside.
    """

    holders: tuple[int, ...]
    local: tuple[int, ...]  # needers that are holders
    near: tuple[tuple[int, tuple[int, ...]], ...]  # needer, holders on its node
    far: tuple[tuple[int, ...], ...]  # the needers of each node without a holder

    @property
    def num_moved(self) -> int:
        """Copies that change rank."""
        return len(self.near) + sum(map(len, self.far))

    @property
    def fan_out(self) -> int:
        """Copies that the rank which gets it for its node passes on."""
        return max(map(len, self.far), default=1) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """``atoms`` of ``instances``, all of one flow."""

    atoms: tuple[Atom, ...]
    run: Run
    first: int  # of the run's instances
    stop: int
    flow: Flow
    middle: float  # where it comes in the movement, in [0, 1)
    num_bytes: int
    area_bytes: int  # with every part aligned


def bundles_of(
    spread: Spread, topology: Topology, itemsize: int, limit_bytes: int
) -> Iterator[Bundle]:
    """All bundles of a movement.

    Args:
        itemsize: bytes per element at the destination, for places without a dtype of their own.
        limit_bytes: no bundle is larger, and none of what a rank passes on to its node.

    Raises:
        ValueError: something is needed and held by no source rank.
    """
    for band in spread.bands:
        atoms = [atom for alike in band.tensors for atom in _atoms(alike, itemsize)]
        by_seats: dict[tuple[tuple[Seats, ...], tuple[Seats, ...]], list[Atom]] = {}
        for atom in atoms:
            by_seats.setdefault((_seats(atom.source), _seats(atom.destination)), []).append(atom)
        for run in band.runs:
            for group in by_seats.values():
                flow = _flow(group[0], run, spread, topology)
                limit = limit_bytes // max(1, flow.fan_out // 2)
                yield from _chunks(_split_all(group, limit), run, flow, limit)


def _seats(places: tuple[Place, ...]) -> tuple[Seats, ...]:
    return tuple(place.seats for place in places)


def _atoms(alike: Alike, itemsize: int) -> Iterator[Atom]:
    """The rectangles between all borders of places, joined again where nothing differs."""
    places = (*alike.source, *alike.destination)
    borders = [
        sorted({border for place in places for border in place.region[dim]})
        for dim in range(len(places[0].region))
    ]
    found: dict[tuple[tuple[Place, ...], tuple[Place, ...]], list[Box]] = {}
    for box in itertools.product(*(itertools.pairwise(ends) for ends in borders)):
        to = tuple(p for p in alike.destination if intersect(p.region, box) is not None)
        if not to:
            continue
        held = tuple(p for p in alike.source if intersect(p.region, box) is not None)
        if not held:
            raise ValueError(_nobody_holds(alike, box, to[0]))
        found.setdefault((held, to), []).append(box)
    for (held, to), boxes in found.items():
        size = itemsize if to[0].dtype is None else ITEMSIZES[to[0].dtype]
        for box in _joined(boxes):
            yield Atom(alike.name, box, held, to, box_size(box) * size)


def _nobody_holds(alike: Alike, box: Box, place: Place) -> str:
    return (
        f"{alike.name}{show_box(box)} is needed by rank {place.seats[0]} of its group for "
        f"{place.param} and held by no source rank ({len(alike.source)} regions of this tensor "
        "are held)"
    )


def _joined(boxes: list[Box]) -> list[Box]:
    """Boxes that differ in one dim and touch there become one; the last dim first."""
    for dim in reversed(range(len(boxes[0]))):
        rows: dict[Box, list[tuple[int, int]]] = {}
        for box in boxes:
            rows.setdefault((*box[:dim], (0, 0), *box[dim + 1 :]), []).append(box[dim])
        boxes = [
            (*rest[:dim], ends, *rest[dim + 1 :])
            for rest, all_ends in rows.items()
            for ends in _touching(sorted(all_ends))
        ]
    return boxes


def _touching(ends: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start, stop = ends[0]
    for low, high in ends[1:]:
        if low != stop:
            yield start, stop
            start = low
        stop = high
    yield start, stop


def _flow(atom: Atom, run: Run, spread: Spread, topology: Topology) -> Flow:
    holders = _ranks(atom.source, spread.source, run.source)
    needers = _ranks(atom.destination, spread.destination, run.destination)
    if len(needers) < sum(
        len(spread.destination.ranks(p.seats, run.destination)) for p in atom.destination
    ):
        raise ValueError(
            f"{atom.name}{show_box(atom.region)} is needed twice by one rank, for "
            f"{' and '.join(p.param for p in atom.destination)}; it can be moved to one place only"
        )
    held = frozenset(holders)
    missing = [rank for rank in needers if rank not in held]
    by_node: dict[int, list[int]] = {}
    for rank in missing:
        by_node.setdefault(topology.nodes[rank], []).append(rank)
    near_holders: dict[int, list[int]] = {}
    for rank in holders:
        node = topology.nodes[rank]
        if node in by_node:
            near_holders.setdefault(node, []).append(rank)
    near = tuple(
        (rank, tuple(near_holders[node]))
        for node, ranks in by_node.items()
        if node in near_holders
        for rank in ranks
    )
    far = tuple(tuple(r) for node, r in by_node.items() if node not in near_holders)
    return Flow(holders, tuple(rank for rank in needers if rank in held), near, far)


def _ranks(places: tuple[Place, ...], seating: Seating, key: Key) -> tuple[int, ...]:
    if len(places) == 1:
        return seating.ranks(places[0].seats, key)
    return tuple(sorted({rank for place in places for rank in seating.ranks(place.seats, key)}))


def _split_all(atoms: list[Atom], limit_bytes: int) -> tuple[Atom, ...]:
    return tuple(part for atom in atoms for part in _split(atom, limit_bytes))


def _split(atom: Atom, limit_bytes: int) -> list[Atom]:
    """The atom in parts of at most ``limit_bytes``, cut along its outer dims; blocks stay whole."""
    if atom.num_bytes <= limit_bytes:
        return [atom]
    sizes = [stop - start for start, stop in atom.region]
    units = [1] * len(sizes)
    if atom.destination[0].dtype == FLOAT8:
        units[-2:] = [BLOCK, BLOCK]
    dim = next((i for i, size in enumerate(sizes) if size > units[i]), None)
    if dim is None:
        return [atom]
    per_index, unit = atom.num_bytes // sizes[dim], units[dim]
    step = max(unit, limit_bytes // per_index // unit * unit)
    start, stop = atom.region[dim]
    parts = [
        replace(
            atom,
            region=(*atom.region[:dim], (low, min(low + step, stop)), *atom.region[dim + 1 :]),
            num_bytes=per_index * (min(low + step, stop) - low),
        )
        for low in range(start, stop, step)
    ]
    return [small for part in parts for small in _split(part, limit_bytes)]


def _chunks(atoms: tuple[Atom, ...], run: Run, flow: Flow, limit_bytes: int) -> Iterator[Bundle]:
    """Whole instances as far as they fit, else parts of each."""
    instances, num = run.instances, len(run.instances)
    total = sum(align(atom.num_bytes) for atom in atoms)
    if total <= limit_bytes:
        count = -(-num // (limit_bytes // total))
        ends = [num * i // count for i in range(count + 1)]
        for first, stop in itertools.pairwise(ends):
            end = instances[stop - 1].begin + instances[stop - 1].length
            yield _bundle(atoms, run, first, stop, flow, (instances[first].begin + end) / 2)
        return
    groups = list(_grouped(atoms, limit_bytes))
    for i, instance in enumerate(instances):
        for j, group in enumerate(groups):
            middle = instance.begin + instance.length * (j + 0.5) / len(groups)
            yield _bundle(group, run, i, i + 1, flow, middle)


def _bundle(
    atoms: tuple[Atom, ...], run: Run, first: int, stop: int, flow: Flow, middle: float
) -> Bundle:
    num = stop - first
    return Bundle(
        atoms,
        run,
        first,
        stop,
        flow,
        middle,
        num * sum(atom.num_bytes for atom in atoms),
        num * sum(align(atom.num_bytes) for atom in atoms),
    )


def _grouped(atoms: Sequence[Atom], limit_bytes: int) -> Iterator[tuple[Atom, ...]]:
    group: list[Atom] = []
    used = 0
    for atom in atoms:
        size = align(atom.num_bytes)
        if group and used + size > limit_bytes:
            yield tuple(group)
            group, used = [], 0
        group.append(atom)
        used += size
    yield tuple(group)
