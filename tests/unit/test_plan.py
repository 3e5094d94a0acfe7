"""Laws of the plan and its schedule, over random models and layouts."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.reshard.plan import ReshardPlan, Topology, plan
from rlhf.reshard.schedule import RankPlan, rank_plan, rank_plans
from rlhf.reshard.wire import ALIGN_BYTES
from rlhf.weights.families import rollout_pieces, train_pieces
from rlhf.weights.piece import Piece, box_size, intersect
from tests.helpers.shapes import make_shape, rollout_layouts, shapes, train_layouts
from tests.helpers.shards import slices

ITEMSIZE = 4


@st.composite
def pairs(draw) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Shards of a training layout and of a rollout layout over the same ranks, either way round."""
    shape = draw(shapes())
    world = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    train = draw(train_layouts(shape, world))
    rollout = draw(rollout_layouts(shape, world))
    sides = [
        [train_pieces(shape, train, r) for r in range(world)],
        [rollout_pieces(shape, rollout, r) for r in range(world)],
    ]
    return tuple(draw(st.permutations(sides)))


def lower_bound_bytes(source, destination, itemsize):
    """Bytes that must change rank: elements that a piece needs and its rank does not hold."""
    total = 0
    for have, need in zip(source, destination, strict=True):
        held = {}
        for piece in [*(p for shard in source for p in shard), *need]:
            ends = [stop for _, stop in piece.region]
            known = held.get(piece.tensor, ends)
            held[piece.tensor] = [max(pair) for pair in zip(known, ends, strict=True)]
        held = {tensor: np.zeros(shape, bool) for tensor, shape in held.items()}
        for piece in have:
            held[piece.tensor][slices(piece.region)] = True
        total += sum(int((~held[p.tensor][slices(p.region)]).sum()) for p in need)
    return total * itemsize


def _topology(world: int) -> Topology:
    return Topology.of(world, 2)


@settings(max_examples=40, deadline=None)
@given(pairs())
def test_moved_bytes_equal_the_lower_bound(pair):
    source, destination = pair
    made = plan(source, destination, ITEMSIZE, _topology(len(source)))
    assert made.moved_bytes == lower_bound_bytes(source, destination, ITEMSIZE)
    needed = sum(box_size(p.region) for shard in destination for p in shard)
    assert made.moved_bytes + made.local_bytes == needed * ITEMSIZE


@settings(max_examples=40, deadline=None)
@given(pairs())
def test_each_destination_piece_is_tiled_by_its_transfers(pair):
    source, destination = pair
    made = plan(source, destination, ITEMSIZE, _topology(len(source)))
    by_target = defaultdict(list)
    for t in made.transfers:
        by_target[t.destination, t.param].append(t)
        assert box_size(t.box) == box_size(t.source_box) == t.num_elements
    for rank, shard in enumerate(destination):
        for piece in shard:
            inside = [
                common
                for t in by_target[rank, piece.param]
                if t.tensor == piece.tensor and (common := intersect(t.box, piece.local))
            ]
            assert sum(map(box_size, inside)) == box_size(piece.local)
            overlaps = [
                1 for i, a in enumerate(inside) for b in inside[:i] if intersect(a, b) is not None
            ]
            assert not overlaps


@settings(max_examples=30, deadline=None)
@given(pairs())
def test_a_rank_never_fetches_what_it_or_its_node_holds(pair):
    source, destination = pair
    topology = _topology(len(source))
    holders = defaultdict(set)
    for rank, shard in enumerate(source):
        for piece in shard:
            holders[piece.tensor, piece.region].add(rank)
    for t in plan(source, destination, ITEMSIZE, topology).transfers:
        region = next(
            p.region
            for p in source[t.source]
            if p.param == t.source_param
            and p.tensor == t.tensor
            and intersect(p.local, t.source_box) is not None
        )
        ranks = holders[t.tensor, region]
        if t.destination in ranks:
            assert t.source == t.destination
        elif any(topology.nodes[r] == topology.nodes[t.destination] for r in ranks):
            assert topology.nodes[t.source] == topology.nodes[t.destination]


def test_the_plan_is_a_function_of_the_layouts():
    shape = make_shape("qwen3")
    source = [train_pieces(shape, TrainLayout(4, pp=2), r) for r in range(4)]
    destination = [rollout_pieces(shape, RolloutLayout(4, tp=4), r) for r in range(4)]
    first = plan(source, destination, ITEMSIZE, _topology(4))
    assert plan(source, destination, ITEMSIZE, _topology(4)) == first


def test_replicas_share_the_sending():
    shape = make_shape(num_hidden_layers=12, vocab_size=192)
    source = [train_pieces(shape, TrainLayout(8, pp=2), r) for r in range(8)]
    destination = [rollout_pieces(shape, RolloutLayout(8), r) for r in range(8)]
    sent = plan(source, destination, ITEMSIZE, Topology.of(8, 8)).sent_bytes()
    assert max(sent) <= 1.05 * sum(sent) / len(sent)


def test_a_tensor_that_nobody_holds_is_named():
    shape = make_shape()
    source = [train_pieces(shape, TrainLayout(1), 0)]
    source[0] = [p for p in source[0] if p.tensor != "model.layers.2.mlp.up_proj.weight"]
    destination = [rollout_pieces(shape, RolloutLayout(1), 0)]
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj.*rank 0.*gate_up_proj"):
        plan(source, destination, ITEMSIZE, _topology(1))


def test_overlapping_holdings_move_each_element_once():
    """Sources whose regions overlap in part: own elements first, each element once."""

    def piece(a, b):
        return Piece("t", ((a, b), (0, 3)), "p", ((0, b - a), (0, 3)))

    source = [[piece(0, 6)], [piece(4, 10)], []]
    destination = [[piece(3, 9)], [piece(0, 10)], [piece(2, 8)]]
    made = plan(source, destination, 1, Topology.of(3, 1))
    assert made.moved_bytes == lower_bound_bytes(source, destination, 1) == (3 + 4 + 6) * 3


def test_an_expert_stack_has_one_dim_more():
    """A matrix that lies in a slot of a stack, cut on the way."""
    source = [[Piece("e", ((0, 4), (0, 6)), "w", ((8, 12), (0, 6)))]]
    destination = [[Piece("e", ((2, 4), (0, 6)), "stack", ((5, 6), (1, 3), (0, 6)))]]
    (transfer,) = plan(source, destination, 1, Topology.of(1, 1)).transfers
    assert transfer.source_box == ((10, 12), (0, 6))
    assert transfer.box == ((5, 6), (1, 3), (0, 6))


def _schedule(made: ReshardPlan, area_bytes: int) -> list[RankPlan]:
    return rank_plans(made, range(made.world), area_bytes)


@settings(max_examples=25, deadline=None)
@given(pairs(), st.sampled_from([256, 1000, 4096, 1 << 20]))
def test_rounds_fit_their_areas_and_carry_the_whole_plan(pair, area_bytes):
    source, destination = pair
    made = plan(source, destination, ITEMSIZE, _topology(len(source)))
    plans = _schedule(made, area_bytes)
    assert len({len(p.rounds) for p in plans}) == 1
    elements = defaultdict(int)
    for mine in plans:
        assert mine.incoming_area_bytes <= area_bytes
        assert mine.outgoing_area_bytes <= area_bytes
        for round_ in mine.rounds:
            end = 0
            for placed in round_.arriving:
                assert placed.offset % ALIGN_BYTES == 0 and placed.offset >= end
                end = placed.offset + placed.num_bytes
                assert placed.num_bytes == placed.transfer.num_elements * ITEMSIZE
                t = placed.transfer
                elements[t.destination, t.param] += t.num_elements
            assert end <= area_bytes
    wanted = defaultdict(int)
    for t in made.transfers:
        wanted[t.destination, t.param] += t.num_elements
    assert elements == wanted


@settings(max_examples=30, deadline=None)
@given(pairs(), st.sampled_from([256, 1000, 1 << 20]))
def test_both_ends_of_a_message_agree(pair, area_bytes):
    """One message per pair and round; its parts lie in the same order at the same distances."""
    source, destination = pair
    made = plan(source, destination, ITEMSIZE, _topology(len(source)))
    plans = _schedule(made, area_bytes)

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


def test_a_rank_alone_computes_the_same_rounds():
    shape = make_shape()
    source = [train_pieces(shape, TrainLayout(4, tp=2), r) for r in range(4)]
    destination = [rollout_pieces(shape, RolloutLayout(4, tp=4), r) for r in range(4)]
    made = plan(source, destination, 2, _topology(4))
    plans = _schedule(made, 2048)
    assert [rank_plan(made, r, 2048) for r in range(4)] == plans


def test_wire_and_copies_share_every_round_but_the_last():
    """Half of the model is local: no round is all wire or all copies."""
    shape = make_shape(num_hidden_layers=16)
    source = [train_pieces(shape, TrainLayout(2, pp=2), r) for r in range(2)]
    destination = [rollout_pieces(shape, RolloutLayout(2), r) for r in range(2)]
    made = plan(source, destination, ITEMSIZE, _topology(2))
    rounds = rank_plan(made, 0, made.moved_bytes // 16).rounds
    assert len(rounds) > 8
    assert all(r.incoming and r.local for r in rounds[:-2])


def test_no_source_is_asked_by_all_at_once():
    """Every stage sends from the first round on, about equally."""
    shape = make_shape(num_hidden_layers=16)
    source = [train_pieces(shape, TrainLayout(4, pp=4), r) for r in range(4)]
    destination = [rollout_pieces(shape, RolloutLayout(4), r) for r in range(4)]
    made = plan(source, destination, ITEMSIZE, _topology(4))
    plans = _schedule(made, made.moved_bytes // 32)
    sent = [sum(m.num_bytes for m in p.rounds[0].outgoing) for p in plans]
    assert min(sent) > 0.5 * max(sent)


def test_an_area_below_the_least_is_refused():
    made = plan([[]], [[]], ITEMSIZE, _topology(1))
    with pytest.raises(ValueError, match="16 bytes"):
        rank_plan(made, 0, 16)
