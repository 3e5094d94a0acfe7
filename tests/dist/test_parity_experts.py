"""Models with experts and latent attention train on every layout as on one rank.

Float32, three Adam steps with clipping, weights from one HF folder; the one rank itself is compared
with transformers. ``make test-full`` runs the layouts of four and eight ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlhf.weights.model_shape import load_model_shape
from tests.dist.parity_case import Case, run_cases
from tests.dist.parity_compare import (
    assert_equals_transformers,
    assert_gradients_equal,
    assert_logprobs_equal,
    assert_losses_and_norms_equal,
)
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

SIZES = {"vocab_size": 515, "hidden_size": 96}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,  # sequences are longer
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
FAMILIES = {
    "qwen3_moe": ("qwen3_moe", {}),
    # two groups and two experts: megatron's own rule would choose other groups
    "deepseek_v3": ("deepseek_v3", {"topk_group": 2, "rope_parameters": YARN}),
    "moonlight": ("moonlight", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe no norm": ("glm4_moe", {"use_qk_norm": False}),
}
SP = {"tp": 2, "sequence_parallel": True}
LOSSES = {
    "aux_loss": "sequence",
    "aux_loss_coef": 0.05,
    "z_loss_coef": 0.01,
    "bias_update_rate": 0.01,
    "bias_decay": 0.1,
}
GLOBAL = {"aux_loss": "global", "aux_loss_coef": 0.05}
REFERENCE = Case("one rank")
WITH_LOSSES = Case("one rank, losses", {"moe": LOSSES})
WITH_GLOBAL = Case("one rank, global", {"moe": GLOBAL}, micro=1)
FROZEN = Case("one rank, frozen router", {"moe": {"freeze_router": True}})


def _with_losses(name: str, **train) -> Case:
    return Case(f"{name} losses", {**train, "moe": LOSSES}, against=WITH_LOSSES.name)


ONE = {
    "qwen3_moe": [
        REFERENCE,
        FROZEN,
        Case("one micro-batch", micro=1),
        Case("recompute selective", {"recompute": "selective"}),
    ],
    "deepseek_v3": [
        REFERENCE,
        WITH_LOSSES,
        WITH_GLOBAL,
        Case("padded", pad=9),
        Case("unpacked losses", {"moe": LOSSES}, unpacked=True, against=WITH_LOSSES.name),
        Case("recompute full", {"recompute": "full", "moe": LOSSES}, against=WITH_LOSSES.name),
        Case("recompute selective", {"recompute": "selective"}),
    ],
    "moonlight": [REFERENCE],
    "glm4_moe": [REFERENCE],
    "glm4_moe no norm": [REFERENCE],
}
TWO = {
    "qwen3_moe": [
        Case("ep2 alltoall", {"ep": 2}, micro=3),
        Case("ep2 alltoall, no overlap", {"ep": 2, "overlap": False}, micro=3),
        Case("ep2 allgather", {"ep": 2, "moe": {"dispatcher": "allgather"}}, micro=3),
        Case("ep2 frozen", {"ep": 2, "moe": {"freeze_router": True}}, against=FROZEN.name),
        Case("tp2 etp2 sp", SP, pad=1),
        Case("dp2", {}, micro=3),
    ],
    "deepseek_v3": [
        _with_losses("ep2", ep=2),
        Case("ep2 global", {"ep": 2, "moe": GLOBAL}, micro=1, against=WITH_GLOBAL.name),
        Case("tp2 sp", SP),
        _with_losses("tp2 ep2 etp1 sp", **SP, ep=2, etp=1),
        Case("tp2 etp2 allgather", {**SP, "moe": {"dispatcher": "allgather"}}),
        Case("pp2 vpp2", {"pp": 2, "vpp": 2}),
        Case("pp2 uneven", {"pp": 2, "first": 1}, micro=5),
        _with_losses("cp2", cp=2),
        Case(
            "cp2 ep2 global", {"cp": 2, "ep": 2, "moe": GLOBAL}, micro=1, against=WITH_GLOBAL.name
        ),
    ],
    "moonlight": [Case("tp2 ep2 etp1 sp", {**SP, "ep": 2, "etp": 1})],
    "glm4_moe": [Case("tp2 ep2 etp1 sp", {**SP, "ep": 2, "etp": 1})],
    "glm4_moe no norm": [],
}
FOUR = {
    "qwen3_moe": [
        Case("ep4", {"ep": 4}, micro=2),
        Case("ep2 edp2", {"ep": 2}, micro=2),
        Case("tp2 etp2 dp2", SP, micro=2),
        Case("tp2 ep2 etp2", {**SP, "ep": 2}, micro=2),
        Case("tp2 ep4 etp1", {**SP, "ep": 4, "etp": 1}, micro=2),
        Case("tp2 ep2 etp1 edp2", {**SP, "ep": 2, "etp": 1}, micro=2),
    ],
    "deepseek_v3": [
        _with_losses("ep2 pp2", ep=2, pp=2),
        _with_losses("tp2 pp2", **SP, pp=2),
        _with_losses("tp2 ep4 etp1", **SP, ep=4, etp=1),
        Case(
            "tp2 ep2 etp2 allgather", {**SP, "ep": 2, "moe": {"dispatcher": "allgather"}}, micro=2
        ),
        Case("tp2 pp2 vpp2 ep2 etp1", {**SP, "pp": 2, "vpp": 2, "ep": 2, "etp": 1}),
        Case("pp4", {"pp": 4}),
        _with_losses("tp2 cp2 ep4 etp1", **SP, cp=2, ep=4, etp=1),
    ],
    "moonlight": [Case("tp2 pp2 ep2 etp1", {**SP, "pp": 2, "ep": 2, "etp": 1})],
    "glm4_moe": [Case("ep2 pp2", {"ep": 2, "pp": 2}, micro=2)],
    "glm4_moe no norm": [Case("tp2 ep2 etp2", {**SP, "ep": 2}, micro=2)],
}
EIGHT = {
    "deepseek_v3": [
        _with_losses("tp2 pp2 ep2 etp2", **SP, pp=2, ep=2),
        Case("tp2 pp2 ep4 etp1", {**SP, "pp": 2, "ep": 4, "etp": 1}, micro=2),
    ]
}
LAUNCHES = {1: ONE, 2: TWO, 4: FOUR, 8: EIGHT}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: make_tiny(tmp_path_factory.mktemp("model"), family, **{**SIZES, **overrides})
        for name, (family, overrides) in FAMILIES.items()
    }


def _run_families(rank, world, jobs):
    return {name: run_cases(rank, world, folder, cases) for name, folder, cases in jobs}


@pytest.fixture(scope="module")
def launch(folders):
    """World -> (family, case) -> the outcomes of all ranks; each launched once, when asked for."""
    done: dict[int, dict] = {}

    def run(world: int) -> dict:
        if world not in done:
            jobs = [(name, str(folders[name]), cases) for name, cases in LAUNCHES[world].items()]
            ranks = run_ranks(_run_families, world, jobs, timeout_s=500)
            done[world] = {
                (name, case.name): [results[name][case.name] for results in ranks]
                for name, _, cases in jobs
                for case in cases
            }
        return done[world]

    return run


ALL = [
    pytest.param(
        family, world, case, id=f"{family}-{case.name}", marks=[pytest.mark.slow] * (world > 2)
    )
    for world, families in LAUNCHES.items()
    for family, cases in families.items()
    for case in cases
    if world > 1 or case.against != case.name
    if case not in (REFERENCE, WITH_LOSSES, WITH_GLOBAL, FROZEN)
]


@pytest.mark.parametrize(("family", "world", "case"), ALL)
def test_a_layout_trains_as_one_rank(launch, folders, family, world, case):
    """Losses, norms, log-probabilities and each gradient; loads of experts and biases exactly."""
    ranks, (expected,) = launch(world)[family, case.name], launch(1)[family, case.against]
    assert_losses_and_norms_equal(ranks, expected)
    assert_logprobs_equal(case, ranks, expected)
    assert_gradients_equal(load_model_shape(folders[family]), case, ranks, expected)
    for outcome in ranks:
        assert np.array_equal(outcome.loads, expected.loads)
        for layer, bias in outcome.biases.items():
            np.testing.assert_array_equal(bias, expected.biases[layer])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_equals_transformers(launch, folders, family):
    (outcome,) = launch(1)[family, REFERENCE.name]
    assert_equals_transformers(folders[family], outcome)
