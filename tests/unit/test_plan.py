"""Laws of the plan and its schedule, over random models and layouts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.reshard.bounds import (
    lower_bound_bytes,
    node_lower_bound_bytes,
    send_balance,
    send_balance_bound,
    sent_bytes,
)
from rlhf.reshard.plan import plan
from rlhf.reshard.rounds import RELAY_ROUNDS
from rlhf.reshard.schedule import RankPlan, Transfer, rank_plan, rank_plans
from rlhf.reshard.topology import Topology
from rlhf.reshard.wire import ALIGN_BYTES
from rlhf.weights.families import reshard_spread, restore_spread, rollout_pieces, train_pieces
from rlhf.weights.piece import Piece, box_size, intersect
from rlhf.weights.spread import Spread, spread_of_shards
from tests.helpers.shapes import make_shape, rollout_layouts, shapes, train_layouts
from tests.helpers.shards import slices

ITEMSIZE = 4
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Case:
    """A movement, and the same as lists of pieces by rank."""

    spread: Spread
    source: list[list[Piece]]
    destination: list[list[Piece]]
    topology: Topology

    @property
    def ranks(self) -> range:
        return range(self.spread.world)

    def plans(self, area_bytes: int = MEBIBYTE) -> list[RankPlan]:
        return rank_plans(self.spread, self.topology, itemsize=ITEMSIZE, area_bytes=area_bytes)


@st.composite
def cases(draw) -> Case:
    """Between a training layout and a rollout layout, either way, from tables or from pieces."""
    shape = draw(shapes())
    world = draw(st.sampled_from([1, 2, 3, 4, 4, 6, 8]))
    train = draw(train_layouts(shape, world))
    rollout = draw(rollout_layouts(shape, world))
    sides = [
        [train_pieces(shape, train, r) for r in range(world)],
        [rollout_pieces(shape, rollout, r) for r in range(world)],
    ]
    back, from_pieces = draw(st.booleans()), draw(st.booleans())
    source, destination = reversed(sides) if back else sides
    if from_pieces:
        spread = spread_of_shards(source, destination)
    else:
        spread = (restore_spread if back else reshard_spread)(shape, train, rollout)
    return Case(spread, source, destination, Topology.of(world, draw(st.sampled_from([1, 2, 4]))))


def transfers_of(plans: list[RankPlan]) -> list[Transfer]:
    return [p.transfer for mine in plans for r in mine.rounds for p in r.arriving]


def _masks(case: Case) -> list[list[dict[str, np.ndarray]]]:
    """By side and rank: how many parameters have each element of each tensor."""
    ends: dict[str, list[int]] = {}
    for piece in (p for shard in (*case.source, *case.destination) for p in shard):
        known = ends.get(piece.tensor, [0] * len(piece.region))
        ends[piece.tensor] = [max(a, b) for a, (_, b) in zip(known, piece.region, strict=True)]
    sides = []
    for shards in (case.source, case.destination):
        masks = []
        for shard in shards:
            counts = {name: np.zeros(shape, int) for name, shape in ends.items()}
            for piece in shard:
                counts[piece.tensor][slices(piece.region)] += 1
            masks.append(counts)
        sides.append(masks)
    return sides


@settings(max_examples=100, deadline=None)
@given(cases())
def test_moved_bytes_equal_the_lower_bounds(case):
    """Element by element: what a rank needs and lacks, and what a node needs and lacks."""
    held, needed = _masks(case)
    nodes = case.topology.nodes
    want = sum(int((needed[r][t] * (held[r][t] == 0)).sum()) for r in case.ranks for t in held[r])
    want_node = 0
    for node in set(nodes):
        members = [r for r in case.ranks if nodes[r] == node]
        for t in held[0]:
            union = np.maximum.reduce([needed[r][t] for r in members]) > 0
            have = np.maximum.reduce([held[r][t] for r in members]) > 0
            want_node += int((union & ~have).sum())
    made = plan(case.spread, case.topology, ITEMSIZE, MEBIBYTE)
    assert lower_bound_bytes(made) == want * ITEMSIZE
    assert node_lower_bound_bytes(made) == want_node * ITEMSIZE
    moved = [t for t in transfers_of(case.plans()) if t.source != t.destination]
    assert sum(t.num_elements for t in moved) == want
    crossing = [t for t in moved if nodes[t.source] != nodes[t.destination]]
    assert sum(t.num_elements for t in crossing) == want_node


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([1000, 4096, MEBIBYTE]))
def test_each_destination_piece_is_tiled_by_its_transfers(case, area_bytes):
    by_target = defaultdict(list)
    transfers = transfers_of(case.plans(area_bytes))
    for t in transfers:
        by_target[t.destination, t.param].append(t)
        assert box_size(t.box) == box_size(t.source_box) == t.num_elements
    num_used = 0
    for rank, shard in enumerate(case.destination):
        for piece in shard:
            inside = [
                common
                for t in by_target[rank, piece.param]
                if t.tensor == piece.tensor and (common := intersect(t.box, piece.local))
            ]
            num_used += len(inside)
            assert sum(map(box_size, inside)) == box_size(piece.local)
            overlaps = [
                1 for i, a in enumerate(inside) for b in inside[:i] if intersect(a, b) is not None
            ]
            assert not overlaps
    assert num_used == len(transfers)


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([256, 1000, 4096, MEBIBYTE]))
def test_rounds_fit_their_areas(case, area_bytes):
    plans = case.plans(area_bytes)
    assert len({len(p.rounds) for p in plans}) == 1
    for mine in plans:
        assert mine.incoming_area_bytes <= area_bytes
        assert mine.outgoing_area_bytes <= area_bytes
        for round_ in mine.rounds:
            end = 0
            for placed in round_.arriving:
                assert placed.offset % ALIGN_BYTES == 0 and placed.offset >= end
                end = placed.offset + placed.num_bytes
            assert end <= area_bytes


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([256, 1000, MEBIBYTE]))
def test_both_ends_of_a_message_agree(case, area_bytes):
    """One message per pair and round; its parts lie in the same order at the same distances."""
    plans = case.plans(area_bytes)

    def content(message):
        parts = [(p.transfer, p.offset - message.offset) for p in message.parts]
        return message.num_bytes, parts

    for mine in plans:
        for number, round_ in enumerate(mine.rounds):
            assert len({m.peer for m in round_.incoming}) == len(round_.incoming)
            for message in round_.outgoing:
                other = plans[message.peer].rounds[number]
                (twin,) = [m for m in other.incoming if m.peer == mine.rank]
                assert content(message) == content(twin)
    sent = sum(len(r.outgoing) for p in plans for r in p.rounds)
    assert sent == sum(len(r.incoming) for p in plans for r in p.rounds)


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([1000, MEBIBYTE]))
def test_what_is_passed_on_came_two_rounds_before(case, area_bytes):
    """Its bytes lie where the same rectangle came in; only who held nothing passes on."""
    held = [{(p.tensor, p.param) for p in shard} for shard in case.source]
    for mine in case.plans(area_bytes):
        came = [{p.offset: p.transfer for m in r.incoming for p in m.parts} for r in mine.rounds]
        for number, round_ in enumerate(mine.rounds):
            for placed in (p for m in round_.outgoing for p in m.parts):
                t = placed.transfer
                if placed.relayed_from is None:
                    assert (t.tensor, t.source_param) in held[mine.rank]
                    continue
                there = came[number - RELAY_ROUNDS][placed.relayed_from]
                assert (there.tensor, there.param) == (t.tensor, t.source_param)
                assert there.box == t.source_box


@settings(max_examples=50, deadline=None)
@given(cases())
def test_senders_share_the_load(case):
    """Within one bundle, and what it becomes on a node, of the best that fractions could do."""
    made = plan(case.spread, case.topology, ITEMSIZE, 4096)
    sent = sent_bytes(made)
    best = send_balance_bound(made) * sum(sent) / len(sent)
    largest = max((s.bundle.num_bytes for s in made.sendings), default=0)
    fan_out = max((s.bundle.flow.fan_out for s in made.sendings), default=0)
    assert max(sent) <= 1.05 * best + largest * max(1, fan_out)


def test_the_plan_is_a_function_of_the_layouts():
    shape = make_shape("qwen3")

    def made():
        spread = reshard_spread(shape, TrainLayout(4, pp=2), RolloutLayout(4, tp=4))
        return rank_plans(spread, Topology.of(4, 2), itemsize=2, area_bytes=4096)

    assert made() == made()


def test_replicas_share_the_sending():
    shape = make_shape(num_hidden_layers=12, vocab_size=192)
    spread = reshard_spread(shape, TrainLayout(8, pp=2), RolloutLayout(8))
    made = plan(spread, Topology.of(8, 8), ITEMSIZE, 4096)
    assert send_balance(sent_bytes(made)) <= 1.05 * send_balance_bound(made)


def test_a_holder_on_the_same_rail_is_preferred():
    """Both ranks of node 0 hold both; each rank of node 1 gets its own from the same place."""
    held = [Piece("t", ((0, 4),), "p", ((0, 4),)), Piece("u", ((0, 4),), "q", ((0, 4),))]
    spread = spread_of_shards([held, held, [], []], [[], [], [held[0]], [held[1]]])
    plans = rank_plans(spread, Topology.of(4, 2), itemsize=4, area_bytes=1024)
    assert {(t.source, t.destination) for t in transfers_of(plans)} == {(0, 2), (1, 3)}


def test_a_tensor_that_nobody_holds_is_named():
    shape = make_shape()
    source = [train_pieces(shape, TrainLayout(1), 0)]
    source[0] = [p for p in source[0] if p.tensor != "model.layers.2.mlp.up_proj.weight"]
    spread = spread_of_shards(source, [rollout_pieces(shape, RolloutLayout(1), 0)])
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj.*rank 0.*gate_up_proj"):
        plan(spread, Topology.of(1, 1), ITEMSIZE, MEBIBYTE)


def test_a_rank_that_needs_a_rectangle_twice_is_refused():
    piece = Piece("t", ((0, 4),), "p", ((0, 4),))
    again = Piece("t", ((2, 6),), "q", ((0, 4),))
    whole = Piece("t", ((0, 6),), "w", ((0, 6),))
    spread = spread_of_shards([[whole]], [[piece, again]])
    with pytest.raises(ValueError, match=r"t\[2:4\] is needed twice by one rank, for p and q"):
        plan(spread, Topology.of(1, 1), ITEMSIZE, MEBIBYTE)


def test_overlapping_holdings_move_each_element_once():
    """Sources whose regions overlap in part: own elements first, each element once."""

    def piece(a, b):
        return Piece("t", ((a, b), (0, 3)), "p", ((0, b - a), (0, 3)))

    source = [[piece(0, 6)], [piece(4, 10)], []]
    destination = [[piece(3, 9)], [piece(0, 10)], [piece(2, 8)]]
    spread = spread_of_shards(source, destination)
    plans = rank_plans(spread, Topology.of(3, 1), itemsize=1, area_bytes=1024)
    moved = [t for t in transfers_of(plans) if t.source != t.destination]
    assert sum(t.num_bytes for t in moved) == (3 + 4 + 6) * 3


def test_an_expert_stack_has_one_dim_more():
    """A matrix that lies in a slot of a stack, cut on the way."""
    source = [[Piece("e", ((0, 4), (0, 6)), "w", ((8, 12), (0, 6)))]]
    destination = [[Piece("e", ((2, 4), (0, 6)), "stack", ((5, 6), (1, 3), (0, 6)))]]
    spread = spread_of_shards(source, destination)
    plans = rank_plans(spread, Topology.of(1, 1), itemsize=1, area_bytes=1024)
    (transfer,) = transfers_of(plans)
    assert transfer.source_box == ((10, 12), (0, 6))
    assert transfer.box == ((5, 6), (1, 3), (0, 6))


def test_a_rank_alone_computes_the_same_rounds():
    shape = make_shape("deepseek_v3")
    spread = reshard_spread(shape, TrainLayout(4, tp=2, ep=2), RolloutLayout(4, tp=4, ep=4))
    limits = {"itemsize": 2, "area_bytes": 2048}
    plans = rank_plans(spread, Topology.of(4, 2), **limits)
    assert [rank_plan(spread, Topology.of(4, 2), r, **limits) for r in range(4)] == plans


def test_wire_and_copies_share_every_round_but_the_last():
    """Half of the model is local: no round is all wire or all copies."""
    shape = make_shape(num_hidden_layers=16)
    spread = reshard_spread(shape, TrainLayout(2, pp=2), RolloutLayout(2))
    topology = Topology.of(2, 2)
    moved = lower_bound_bytes(plan(spread, topology, ITEMSIZE, MEBIBYTE))
    rounds = rank_plan(spread, topology, 0, itemsize=ITEMSIZE, area_bytes=moved // 16).rounds
    assert len(rounds) > 8
    assert all(r.incoming and r.local for r in rounds[:-2])


def test_no_source_is_asked_by_all_at_once():
    """Every stage sends from the first rounds on, about equally."""
    shape = make_shape(num_hidden_layers=16)
    spread = reshard_spread(shape, TrainLayout(4, pp=4), RolloutLayout(4))
    topology = Topology.of(4, 2)
    moved = lower_bound_bytes(plan(spread, topology, ITEMSIZE, MEBIBYTE))
    plans = rank_plans(spread, topology, itemsize=ITEMSIZE, area_bytes=moved // 32)
    sent = [sum(m.num_bytes for r in p.rounds[:4] for m in r.outgoing) for p in plans]
    assert min(sent) > 0.5 * max(sent)


@pytest.mark.parametrize("limit", [2, 3])
def test_a_rank_talks_to_few_others_in_a_round(limit):
    shape = make_shape(num_hidden_layers=16)
    spread = reshard_spread(shape, TrainLayout(16, tp=2, pp=4), RolloutLayout(16))
    plans = rank_plans(spread, Topology.of(16, 2), itemsize=4, area_bytes=MEBIBYTE, max_peers=limit)
    for round_ in (r for p in plans for r in p.rounds):
        assert len(round_.incoming) <= limit and len(round_.outgoing) <= limit


def test_an_area_below_the_least_is_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        plan(spread_of_shards([[]], [[]]), Topology.of(1, 1), ITEMSIZE, 16)


def test_what_goes_to_a_whole_node_at_once_must_fit():
    piece = Piece("t", ((0, 4),), "p", ((0, 4),))
    spread = spread_of_shards([[piece], *[[]] * 15], [[]] * 8 + [[piece]] * 8)
    topology = Topology.of(16, 8)
    with pytest.raises(ValueError, match=r"64 bytes.*16 bytes of t go to 7 ranks"):
        rank_plan(spread, topology, 0, itemsize=4, area_bytes=64)
    with pytest.raises(ValueError, match=r"max_peers=4.*t goes to 7 ranks"):
        rank_plan(spread, topology, 0, itemsize=4, area_bytes=MEBIBYTE, max_peers=4)
