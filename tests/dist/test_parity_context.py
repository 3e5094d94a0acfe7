"""Context parallelism trains as one rank does: sequences of any length, cut over ranks in zigzag.

The sequences are of 4 to 40 tokens, so some are shorter than 2 * cp and most need padding.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.weights.model_shape import load_model_shape
from tests.dist.parity_case import Case, run_cases
from tests.dist.parity_compare import (
    assert_gradients_equal,
    assert_logprobs_equal,
    assert_losses_and_norms_equal,
)
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

SIZES = {"vocab_size": 515, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
REFERENCE = Case("one rank")
SP = {"sequence_parallel": True}
LAUNCHES = {
    2: [
        Case("cp2", {"cp": 2}),
        Case("cp2 unpacked", {"cp": 2}, unpacked=True),
        Case("cp2 one micro-batch", {"cp": 2}, micro=1),
        Case("cp2 empty micro-batches", {"cp": 2}, micro=15, pad=1),
        Case("cp2 recompute full", {"cp": 2, "recompute": "full"}),
        Case("cp2 recompute selective", {"cp": 2, "recompute": "selective"}),
        Case("cp2 without overlap", {"cp": 2, "overlap": False}),
    ],
    4: [
        Case("cp2 tp2", {"cp": 2, "tp": 2}),
        Case("cp2 tp2 sp", {"cp": 2, "tp": 2, **SP}),
        Case("cp2 tp2 sp unpacked", {"cp": 2, "tp": 2, **SP}, unpacked=True),
        Case("cp2 pp2", {"cp": 2, "pp": 2}),
        Case("cp2 pp2 vpp2", {"cp": 2, "pp": 2, "vpp": 2}),
        Case("cp2 dp2", {"cp": 2}, micro=3),
        Case("cp4", {"cp": 4}),
    ],
}
SLOW = {4}
ALL = [
    pytest.param(world, case, id=case.name, marks=[pytest.mark.slow] if world in SLOW else [])
    for world, cases in LAUNCHES.items()
    for case in cases
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", **SIZES)


@pytest.fixture(scope="module")
def expected(folder):
    (outcomes,) = run_ranks(run_cases, 1, str(folder), [REFERENCE], timeout_s=120)
    return outcomes[REFERENCE.name]


@pytest.fixture(scope="module")
def launch(folder):
    """World size -> the outcomes of all its cases; each launched when first asked for."""
    done = {}

    def outcomes(world, case):
        if world not in done:
            args = (str(folder), LAUNCHES[world])
            done[world] = run_ranks(run_cases, world, *args, timeout_s=240)
        return [rank[case.name] for rank in done[world]]

    return outcomes


@pytest.mark.parametrize(("world", "case"), ALL)
def test_losses_and_gradient_norms_equal_one_rank(launch, expected, world, case):
    assert_losses_and_norms_equal(launch(world, case), expected)


@pytest.mark.parametrize(("world", "case"), ALL)
def test_each_gradient_equals_one_rank(launch, expected, folder, world, case):
    assert_gradients_equal(load_model_shape(folder), case, launch(world, case), expected)


@pytest.mark.parametrize(("world", "case"), ALL)
def test_log_probabilities_equal_one_rank(launch, expected, world, case):
    assert_logprobs_equal(case, launch(world, case), expected)
