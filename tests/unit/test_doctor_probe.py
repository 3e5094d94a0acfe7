"""Which ranks the doctor looks at, and what it says of them."""

from __future__ import annotations

import json

import pytest

from rlhf.cli import main
from rlhf.dist.layout import LayoutError, RolloutLayout
from rlhf.dist.layout_text import rollout_text
from rlhf.doctor_probe import given_layout, likely_layouts, looked_at, report
from rlhf.rollout.forks import Outcome, Probe
from rlhf.rollout.probe import table
from rlhf.weights.families import check_rollout
from rlhf.weights.find_model import find_model, known_models
from tests.helpers.shapes import make_shape

PROBE = Probe("a folder", RolloutLayout(4, tp=4, ep=2), 3)
SHAPE = make_shape("glm4_moe")


@pytest.mark.parametrize("name", known_models())
def test_likely_layouts_are_admitted_and_differ(name):
    shape = find_model(name)
    layouts = likely_layouts(shape)
    assert len(set(layouts)) == len(layouts) >= (1 if shape.num_heads % 2 else 3)
    assert layouts[0] == RolloutLayout(1)
    for layout in layouts:
        check_rollout(shape, layout)
        assert layout.num_engines == 1


@pytest.mark.parametrize("grid", [{}, {"tp": 8, "ep": 2}, {"tp": 4, "pp": 3}, {"tp": 64, "ep": 64}])
def test_a_handful_of_ranks_has_both_ends_of_every_kind_of_stage(grid):
    layout = RolloutLayout(grid.get("tp", 1) * grid.get("pp", 1), **grid)
    ranks = looked_at(layout)
    assert {0, layout.tp - 1, layout.engine_size - 1} <= set(ranks)
    assert len(ranks) <= 5 and ranks == sorted(set(ranks))
    assert {layout.coord(r).pp for r in ranks} >= {0, layout.pp // 2, layout.pp - 1}


def test_an_equal_rank_is_called_equal():
    found = report(SHAPE, Outcome(PROBE, table(SHAPE, PROBE), "", 0.5, 400.0))
    assert found.is_equal
    assert found.as_text().split()[:3] == ["tp=4,ep=2", "rank", "3"]
    assert found.as_text().endswith("equal")


def test_a_rank_that_differs_lists_all_in_json_and_a_dozen_in_the_text():
    other = table(SHAPE, Probe("a folder", RolloutLayout(4, tp=4, ep=2), 2))
    found = report(SHAPE, Outcome(PROBE, other, "", 0.5, 400.0))
    assert not found.is_equal
    record = json.loads(json.dumps(found.as_record()))
    assert not record["equal"] and len(record["differences"]) == len(found.differences) > 12
    first = found.differences[0]
    lines = found.as_text().splitlines()
    assert len(lines) == 1 + 12 + 1
    assert lines[0].endswith(f"{len(found.differences)} differences")
    assert lines[1].strip() == str(first)
    assert lines[-1].strip() == f"and {len(found.differences) - 12} more; --json has all"


def test_a_rank_that_sglang_refused_gives_the_reason():
    found = report(SHAPE, Outcome(PROBE, None, "Traceback\n  ...\nKeyError: 'x'\n", 0.5, 400.0))
    assert not found.is_equal
    assert found.as_text().endswith("failed: KeyError: 'x'")


def test_a_layout_is_one_engine_that_the_model_admits():
    layout = given_layout(SHAPE, "tp=4,ep=2")
    assert (rollout_text(layout), layout.world) == ("tp=4,ep=2", 4)
    with pytest.raises(LayoutError, match=r"rollout\.ep: 8 must divide"):
        given_layout(SHAPE, "tp=8,ep=8")


def test_wrong_requests_name_what_is_known(capsys):
    assert main(["doctor", "--probe", "deepseek-v3-671"]) == 2
    assert "deepseek-v3-671b" in capsys.readouterr().err
    assert main(["doctor", "--rollout", "tp=2"]) == 2
    assert "--probe MODEL" in capsys.readouterr().err
