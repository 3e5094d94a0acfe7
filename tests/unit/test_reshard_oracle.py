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
from tests.helpers.reshard_oracle import count_costs, count_costs_of_shards
from tests.helpers.shapes import rollout_layouts, shapes, train_layouts
from tests.helpers.shards import slices

GIGA = 1e9
RECIPES = {
    "DeepSeek-V3, 128": (
        "deepseek-v3-671b",
        128,
        "tp=8,pp=4,last=13,cp=4,ep=32,etp=1",
        "tp=64,dp=8,ep=64,a2a=deepep",
        (1342.1, 11.74, 33.07, 1330.3, 31.39, 22.37),
    ),
    "DeepSeek-V3, 256": (
        "deepseek-v3-671b",
        256,
        "pp=16,first=3,last=2,ep=16",
        "tp=32",
        (1342.1, 7.25, 43.93, 1334.8, 43.58, 40.78),
    ),
    "GLM-4.5, 64": (
        "glm-4.5-355b",
        64,
        "tp=8,pp=4,cp=2,ep=16,etp=1",
        "tp=32,dp=4,ep=32,a2a=deepep",
        (705.6, 11.58, 30.00, 694.0, 28.59, 21.53),
    ),
    "Qwen3-235B, 64": (
        "qwen3-235b-a22b",
        64,
        "tp=4,pp=4,last=22,cp=2,ep=16,etp=1",
        "tp=32,dp=4,ep=32,a2a=deepep",
        (470.2, 8.11, 16.38, 462.1, 16.00, 13.92),
    ),
    "Kimi-K2, 256": (
        "kimi-k2-1t",
        256,
        "tp=8,pp=8,last=5,cp=4,ep=32,etp=1",
        "tp=16,dp=8,ep=16",
        (2052.8, 8.53, 137.7, 2044.3, 136.8, 125.2),
    ),
}
"""Model, ranks, layouts; then GB: model, train shard, engine shard, then per rank full gather,
moved, and crossing nodes (of 8 ranks)."""


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "DeepSeek-V3, 256")) for n in RECIPES],
)
def test_known_recipes_cost_what_is_known(recipe):
    name, world, train, rollout, expected = RECIPES[recipe]
    costs = count_costs(
        find_model(name),
        parse_train(train, world),
        parse_rollout(rollout, world),
        [rank // 8 for rank in range(world)],
    )
    found = (
        costs.model,
        costs.train_shard_mean,
        costs.rollout_shard_mean,
        costs.full_gather_per_rank,
        costs.lower_bound / world,
        costs.cross_node_lower_bound / world,
    )
    assert [n / GIGA for n in found] == pytest.approx(expected, rel=0.01)


def _piece(top, bottom, left, right):
    region = ((top, bottom), (left, right))
    return Piece("t", region, "p", region)


def test_overlapping_rectangles_by_hand():
    """Ranks 0 and 1 share a node, rank 2 is alone; a matrix of 4 x 6 two-byte elements."""
    held = [[_piece(0, 2, 0, 6)], [_piece(1, 3, 0, 4)], [_piece(3, 4, 0, 6)]]
    needed = [[_piece(0, 4, 0, 3)], [_piece(0, 4, 3, 6)], [_piece(2, 4, 0, 6)]]
    costs = count_costs_of_shards(held, needed, [0, 0, 1], 2)
    # rank 0 lacks rows 2, 3; rank 1 all but rows 1, 2 of column 3; rank 2 row 2
    assert costs.lower_bound_by_rank == [6 * 2, 10 * 2, 6 * 2]
    # node 0 lacks row 3, and row 2 from column 4 on; node 1 lacks row 2
    assert costs.cross_node_lower_bound == (6 + 2 + 6) * 2
    assert costs.train_shards == [24, 16, 12]
    assert costs.rollout_shards == [24, 24, 24]


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
