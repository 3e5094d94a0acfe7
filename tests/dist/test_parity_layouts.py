"""Every layout trains as one rank does: losses, gradient norms, each gradient, log-probabilities.

Float32, three Adam steps with clipping, weights from one HF folder; the one rank itself is compared
with transformers.
"""

from __future__ import annotations

import itertools
from pathlib import Path

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

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# 515 tokens: the vocabulary is padded under TP. 96 norm elements: optimizer buckets are padded.
SIZES = {"vocab_size": 515, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "qwen2": {},  # tied, qkv bias
    "qwen3": {},  # untied, qk norm
    "llama": {"rope_parameters": LLAMA3_ROPE},
}
REFERENCE = Case("one rank")
ONE_RANK = [
    REFERENCE,
    Case("one micro-batch", micro=1),
    Case("unpacked", unpacked=True),
    Case("padded", pad=9),
    Case("recompute full", {"recompute": "full"}),
    Case("recompute selective", {"recompute": "selective"}),
]
TWO_RANKS = [
    Case("tp2", {"tp": 2}),
    Case("tp2 sp", {"tp": 2, "sequence_parallel": True}, pad=1),
    Case("tp2 sp recompute full", {"tp": 2, "sequence_parallel": True, "recompute": "full"}),
    Case("pp2", {"pp": 2}),
    Case("pp2 uneven, many micro-batches", {"pp": 2, "first": 1}, micro=9),
    Case("pp2 one micro-batch", {"pp": 2}, micro=1),
    Case("pp2 recompute selective", {"pp": 2, "recompute": "selective"}),
    Case("pp2 vpp2", {"pp": 2, "vpp": 2}),
    Case("dp2", {"overlap": False}, micro=3),
    Case("dp2 overlap", {"overlap": True}, micro=3),
]
FOUR_RANKS = [
    Case("tp2 pp2", {"tp": 2, "pp": 2}),
    Case("tp2 pp2 vpp2 sp", {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}),
    Case("tp2 dp2 overlap", {"tp": 2}, micro=2),
    Case("pp2 dp2 overlap", {"pp": 2}, micro=2),
    Case("pp2 vpp2 dp2 overlap", {"pp": 2, "vpp": 2}, micro=2),
    Case("pp4", {"pp": 4}),
]
LAUNCHES = {1: ONE_RANK, 2: TWO_RANKS, 4: FOUR_RANKS}
FEW = {"one rank", "tp2", "tp2 sp", "pp2", "tp2 pp2"}  # what the second and third family run


def _cases(family: str, world: int) -> list[Case]:
    return [c for c in LAUNCHES[world] if family == "qwen2" or c.name in FEW]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        family: make_tiny(tmp_path_factory.mktemp(family), family, **SIZES, **overrides)
        for family, overrides in FAMILIES.items()
    }


def _run_families(rank, world, jobs):
    return {family: run_cases(rank, world, folder, cases) for family, folder, cases in jobs}


@pytest.fixture(scope="module")
def outcomes(folders):
    """(family, case) -> the outcomes of all ranks."""
    out = {}
    for world in LAUNCHES:
        jobs = [(family, str(folders[family]), _cases(family, world)) for family in FAMILIES]
        ranks = run_ranks(_run_families, world, jobs, timeout_s=240)
        for family, _, cases in jobs:
            for case in cases:
                out[family, case.name] = [results[family][case.name] for results in ranks]
    return out


ALL = [
    pytest.param(family, world, case, id=f"{family}-{case.name}")
    for family, world in itertools.product(FAMILIES, LAUNCHES)
    for case in _cases(family, world)
    if case is not REFERENCE
]


@pytest.mark.parametrize(("family", "world", "case"), ALL)
def test_losses_and_gradient_norms_equal_one_rank(outcomes, family, world, case):
    (expected,) = outcomes[family, REFERENCE.name]
    assert_losses_and_norms_equal(outcomes[family, case.name], expected)


@pytest.mark.parametrize(("family", "world", "case"), ALL)
def test_each_gradient_equals_one_rank(outcomes, folders, family, world, case):
    (expected,) = outcomes[family, REFERENCE.name]
    shape = load_model_shape(folders[family])
    assert_gradients_equal(shape, case, outcomes[family, case.name], expected)


@pytest.mark.parametrize(("family", "world", "case"), ALL)
def test_log_probabilities_equal_one_rank(outcomes, family, world, case):
    (expected,) = outcomes[family, REFERENCE.name]
    assert_logprobs_equal(case, outcomes[family, case.name], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_equals_transformers(outcomes, folders, family):
    """Log-probabilities of each sequence alone, the loss, and the gradient of each tensor."""
    (outcome,) = outcomes[family, REFERENCE.name]
    assert_equals_transformers(folders[family], outcome)
