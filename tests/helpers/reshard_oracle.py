"""What a move of weights must cost at least, counted from the tables alone.

Independent of ``rlhf.reshard``: every tensor is cut along all edges that any rank's piece has in
either layout; shards are painted on the cells, and cells are counted. What a rank holds depends on
its coordinates alone, so each distinct shard is painted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.weights.families import full_pieces, rollout_pieces, train_pieces
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.piece import ITEMSIZES, Piece, box_size


@dataclass(frozen=True)
class Costs:
    """Bytes; of moved ones in the destination's dtype."""

    model: int
    train_shards: list[int]  # by rank
    rollout_shards: list[int]
    lower_bound_by_rank: list[int]  # needed and not held
    cross_node_lower_bound: int  # needed by some rank of a node and held by none of it, over nodes

    @property
    def lower_bound(self) -> int:
        return sum(self.lower_bound_by_rank)

    @property
    def train_shard_mean(self) -> float:
        return sum(self.train_shards) / len(self.train_shards)

    @property
    def rollout_shard_mean(self) -> float:
        return sum(self.rollout_shards) / len(self.rollout_shards)

    @property
    def full_gather_per_rank(self) -> float:
        return self.model - self.train_shard_mean


def count_costs(
    shape: ModelShape,
    train: TrainLayout,
    rollout: RolloutLayout,
    nodes: Sequence[int],
    itemsize: int = 2,
) -> Costs:
    """Costs of moving from ``train`` to ``rollout``.

    Args:
        nodes: of each rank.
        itemsize: bytes per element of the model's dtype.
    """
    train_keys = [_train_key(train, rank) for rank in range(train.world)]
    rollout_keys = [rank % rollout.engine_size for rank in range(rollout.world)]
    held = {k: train_pieces(shape, train, train_keys.index(k)) for k in set(train_keys)}
    needed = {k: rollout_pieces(shape, rollout, k) for k in set(rollout_keys)}
    return _count(
        held=[held[k] for k in train_keys],
        needed=[needed[k] for k in rollout_keys],
        model=shard_bytes(full_pieces(shape), itemsize),
        nodes=nodes,
        itemsize=itemsize,
    )


def count_costs_of_shards(
    held: Sequence[Sequence[Piece]],
    needed: Sequence[Sequence[Piece]],
    nodes: Sequence[int],
    itemsize: int,
) -> Costs:
    """Costs of any move between shards by rank; ``model`` is 0."""
    return _count(held, needed, 0, nodes, itemsize)


def shard_bytes(shard: Iterable[Piece], itemsize: int) -> int:
    return sum(box_size(p.region) * (ITEMSIZES[p.dtype] if p.dtype else itemsize) for p in shard)


def _train_key(layout: TrainLayout, rank: int) -> tuple[int, ...]:
    """Ranks with the same key hold the same weights."""
    at = layout.coord(rank)
    return at.tp, at.pp, at.etp, at.ep


def _count(
    held: Sequence[Sequence[Piece]],
    needed: Sequence[Sequence[Piece]],
    model: int,
    nodes: Sequence[int],
    itemsize: int,
) -> Costs:
    held_once = {id(shard): shard for shard in held}
    needed_once = {id(shard): shard for shard in needed}
    grid = _Grid([*held_once.values(), *needed_once.values()])
    weights = grid.weights(needed_once.values(), itemsize)
    ranges_held = {key: grid.ranges(shard) for key, shard in held_once.items()}
    ranges_needed = {key: grid.ranges(shard) for key, shard in needed_once.items()}
    by_rank, crossing = [0] * len(held), 0
    for node in sorted(set(nodes)):
        there = np.zeros(grid.num_cells, bool)
        wanted = np.zeros(grid.num_cells, bool)
        for rank in (r for r, n in enumerate(nodes) if n == node):
            have = grid.painted(ranges_held[id(held[rank])]) > 0
            want = grid.painted(ranges_needed[id(needed[rank])])
            by_rank[rank] = int((weights * want)[~have].sum())
            there |= have
            wanted |= want > 0
        crossing += int(weights[wanted & ~there].sum())
    sizes_held = {key: shard_bytes(shard, itemsize) for key, shard in held_once.items()}
    sizes_needed = {key: shard_bytes(shard, itemsize) for key, shard in needed_once.items()}
    return Costs(
        model=model,
        train_shards=[sizes_held[id(shard)] for shard in held],
        rollout_shards=[sizes_needed[id(shard)] for shard in needed],
        lower_bound_by_rank=by_rank,
        cross_node_lower_bound=crossing,
    )


class _Grid:
    """Cells of all tensors, numbered through: within a tensor row by row."""

    def __init__(self, shards: Sequence[Iterable[Piece]]) -> None:
        row_edges: dict[str, set[int]] = {}
        col_edges: dict[str, set[int]] = {}
        for shard in shards:
            for piece in shard:
                rows, cols = _rows_and_cols(piece)
                row_edges.setdefault(piece.tensor, set()).update(rows)
                col_edges.setdefault(piece.tensor, set()).update(cols)
        self.first: dict[str, int] = {}
        self.rows: dict[str, dict[int, int]] = {}  # tensor -> edge -> number of it
        self.cols: dict[str, dict[int, int]] = {}
        self.num_cells = 0
        for tensor, edges in row_edges.items():
            self.first[tensor] = self.num_cells
            self.rows[tensor] = {edge: i for i, edge in enumerate(sorted(edges))}
            self.cols[tensor] = {edge: i for i, edge in enumerate(sorted(col_edges[tensor]))}
            self.num_cells += (len(edges) - 1) * (len(col_edges[tensor]) - 1)

    def weights(self, needed: Iterable[Iterable[Piece]], itemsize: int) -> np.ndarray:
        """Bytes of each cell, in the dtype in which destinations keep it."""
        sizes: dict[str, int] = {}
        for shard in needed:
            for piece in shard:
                size = ITEMSIZES[piece.dtype] if piece.dtype else itemsize
                assert sizes.setdefault(piece.tensor, size) == size, piece
        out = np.zeros(self.num_cells, np.int64)
        for tensor, size in sizes.items():
            areas = np.outer(np.diff(list(self.rows[tensor])), np.diff(list(self.cols[tensor])))
            out[self.first[tensor] : self.first[tensor] + areas.size] = size * areas.ravel()
        return out

    def ranges(self, shard: Iterable[Piece]) -> np.ndarray:
        """[2, N] first and last-plus-one cells of the runs that the shard covers."""
        runs = []
        for piece in shard:
            (top, bottom), (left, right) = _rows_and_cols(piece)
            rows, cols = self.rows[piece.tensor], self.cols[piece.tensor]
            width, first = len(cols) - 1, self.first[piece.tensor]
            runs += [
                (first + row * width + cols[left], first + row * width + cols[right])
                for row in range(rows[top], rows[bottom])
            ]
        return np.array(runs, np.int64).reshape(-1, 2).T

    def painted(self, ranges: np.ndarray) -> np.ndarray:
        """How often each cell is covered."""
        steps = np.zeros(self.num_cells + 1, np.int64)
        np.add.at(steps, ranges[0], 1)
        np.add.at(steps, ranges[1], -1)
        return np.cumsum(steps)[:-1]


def _rows_and_cols(piece: Piece) -> tuple[tuple[int, int], tuple[int, int]]:
    """A vector is a matrix of one column."""
    return piece.region if len(piece.region) == 2 else (piece.region[0], (0, 1))
