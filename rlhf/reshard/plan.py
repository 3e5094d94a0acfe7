"""Which rectangle goes from which rank to which: the intersection of two lists of shards. Pure.

Every rank computes the same plan from the same tables, so nothing is negotiated. Moved bytes equal
the lower bound: what each rank needs and does not already hold, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf.weights.piece import ITEMSIZES, Box, Piece, box_size, intersect

Shard = Sequence[Piece]
"""What one rank holds (or needs) in one layout."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Which node each rank runs on."""

    nodes: tuple[int, ...]

    @classmethod
    def of(cls, world: int, ranks_per_node: int) -> Topology:
        """Nodes filled in rank order."""
        return cls(tuple(rank // ranks_per_node for rank in range(world)))


@dataclass(frozen=True, slots=True)
class Transfer:
    """``param[box]`` of the destination takes its values from ``source_param[source_box]``."""

    tensor: str
    source: int
    source_param: str
    source_box: Box
    destination: int
    param: str
    box: Box
    num_elements: int
    itemsize: int  # bytes per element in the destination's dtype
    dtype: str | None  # of the destination, where it is not the model's

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize

    def __str__(self) -> str:
        return (
            f"{self.tensor}: rank {self.source} {self.source_param}{_show(self.source_box)} -> "
            f"rank {self.destination} {self.param}{_show(self.box)}"
        )


@dataclass(frozen=True)
class ReshardPlan:
    """All transfers between two layouts, by destination and there in the order of its pieces."""

    world: int
    itemsize: int  # bytes per element in the model's dtype at the destination
    transfers: tuple[Transfer, ...]

    @property
    def moved_bytes(self) -> int:
        """Bytes that change rank."""
        return sum(self.sent_bytes())

    @property
    def local_bytes(self) -> int:
        """Bytes that a rank copies from itself."""
        return sum(t.num_bytes for t in self.transfers if t.source == t.destination)

    def sent_bytes(self) -> list[int]:
        """Bytes that each rank sends to others."""
        out = [0] * self.world
        for t in self.transfers:
            if t.source != t.destination:
                out[t.source] += t.num_bytes
        return out


@dataclass(frozen=True, slots=True)
class _Held:
    """A rectangle of a tensor in a parameter of one rank."""

    rank: int
    param: str
    local: Box


@dataclass(frozen=True, slots=True)
class _Need:
    """A rectangle that a destination lacks, and who can give it."""

    piece: Piece
    destination: int
    region: Box
    held_region: Box  # that all holders hold
    holders: tuple[_Held, ...]


_Index = dict[str, dict[Box, list[_Held]]]


def plan(
    source: Sequence[Shard], destination: Sequence[Shard], itemsize: int, topology: Topology
) -> ReshardPlan:
    """Transfers that fill every destination piece exactly once.

    A rectangle comes from the rank itself if it holds it, else from a rank of the same node, else
    from any; among equals from the one that sends the fewest bytes. Deterministic.

    Args:
        source, destination: shards by rank; the same ranks on both sides.
        itemsize: bytes per element at the destination, for pieces without a dtype of their own.

    Raises:
        ValueError: some rectangle is held by no source rank.
    """
    world = len(source)
    if len(destination) != world or len(topology.nodes) != world:
        raise ValueError(
            f"plan needs shards and nodes of the same ranks: {world} source shards, "
            f"{len(destination)} destination shards, {len(topology.nodes)} nodes"
        )
    index = _index(source)
    needs = [
        need
        for rank, shard in enumerate(destination)
        for piece in shard
        for need in _needs(piece, rank, index.get(piece.tensor, {}), topology)
    ]
    chosen = _choose_holders(needs, world)
    transfers = tuple(
        _transfer(need, held, itemsize) for need, held in zip(needs, chosen, strict=True)
    )
    return ReshardPlan(world, itemsize, transfers)


def _index(shards: Sequence[Shard]) -> _Index:
    index: _Index = {}
    for rank, shard in enumerate(shards):
        for piece in shard:
            regions = index.setdefault(piece.tensor, {})
            regions.setdefault(piece.region, []).append(_Held(rank, piece.param, piece.local))
    return index


def _needs(
    piece: Piece, rank: int, regions: dict[Box, list[_Held]], topology: Topology
) -> Iterator[_Need]:
    """Cut ``piece`` along the regions that sources hold, nearest holders first."""
    options = []
    for region in regions:
        common = intersect(piece.region, region)
        if common is not None:
            distance, holders = _nearest(regions[region], rank, topology)
            options.append((distance, common, region, holders))
    options.sort(key=lambda option: option[0])
    missing = [piece.region]
    for _, common, region, holders in options:
        still_missing = []
        for box in missing:
            part = intersect(box, common)
            if part is None:
                still_missing.append(box)
                continue
            yield _Need(piece, rank, part, region, holders)
            still_missing += _subtract(box, part)
        missing = still_missing
        if not missing:
            return
    raise ValueError(
        f"{piece.tensor}{_show(missing[0])} is needed by rank {rank} for {piece.param} and held by "
        f"no source rank ({len(regions)} regions of this tensor are held)"
    )


def _nearest(holders: list[_Held], rank: int, topology: Topology) -> tuple[int, tuple[_Held, ...]]:
    """(0 itself, 1 same node, 2 any; the holders at that distance)."""
    if len(holders) == 1:
        held = holders[0]
        near = topology.nodes[held.rank] == topology.nodes[rank]
        return (0 if held.rank == rank else 1 if near else 2), (held,)
    for held in holders:
        if held.rank == rank:
            return 0, (held,)
    near_holders = tuple(h for h in holders if topology.nodes[h.rank] == topology.nodes[rank])
    return (1, near_holders) if near_holders else (2, tuple(holders))


def _choose_holders(needs: list[_Need], world: int) -> list[_Held]:
    """One holder per need; those with a choice are spread by bytes sent, the largest first."""
    sent = [0] * world
    chosen: list[_Held] = []
    open_choices: list[tuple[int, int]] = []
    for i, need in enumerate(needs):
        held = need.holders[0]
        chosen.append(held)
        if len(need.holders) > 1:
            open_choices.append((-box_size(need.region), i))
        elif held.rank != need.destination:
            sent[held.rank] += box_size(need.region)
    for negative_size, i in sorted(open_choices):
        chosen[i] = min(needs[i].holders, key=lambda held: (sent[held.rank], held.rank))
        sent[chosen[i].rank] -= negative_size
    return chosen


def _transfer(need: _Need, held: _Held, itemsize: int) -> Transfer:
    piece = need.piece
    return Transfer(
        tensor=piece.tensor,
        source=held.rank,
        source_param=held.param,
        source_box=_move(need.region, need.held_region, held.local),
        destination=need.destination,
        param=piece.param,
        box=_move(need.region, piece.region, piece.local),
        num_elements=box_size(need.region),
        itemsize=itemsize if piece.dtype is None else ITEMSIZES[piece.dtype],
        dtype=piece.dtype,
    )


def _move(part: Box, region: Box, local: Box) -> Box:
    """Where ``part`` of ``region`` lies when ``region`` lies at ``local``.

    ``local`` may have more dims in front (an expert stack); they keep their range.
    """
    if part == region:
        return local
    front = len(local) - len(region)
    return local[:front] + tuple(
        (start - origin + base, stop - origin + base)
        for (start, stop), (origin, _), (base, _) in zip(part, region, local[front:], strict=True)
    )


def _subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint rectangles that cover ``box`` outside ``hole``."""
    if box == hole:
        return []
    common = intersect(box, hole)
    if common is None:
        return [box]
    out: list[Box] = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, common, strict=True)):
        before, after = common[:dim], box[dim + 1 :]
        if start < low:
            out.append((*before, (start, low), *after))
        if high < stop:
            out.append((*before, (high, stop), *after))
    return out


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
