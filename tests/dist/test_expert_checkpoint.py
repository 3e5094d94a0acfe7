"""A checkpoint with experts continues the run under any layout, optimizer and biases included.

``make test-full`` moves it over four ranks too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.dist.parity_case import Case
from tests.dist.training_case import Training
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

MOE = {"moe": {"bias_update_rate": 0.01}}
SP = {"tp": 2, "sequence_parallel": True}
DP2 = Case("dp2", MOE, micro=2)
EP2 = Case("ep2", {**MOE, "ep": 2}, micro=2)
TP2 = Case("tp2", {**MOE, **SP})
TP2_EP2 = Case("tp2 ep2", {**MOE, **SP, "ep": 2, "etp": 1})
PP2 = Case("pp2", {**MOE, "pp": 2})
CP2 = Case("cp2", {**MOE, "cp": 2})
VPP2 = Case("vpp2", {**MOE, "pp": 2, "vpp": 2})
EP4 = Case("ep4", {**MOE, "ep": 4}, micro=1)
EP2_PP2 = Case("ep2 pp2", {**MOE, "ep": 2, "pp": 2}, micro=2)
EP2_EDP2 = Case("ep2 edp2", {**MOE, "ep": 2}, micro=1)
TP2_EP4 = Case("tp2 ep4", {**MOE, **SP, "ep": 4, "etp": 1}, micro=2)
TP2_ETP2 = Case("tp2 ep2 etp2", {**MOE, **SP, "ep": 2}, micro=2)
DP4 = Case("dp4", MOE, micro=1)
TP2_PP2 = Case("tp2 pp2", {**MOE, **SP, "pp": 2})
MOVES = {
    2: [(DP2, EP2), (EP2, PP2), (TP2_EP2, TP2), (VPP2, TP2_EP2), (CP2, EP2)],
    4: [
        (DP4, EP4),
        (EP4, TP2_PP2),
        (EP2_PP2, TP2_EP4),
        (TP2_EP4, DP4),
        (TP2_ETP2, EP2_PP2),
        (TP2_PP2, EP2_EDP2),
        (EP2_EDP2, TP2_ETP2),
    ],
}


def _move(rank, world, folder, target, case, other):
    """One update, save, three more; and those three again from the file in both layouts."""
    from rlhf.mcore import parallel
    from rlhf.mcore.checkpoint import load_state, save_state

    run = Training(rank, world, folder, case)
    run.train(1)
    save_state(target, run.model, run.optimizer)
    out = {"on": run.train(3)}
    parallel.shutdown()
    for name, layout in (("same", case), ("other", other)):
        run = Training(rank, world, folder, layout)
        load_state(target, run.model, run.optimizer)
        out[name] = run.train(3)
        parallel.shutdown()
    return out


def _run_all(rank, world, folder, target):
    import torch

    from rlhf.platform.megatron_cpu import install

    install()
    out = {}
    for i, (case, other) in enumerate(MOVES[world]):
        place = Path(target) / f"{world}-{i}"
        place.mkdir(exist_ok=True)
        torch.distributed.barrier()
        out[case.name, other.name] = _move(rank, world, Path(folder), place, case, other)
    return out


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), "deepseek_v3")
    target = tmp_path_factory.mktemp("checkpoints")
    done = {}

    def run(world):
        if world not in done:
            done[world] = run_ranks(_run_all, world, str(folder), str(target), timeout_s=400)
        return done[world]

    return run


@pytest.mark.parametrize(
    ("world", "pair"),
    [
        pytest.param(
            world,
            (a.name, b.name),
            id=f"{a.name} to {b.name}",
            marks=[pytest.mark.slow] * (world > 2),
        )
        for world, pairs in MOVES.items()
        for a, b in pairs
    ],
)
def test_the_next_three_updates_are_those_of_the_run_that_went_on(launch, world, pair):
    for rank in launch(world):
        assert rank[pair]["same"] == rank[pair]["on"]
        np.testing.assert_allclose(rank[pair]["other"], rank[pair]["on"], rtol=1e-5, atol=1e-6)
