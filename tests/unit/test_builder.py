"""Where engines may stand, and what they are started with."""

from __future__ import annotations

import pytest

from rlhf.builder import check_nodes, engine_seed, first_port
from rlhf.dist.ports import ENGINE_PORTS
from rlhf.dist.world import World


@pytest.mark.parametrize(("size", "local"), [(1, 1), (8, 8), (16, 8), (16, 4)])
def test_engines_inside_a_node_are_accepted(size, local):
    for engine_size in (n for n in (1, 2, 4, 8) if local % n == 0):
        check_nodes(World(0, size, 0, local), engine_size)


def test_an_engine_over_several_nodes_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"rollout.tp\*rollout.pp=8 must divide the 4 ranks"):
        check_nodes(World(0, 16, 0, 4), 8)
    with pytest.raises(ValueError, match=r"=4 must divide the 6 ranks"):
        check_nodes(World(0, 12, 0, 6), 4)


def test_unequal_nodes_are_refused():
    with pytest.raises(ValueError, match=r"12 ranks are no multiple of this node's 8"):
        check_nodes(World(0, 12, 0, 8), 1)


def test_engines_of_neighbouring_seeds_share_none():
    seeds = [engine_seed(seed, engine, 4) for seed in range(5) for engine in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert 0 <= engine_seed(2**63, 3, 4) < 2**32


def test_engines_of_a_slurm_step_have_planned_ports_and_others_look_for_some():
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "1(x2)"}
    worlds = [World(rank, 4, rank % 2, 2) for rank in range(4)]
    ports = [first_port(w, {**step, "SLURM_PROCID": str(w.rank // 2)}) for w in worlds]
    taken = {port + i for port in ports for i in range(ENGINE_PORTS)}
    assert len(taken) == 4 * ENGINE_PORTS
    one = {**step, "SLURM_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    assert first_port(worlds[0], one) is None
    assert first_port(worlds[0], {}) is None
