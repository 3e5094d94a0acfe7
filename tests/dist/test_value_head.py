"""A model with a value head: every layout as one rank, and one rank as transformers.

Values, losses, gradient norms over three Adam steps, and the gradient of each tensor.
"""

from __future__ import annotations

import pytest

from tests.dist.parity_case import Case
from tests.dist.value_case import assert_equals_one_rank, assert_equals_transformers, run_cases
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny_classifier

SIZES = {"vocab_size": 515, "hidden_size": 96}
REFERENCE = Case("one rank")
LAUNCHES = {
    1: [REFERENCE, Case("unpacked", unpacked=True), Case("padded", pad=3)],
    2: [
        Case("tp2", {"tp": 2}),
        Case("tp2 sp", {"tp": 2, "sequence_parallel": True}, pad=1),
        Case("pp2", {"pp": 2}),
        Case("pp2 vpp2", {"pp": 2, "vpp": 2}),
        Case("dp2 overlap", {"overlap": True}, micro=3),
        Case("cp2", {"cp": 2}),
    ],
    4: [Case("tp2 pp2 vpp2 sp", {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True})],
}
CASES = [c for cases in LAUNCHES.values() for c in cases if c is not REFERENCE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_classifier(tmp_path_factory.mktemp("classifier"), "qwen2", **SIZES)


@pytest.fixture(scope="module")
def outcomes(folder):
    out = {}
    for world, cases in LAUNCHES.items():
        ranks = run_ranks(run_cases, world, str(folder), cases, timeout_s=240)
        out.update({case.name: [r[case.name] for r in ranks] for case in cases})
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_trains_as_one_rank(outcomes, case):
    (expected,) = outcomes[REFERENCE.name]
    assert_equals_one_rank(outcomes[case.name], expected)


def test_one_rank_equals_transformers(outcomes, folder):
    (outcome,) = outcomes[REFERENCE.name]
    assert_equals_transformers(outcome, folder)
