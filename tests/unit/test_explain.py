"""What explain adds up: closed forms, conservation, and the independent count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.reshard.explain import MESSAGE_S, Link, LinkSpeeds, Moves, Weights, explain, links_of
from rlhf.reshard.explain_picture import check_picture, draw_moves, sent_matrix
from rlhf.reshard.explain_plan import plan_moves
from rlhf.reshard.explain_text import explanation_text, rollout_words, train_words
from rlhf.reshard.topology import Topology
from rlhf.weights.families import reshard_spread
from tests.helpers.reshard_oracle import count_costs
from tests.helpers.shapes import rollout_layouts, shapes, train_layouts

SPEEDS = LinkSpeeds(nic_gbs=1.0, nvlink_gbs=10.0)
NODES = (0, 0, 1, 1)
G = 10**9


def _moves(*rows: tuple[int, int, int, int], world: int = 4) -> Moves:
    """Rows of (source, destination, bytes, round)."""
    source, destination, num_bytes, number = np.array(rows, np.int64).reshape(-1, 4).T
    return Moves(
        world=world,
        source=source,
        destination=destination,
        num_bytes=num_bytes,
        round=number,
        lower_bound_bytes=6 * G,
        cross_node_lower_bound_bytes=4 * G,
        send_balance_bound=1.25,
        staging_bytes=7,
        plan_build_s=0.5,
    )


BY_HAND = _moves(
    (0, 0, 8 * G, 0),  # itself
    (0, 1, 2 * G, 0),  # same node
    (0, 2, G, 0),  # same rail, in two rows of one message
    (0, 2, G, 0),
    (1, 2, 2 * G, 1),  # neither
)


def test_links_by_node_and_place():
    assert [Link(k) for k in links_of(BY_HAND, NODES)] == [
        Link.SELF,
        Link.NODE,
        Link.RAIL,
        Link.RAIL,
        Link.FABRIC,
    ]


def test_a_small_plan_by_hand():
    got = explain(BY_HAND, NODES, Weights(20 * G, 4.0 * G), SPEEDS)
    assert got.bytes_by_link == {"self": 8 * G, "node": 2 * G, "rail": 2 * G, "fabric": 2 * G}
    assert (got.moved_bytes_total, got.cross_node_bytes_total) == (6 * G, 4 * G)
    assert (got.moved_bytes_per_rank_mean, got.moved_bytes_per_rank_max) == (1.5 * G, 4 * G)
    assert got.local_bytes_total == 8 * G
    assert got.rollout_shard_bytes_mean == 14 * G / 4
    assert got.full_gather_bytes_per_rank == 16 * G
    assert (got.messages, got.rounds) == (3, 2)
    assert got.send_balance == 4 / 1.5
    # round 0: rank 0 has 2 GB out at 1 GB/s and two messages; round 1: 2 GB at 1 GB/s, one message
    assert got.predicted_s == pytest.approx(2 + 2 * MESSAGE_S + 2 + MESSAGE_S)
    assert got.floor_s == pytest.approx(4.0)  # rank 2 receives 4 GB over its NIC
    assert got.full_gather_floor_s == pytest.approx(16.0)
    assert got.full_gather_node_floor_s == pytest.approx(8.0)
    alone = explain(BY_HAND, (0, 0, 0, 0), Weights(20 * G, 4.0 * G), SPEEDS)
    assert alone.full_gather_floor_s == alone.full_gather_node_floor_s == pytest.approx(1.6)


def test_a_rank_waits_for_the_slower_of_nic_and_nvlink():
    moves = _moves((0, 1, 30 * G, 0), (0, 2, 2 * G, 0))
    got = explain(moves, NODES, Weights(G, 0.0), SPEEDS)
    assert got.floor_s == pytest.approx(3.0)
    assert got.predicted_s == pytest.approx(3.0 + 2 * MESSAGE_S)


def test_nothing_to_move_is_no_division_by_zero():
    moves = replace(
        _moves((0, 0, 5, 0), world=1), lower_bound_bytes=0, cross_node_lower_bound_bytes=0
    )
    got = explain(moves, [0], Weights(5, 5.0), SPEEDS)
    assert (got.moved_bytes_total, got.messages, got.send_balance, got.predicted_s) == (0, 0, 1, 0)
    text = explanation_text(got, "tiny", TrainLayout(1), RolloutLayout(1))
    assert "1 ranks on one node" not in text
    assert "one node" in text


@st.composite
def _plans(draw: st.DrawFn):
    shape = draw(shapes())
    world = draw(st.sampled_from([2, 4, 6]))
    return shape, draw(train_layouts(shape, world)), draw(rollout_layouts(shape, world))


@settings(max_examples=20, deadline=None)
@given(_plans())
def test_real_plans_move_what_the_independent_count_says(move):
    shape, train, rollout = move
    nodes = tuple(rank // 2 for rank in range(train.world))
    costs = count_costs(shape, train, rollout, nodes)
    moves = plan_moves(
        reshard_spread(shape, train, rollout), Topology(nodes), itemsize=2, area_bytes=4096
    )
    got = explain(moves, nodes, Weights(costs.model, costs.train_shard_mean), SPEEDS)
    assert got.moved_bytes_total == costs.lower_bound == got.lower_bound_bytes
    assert got.cross_node_bytes_total == costs.cross_node_lower_bound
    assert got.cross_node_lower_bound_bytes == costs.cross_node_lower_bound
    assert got.rollout_shard_bytes_mean == pytest.approx(costs.rollout_shard_mean)
    assert got.moved_bytes_per_rank_max == max(costs.lower_bound_by_rank)
    assert sum(got.bytes_by_link.values()) == sum(costs.rollout_shards)
    assert got.predicted_s >= got.floor_s


def test_the_text_says_what_the_record_says():
    got = explain(BY_HAND, NODES, Weights(20 * G, 4.0 * G), SPEEDS)
    train = TrainLayout(4, pp=2, last=1, ep=2, etp=1)
    text = explanation_text(got, "tiny", train, RolloutLayout(4, tp=2, ep=2, a2a="deepep"))
    for part in (
        "tiny, 20.00 GB, 4 ranks on 2 nodes",
        "pp=2,ep=2,etp=1,last=1, dp 2: 4.00 GB per rank",
        "2 engines of 2 (tp=2,ep=2,a2a=deepep): 3.50 GB per rank",
        "16.00 GB (10.7x)",
        "same rail 2.00 GB",
        "3 messages in 2 rounds",
        "2.667 x the mean; no choice of sources is below 1.250",
        "4.00 s predicted, 4.00 s at least",
        "1 GB/s per rank between nodes, 10 GB/s inside a node",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 88


def test_layouts_in_words():
    assert (
        train_words(TrainLayout(8, tp=2, pp=2, first=3, last=2)) == "tp=2,pp=2,first=3,last=2, dp 2"
    )
    assert train_words(TrainLayout(1)) == "dp 1"
    assert rollout_words(RolloutLayout(1)) == "1 engine of 1 (tp=1)"


@pytest.mark.parametrize("world", [4, 160])
def test_the_picture_is_drawn_by_rank_or_by_node(tmp_path, world):
    path = tmp_path / "moves.png"
    draw_moves(replace(BY_HAND, world=world), [r // 2 for r in range(world)], path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_the_picture_shows_each_byte_once():
    links = links_of(BY_HAND, NODES)
    amounts = [sent_matrix(BY_HAND, links, link, np.arange(4)) for link in Link]
    assert sum(amounts)[0].tolist() == [8 * G, 2 * G, 2 * G, 0]
    assert sum(amount.sum() for amount in amounts) == BY_HAND.num_bytes.sum()
    by_node = sum(sent_matrix(BY_HAND, links, link, np.array(NODES)) for link in Link)
    assert by_node.tolist() == [[10 * G, 4 * G], [0, 0]]


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--picture .*moves\.txt: must end in one of .*png"):
        check_picture(tmp_path / "moves.txt")
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        check_picture(tmp_path / "nowhere" / "moves.png")
    check_picture(tmp_path / "moves.svg")


@pytest.mark.parametrize("name", ["nic_gbs", "nvlink_gbs"])
def test_speeds_must_be_positive(name):
    flag = name.replace("_", "-")
    with pytest.raises(ValueError, match=f"--{flag}: must be above 0"):
        LinkSpeeds(**{name: 0.0})
