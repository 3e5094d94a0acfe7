"""The bench of recipes, on its smallest one."""

from __future__ import annotations

from pathlib import Path

from rlhf.bench.recipes import figures_of, gates_of, known_recipes

ROOT = Path(__file__).parents[2]


def test_a_recipe_has_a_figure_for_every_gate_and_they_hold():
    row = figures_of(ROOT / "configs" / "recipes" / "qwen3_30b_8.yaml")
    assert all(gate.holds for gate in gates_of([row], 1.0))
    assert row["reshard_s"] > 0
    phases = row["phases"]
    assert sum(took["seconds"] for name, took in phases.items() if name != "SAVE") < row["step_s"]
    broken = gates_of([row, {**row, "fits": False, "reshard_s": 0.0}], 121.0)
    assert not any(gate.holds for gate in broken)


def test_every_recipe_is_known(monkeypatch):
    monkeypatch.chdir(ROOT)
    known = [str(path) for path in known_recipes()]
    assert known[0] == "configs/grpo_600b.yaml"
    assert len(known) == 1 + len(list((ROOT / "configs" / "recipes").glob("*.yaml"))) >= 10
