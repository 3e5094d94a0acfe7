"""The independent count of what a move costs: by hand, element by element, and at full size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.dist.layout_text import parse_rollout, parse_train
from rlhf.weights.families import full_shapes, rollout_pieces, train_pieces
from rlhf.weights.find_model import find_model
from rlhf.weights.piece import ITEMSIZES, Piece
from tests.helpers.recipes import RECIPES, SLOW
from tests.helpers.reshard_oracle import count_costs, count_costs_of_shards
from tests.helpers.shapes import rollout_layouts, shapes, train_layouts
from tests.helpers.shards import slices


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in RECIPES]
)
def test_known_recipes_cost_what_is_known(name):
    known = RECIPES[name]
    costs = count_costs(
        find_model(known.model),
        parse_train(known.train, known.ranks),
        parse_rollout(known.rollout, known.ranks),
        [rank // 8 for rank in range(known.ranks)],
    )
    pairs = [
        (costs.model, known.model_gb),
        (costs.train_shard_mean, known.train_shard_gb),
        (costs.rollout_shard_mean, known.engine_shard_gb),
        (costs.full_gather_per_rank, known.full_gather_gb),
        (costs.lower_bound / known.ranks, known.moved_gb),
        (costs.cross_node_lower_bound / known.ranks, known.crossing_gb),
    ]
    for found, expected in pairs:
        assert found / 1e9 == pytest.approx(expected, rel=0.01)


def _piece(top, bottom, left, right):
    region = ((top, bottom), (left, right))
    return Piece("t", region, "p", region)


def test_overlapping_rectangles_by_hand():
    """Ranks 0 and 1 share a node, rank 2 is alone and needs one element twice; 4 x 6 elements."""
    held = [[_piece(0, 2, 0, 6)], [_piece(1, 3, 0, 4)], [_piece(3, 4, 0, 6)]]
    needed = [[_piece(0, 4, 0, 3)], [_piece(0, 4, 3, 6)], [_piece(2, 4, 0, 6), _piece(2, 3, 0, 1)]]
    costs = count_costs_of_shards(held, needed, [0, 0, 1], 2)
    # rank 0 lacks rows 2, 3; rank 1 all but rows 1, 2 of column 3; rank 2 row 2 and more
    assert costs.lower_bound_by_rank == [6 * 2, 10 * 2, 7 * 2]
    # node 0 lacks row 3, and row 2 from column 4 on; node 1 lacks row 2
    assert costs.cross_node_lower_bound == (6 + 2 + 6) * 2
    assert costs.train_shards == [24, 16, 12]
    assert costs.rollout_shards == [24, 24, 26]


@st.composite
def moves(draw):
    shape = draw(shapes())
    world = draw(st.sampled_from([1, 2, 4, 6, 8]))
    return shape, draw(train_layouts(shape, world)), draw(rollout_layouts(shape, world))


@settings(max_examples=30, deadline=None)
@given(moves(), st.integers(1, 4))
def test_cells_count_as_elements_do(move, ranks_per_node):
    shape, train, rollout = move
    nodes = [rank // ranks_per_node for rank in range(train.world)]
    costs = count_costs(shape, train, rollout, nodes, itemsize=2)
    dtypes = {
        p.tensor: p.dtype for r in range(train.world) for p in rollout_pieces(shape, rollout, r)
    }
    expected, crossing = [0] * train.world, 0
    held = [_painted(shape, train_pieces(shape, train, r)) for r in range(train.world)]
    needed = [_painted(shape, rollout_pieces(shape, rollout, r)) for r in range(train.world)]
    for tensor, dtype in dtypes.items():
        size = ITEMSIZES[dtype] if dtype else 2
        for rank in range(train.world):
            expected[rank] += size * int(needed[rank][tensor][held[rank][tensor] == 0].sum())
        for node in set(nodes):
            ranks = [r for r, n in enumerate(nodes) if n == node]
            want = sum(needed[r][tensor] for r in ranks) > 0
            have = sum(held[r][tensor] for r in ranks) > 0
            crossing += size * int((want & ~have).sum())
    assert costs.lower_bound_by_rank == expected
    assert costs.cross_node_lower_bound == crossing


def _painted(shape, shard):
    """Tensor -> how often the shard holds each element."""
    out = {name: np.zeros(dims, np.int64) for name, dims in full_shapes(shape).items()}
    for piece in shard:
        out[piece.tensor][slices(piece.region)] += 1
    return out
