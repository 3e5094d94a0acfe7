"""Where engines lie on nodes, who starts their hosts, and where the nodes of one meet."""

from __future__ import annotations

import dataclasses
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config.load import load_text
from rlhf.config.schema import Config
from rlhf.dist.layout import RolloutLayout, node_faults
from rlhf.dist.lost import LostPeer, is_lost_peer
from rlhf.dist.ports import ENGINE_PORTS
from rlhf.dist.world import World
from rlhf.ground import Plan
from rlhf.preflight import check_nodes
from rlhf.rollout.addresses import (
    ROOM,
    View,
    engine_address,
    free_block,
    look_around,
    port_blocks,
)
from rlhf.rollout.engine import EngineLostPeer, EngineSpec
from rlhf.rollout.node_host import only_lost_peers
from tests.unit.test_config_check import SMALL

SPEC = EngineSpec(model_path="m", vocab_size=100, max_position=64, context_tokens=32)
CLOSED = "scheduler tp0: RuntimeError: [gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:99"


def config_with(tp: int, pp: int = 1):
    return load_text(Config, SMALL, "x.yaml", [f"rollout.tp={tp}", f"rollout.pp={pp}"])


@pytest.mark.parametrize(
    ("tp", "pp", "local"),
    [(1, 1, 1), (4, 1, 8), (8, 1, 8), (8, 1, 4), (2, 4, 4), (16, 2, 8), (4, 4, 2), (2, 1, 1)],
)
def test_engines_inside_a_node_or_over_whole_ones_are_accepted(tp, pp, local):
    layout = RolloutLayout(tp * pp * local, tp=tp, pp=pp)
    assert list(node_faults(layout, local)) == []
    check_nodes(config_with(tp, pp), World(0, layout.world, 0, local))


def test_other_engines_are_refused_with_both_numbers_and_the_cure():
    world = World(0, 24, 0, 4)
    with pytest.raises(ValueError, match=r"tp\*rollout.pp=6 and the 4 ranks .* use 1, 2, or a m"):
        check_nodes(config_with(6), world)
    with pytest.raises(ValueError, match=r"rollout.tp=12 and the 8 ranks of a node: .*stage"):
        check_nodes(config_with(12, 2), World(0, 48, 0, 8))


def test_unequal_nodes_and_ranks_out_of_order_are_refused():
    config = config_with(1)
    with pytest.raises(ValueError, match=r"rank 0 of 12 is number 0 of 8"):
        check_nodes(config, World(0, 12, 0, 8))
    with pytest.raises(ValueError, match=r"rank 1 of 4 is number 0 of 2.*--distribution=block"):
        check_nodes(config, World(1, 4, 0, 2))


def plan_of(rank: int, tp: int, pp: int, local: int) -> Plan:
    world = World(rank, tp * pp * local, rank % local, local)
    layout = RolloutLayout(world.size, tp=tp, pp=pp)
    return Plan(config=None, world=world, shape=None, train=None, rollout=layout)


@pytest.mark.parametrize(
    ("tp", "pp", "local"), [(2, 1, 4), (4, 1, 4), (8, 1, 4), (2, 4, 4), (2, 1, 1)]
)
def test_each_rank_of_an_engine_has_one_host_on_its_node_and_one_of_these_leads(tp, pp, local):
    plans = [plan_of(rank, tp, pp, local) for rank in range(tp * pp * local)]
    held = []
    for plan in plans:
        if not plan.hosts_engine:
            assert not plan.leads_engine
            continue
        assert plan.leads_engine == (plan.engine_node == 0)
        spec = dataclasses.replace(
            SPEC,
            tp=tp,
            pp=pp,
            cores=tuple(range(tp * pp // plan.nodes_per_engine)),
            num_nodes=plan.nodes_per_engine,
            node=plan.engine_node,
            address="a:1",
        )
        ranks = range(plan.world.rank, plan.world.rank + spec.num_local_ranks)
        assert {r // local for r in ranks} == {plan.world.rank // local}, "on its own node"
        inside = [plan.rollout.coord(r) for r in ranks]
        named = [f"scheduler tp{c.tp}" + (f" pp{c.pp}" if c.pp else "") for c in inside]
        assert list(spec.scheduler_names) == named
        held += ranks
    assert held == list(range(len(plans)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes": 2, "tp": 2}, "an address where they meet, is ''"),
        ({"num_nodes": 2, "tp": 3, "address": "a:1"}, "engine of 3 ranks over 2 nodes"),
        ({"num_nodes": 2, "tp": 2, "address": "a:1", "node": 2}, "node 2 .* below its 2"),
        ({"num_nodes": 2, "tp": 4, "address": "a:1"}, "multiple of the engine's 2 ranks on a node"),
    ],
)
def test_a_node_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, **change)


def test_the_first_node_is_addressed_as_the_last_one_sees_it():
    """There MASTER_ADDR may be a loopback on its own node."""
    first, last = View("127.0.1.1", "127.0.1.1", 12000), View("10.0.0.1", "10.0.0.2", 0)
    assert engine_address([first, first, last, last], 0, 2) == "10.0.0.1:12000"


def test_another_node_is_addressed_by_its_side_of_the_way_to_the_first():
    first, second = View("fd00::1", "::1", 12000), View("fd00::1", "fd00::2", 12016)
    assert engine_address([first, second], 1, 1) == "[fd00::2]:12016"


def test_loopback_sees_itself():
    assert look_around("127.0.0.1", 29500, 7) == View("127.0.0.1", "127.0.0.1", 7)


@given(engines=st.integers(1, 64), master=st.integers(1, 65535), other=st.integers(1, 65535))
def test_engines_share_no_port_with_one_another_or_with_the_ranks_store(engines, master, other):
    blocks = [port_blocks(engine, engines, master) for engine in range(engines)]
    firsts = [first for block in blocks for first in block]
    assert len(set(firsts)) == len(firsts)
    assert all(first in ROOM and first % ENGINE_PORTS == 0 for first in firsts)
    assert all(not first <= master < first + ENGINE_PORTS for first in firsts)
    assert sorted(blocks[0]) == sorted(port_blocks(0, engines, 65000 + other % 2)) or master in ROOM


def test_the_plan_of_a_job_goes_first():
    assert port_blocks(0, 1, 29500, planned=10008)[0] == 10008


def test_a_block_with_a_port_in_use_is_passed_over():
    first, second = port_blocks(3, 8, 29500)[-2:]
    with socket.socket() as taken:
        taken.bind(("", first + 5))
        assert free_block([first, second]) == second
        with pytest.raises(RuntimeError, match="16 neighbouring ports"):
            free_block([first])


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        ([CLOSED], True),
        ([CLOSED, "a child reported a failure", "engine host (pid 7) exited with status 70"], True),
        (["scheduler tp1 (pid 8) was killed by SIGKILL", CLOSED], False),
        (["scheduler tp1: MemoryError: no memory"], False),
        (["scheduler tp1 gone"], False),
        ([], False),
    ],
)
def test_a_lost_connection_counts_as_cause_only_when_nothing_else_is_known(lines, lost):
    assert only_lost_peers(lines) == lost


def test_who_lost_a_connection_waits_for_who_knows_why():
    assert is_lost_peer(EngineLostPeer("the rollout engine died"))
    assert is_lost_peer(LostPeer("x"))
    assert is_lost_peer(RuntimeError(CLOSED))
    assert not is_lost_peer(ValueError(CLOSED))
