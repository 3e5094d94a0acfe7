"""What engines are started with."""

from __future__ import annotations

from rlhf.builder import engine_seed, first_port
from rlhf.dist.ports import ENGINE_PORTS
from rlhf.dist.world import World


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
