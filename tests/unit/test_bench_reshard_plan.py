"""The bench of plans, on its smallest recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf.bench.reshard_plan import (
    BUILD_LIMITS_S,
    FIRST,
    RECIPES,
    build_seconds,
    figures_of,
    gates_of,
)
from rlhf.weights.families import rollout_faults, train_faults
from rlhf.weights.find_model import find_model
from tests.helpers import recipes


def test_a_recipe_has_a_figure_for_every_gate_and_they_hold():
    smallest = min(RECIPES, key=lambda recipe: recipe.ranks)
    row = figures_of(smallest)
    gates = gates_of([row], dict.fromkeys(BUILD_LIMITS_S, 0.0))
    assert all(gate.holds for gate in gates)
    assert row["floor_s"] < row["predicted_s"] and row["full_gather_over_moved"] > 20
    broken = gates_of([row, {**row, "moved_over_bound": 1.001}], {4096: 20.5})
    assert [g.name for g in broken if not g.holds] == [
        "moved over bound",
        "plan build CPU seconds, 4096 ranks",
    ]


def test_the_well_known_recipes_come_first():
    known = [(r.model, r.ranks, r.train, r.rollout) for r in recipes.RECIPES.values()]
    assert [(r.model, r.ranks, r.train, r.rollout) for r in RECIPES[: len(known)]] == known


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_fits_its_model(recipe):
    shape, (train, rollout) = find_model(recipe.model), recipe.layouts
    assert not [*train_faults(shape, train), *rollout_faults(shape, rollout)]


@pytest.mark.parametrize("ranks", BUILD_LIMITS_S)
def test_the_timed_layouts_exist_with_more_ranks(ranks):
    train, rollout = replace(FIRST, ranks=ranks).layouts
    assert train.dp * FIRST.ranks == ranks and rollout.world == ranks


def test_building_takes_time():
    assert build_seconds(128) > 0
