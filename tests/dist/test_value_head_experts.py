"""Critics and reward models with experts: a layout as one rank, one rank as transformers."""

from __future__ import annotations

import pytest

from tests.dist.parity_case import Case
from tests.dist.value_case import assert_equals_one_rank, assert_equals_transformers, run_cases
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny_classifier

SIZES = {"vocab_size": 515, "hidden_size": 96}
FAMILIES = ("qwen3_moe", "deepseek_v3")
SP = {"tp": 2, "sequence_parallel": True}
REFERENCE = Case("one rank")
LAUNCHES = {
    1: [REFERENCE],
    2: [
        Case("ep2", {"ep": 2}, micro=3),
        Case("tp2 sp", SP, pad=1),
        Case("tp2 sp ep2 etp1", {**SP, "ep": 2, "etp": 1}),
        Case("pp2", {"pp": 2}),
    ],
}


def _run(rank, world, folders, cases):
    return {family: run_cases(rank, world, folder, cases) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        family: str(make_tiny_classifier(tmp_path_factory.mktemp(family), family, **SIZES))
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def outcomes(folders):
    """(family, case) -> what each rank has."""
    out = {}
    for world, cases in LAUNCHES.items():
        ranks = run_ranks(_run, world, folders, cases, timeout_s=400)
        for family in FAMILIES:
            out |= {(family, c.name): [r[family][c.name] for r in ranks] for c in cases}
    return out


@pytest.mark.parametrize("case", LAUNCHES[2], ids=lambda case: case.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_trains_as_one_rank(outcomes, family, case):
    (expected,) = outcomes[family, REFERENCE.name]
    assert_equals_one_rank(outcomes[family, case.name], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_equals_transformers(outcomes, folders, family):
    (outcome,) = outcomes[family, REFERENCE.name]
    assert_equals_transformers(outcome, folders[family])
