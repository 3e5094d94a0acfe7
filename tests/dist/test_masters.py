"""Weights that are lost come back from the float32 masters of the optimizer, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.parity_case import TEMPERATURE, Case
from tests.dist.training_case import Training
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

BF16 = "bfloat16"
SP = {"tp": 2, "sequence_parallel": True}
FROZEN = {"moe": {"freeze_router": True, "bias_update_rate": 0.01}}
CASES = {
    "qwen2": [
        Case("dp2", {"overlap": True}, dtype=BF16),
        Case("dp2 alone", {"overlap": False}, dtype=BF16),
        Case("tp2", SP, dtype=BF16),
        Case("pp2 vpp2", {"pp": 2, "vpp": 2}, dtype=BF16),
        Case("cp2", {"cp": 2}, dtype=BF16),
    ],
    "deepseek_v3": [
        Case("ep2", {"ep": 2}, micro=2, dtype=BF16),
        Case("tp2 ep2", {**SP, "ep": 2, "etp": 1, **FROZEN}, dtype=BF16),
    ],
}


def _lose_and_write(rank, world, folder, case, *, gather_params):
    """Two updates, then the weights of the optimizer become NaN and are written again.

    Without ``gather_params`` a gathering of the NaN is still under way then.
    """
    from rlhf.mcore import parallel
    from rlhf.mcore.forward import train

    run = Training(rank, world, folder, case)
    run.train(1)
    stats = train(
        run.model,
        run.optimizer,
        run.micro,
        run.loss,
        TEMPERATURE,
        gather_params=gather_params,
    )
    run.model.release_gradients()
    before = {name: p.detach().clone() for name, p in run.model.params.items()}
    for param in run.model.params.values():
        if param.requires_grad:
            param.detach().fill_(torch.nan)
    if not gather_params:
        for chunk in run.model.chunks:
            chunk.start_param_sync()
    run.optimizer.write_params()
    after = {name: p.detach().clone() for name, p in run.model.params.items()}
    on = run.train(1)
    parallel.shutdown()
    return {
        "differ": [n for n, p in before.items() if not torch.equal(p, after[n])],
        "kept": sorted(n for n, p in run.model.params.items() if not p.requires_grad),
        "weights": torch.cat([p.float().flatten() for p in after.values()]).numpy(),
        "on": (stats.grad_norm, on),
    }


def _goes_on(rank, world, folder, case):
    from rlhf.mcore import parallel

    run = Training(rank, world, folder, case)
    on = run.train(3)
    parallel.shutdown()
    return on[-1:]


def _of_float32(rank, world, folder):
    from rlhf.mcore import parallel

    run = Training(rank, world, folder, Case("dp2"))
    try:
        run.optimizer.write_params()
    except RuntimeError as error:
        return run.optimizer.has_masters, str(error)
    finally:
        parallel.shutdown()
    return None


def _run_all(rank, world, folders):
    from rlhf.platform.megatron_cpu import install

    install()
    out = {}
    for family, folder in folders.items():
        place = Path(folder)
        for case in CASES[family]:
            out[case.name] = {
                "lost": _lose_and_write(rank, world, place, case, gather_params=True),
                "on": _goes_on(rank, world, place, case),
            }
    place = Path(folders["qwen2"])
    stale = _lose_and_write(rank, world, place, CASES["qwen2"][0], gather_params=False)
    return out | {"stale": stale, "float32": _of_float32(rank, world, place)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    folders = {family: str(make_tiny(root / family, family)) for family in CASES}
    return run_ranks(_run_all, 2, folders, timeout_s=300)


NAMES = [case.name for cases in CASES.values() for case in cases]


@pytest.mark.parametrize("name", NAMES)
def test_lost_weights_are_written_bit_by_bit_and_training_goes_on(results, name):
    for rank in results:
        assert rank[name]["lost"]["differ"] == []
        assert rank[name]["lost"]["on"][1] == rank[name]["on"]


def test_biases_and_frozen_weights_are_those_that_no_master_has(results):
    for rank in results:
        kept = rank["tp2 ep2"]["lost"]["kept"]
        assert {name.rpartition(".mlp.router.")[2] for name in kept} == {"weight", "expert_bias"}
        assert not rank["tp2"]["lost"]["kept"]


def test_a_gathering_under_way_does_not_win(results):
    for rank in results:
        got, expected = rank["stale"], rank["dp2"]["lost"]
        assert (got["weights"] == expected["weights"]).all()
        assert got["on"] == expected["on"]


def test_a_float32_model_has_no_masters(results):
    for rank in results:
        has_masters, message = rank["float32"]
        assert not has_masters
        assert "model.dtype" in message
