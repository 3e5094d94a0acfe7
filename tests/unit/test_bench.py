"""Benches: what the Makefile names exists, what the suite reports, what the copies are of."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from rlhf.bench import suite
from rlhf.bench.rectangles import FORMS, InlineEngine, Movement, copy_ratio
from rlhf.bench.reshard_copy import LEAST

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CPU = torch.device("cpu")


def _benches() -> list[str]:
    found = re.search(r"^BENCHES := (.+)$", MAKEFILE, re.MULTILINE)
    assert found is not None
    return found[1].split()


def _other_modules() -> list[str]:
    """Those that a rule names outright, and bench-peer, which shares the rule of the list."""
    return ["rlhf.bench.peer", *re.findall(r"-m (rlhf\.bench\.\w+)", MAKEFILE)]


@pytest.mark.parametrize("module", [*map(suite.module_of, _benches()), *_other_modules()])
def test_every_bench_of_the_makefile_is_a_module_with_a_main(module):
    assert callable(importlib.import_module(module).main)


def test_every_bench_has_a_target_that_runs_its_module_and_is_part_of_the_suite():
    def commands(*targets: str) -> str:
        return subprocess.run(
            ["make", "--dry-run", "--always-make", *targets, "FLAVOUR=cpu"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    own = commands(*(f"bench-{name}" for name in _benches()))
    for name in _benches():
        assert re.search(rf"-m {re.escape(suite.module_of(name))}\s", own), name
    assert f"-m rlhf.bench.suite {' '.join(_benches())}" in commands("bench")


def test_the_suite_has_a_row_for_each_gate_and_keeps_the_json(tmp_path):
    path = tmp_path / "packing.json"
    rows = suite.run("packing", path)
    gates = json.loads(path.read_text(encoding="utf-8"))["gates"]
    assert [(r.figure, r.holds) for r in rows] == [(g["name"], g["holds"]) for g in gates]
    assert len(rows) == 2


def test_a_bench_without_a_result_does_not_hold_and_leaves_no_old_json(tmp_path):
    path = tmp_path / "old.json"
    for name, limit_s, words in (("nothing", 60.0, "exit status 1"), ("packing", 0.0, "after 0 s")):
        path.write_text("{}", encoding="utf-8")
        (row,) = suite.run(name, path, limit_s)
        assert not row.holds and words in row.figure
        assert not path.exists()


def test_gates_that_hold_do_not_hide_a_failing_exit():
    gate = {"name": "g", "value": 1.0, "gate": ">= 0.5", "holds": True}
    assert [r.holds for r in suite.rows_of("b", [gate], 0)] == [True]
    assert [r.holds for r in suite.rows_of("b", [gate], 1)] == [True, False]
    assert [r.holds for r in suite.rows_of("b", [{**gate, "holds": False}], 1)] == [False]


def test_the_table_has_its_columns_under_one_another():
    rows = [suite.Row("step", "reshard / step", "0.05", "<= 0.15", holds=True)]
    rows += [suite.Row("reshard-copy", "rows", "0.6", ">= 0.7", holds=False)]
    head, first, second = suite.table(rows).splitlines()
    for word, value in (("figure", "reshard / step"), ("gate", "<= 0.15"), ("holds", "yes")):
        assert first.index(value) == head.index(word)
    assert second.endswith("NO")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_receiver", [False, True], ids=["tensors", "engine"])
def test_a_movement_brings_every_element_to_its_place(form, with_receiver):
    what = form(2, 64, CPU)
    assert what.num_wrong() > what.num_bytes // 4
    assert sum(t.nbytes for t in what.targets.values()) == what.num_bytes
    movement = Movement(what, CPU, InlineEngine(what.targets) if with_receiver else None)
    movement.run()
    movement.close()
    assert what.num_wrong() == 0


def test_every_gate_of_the_copies_has_its_figure():
    assert set(LEAST) <= {form(1, 64, CPU).name for form in FORMS}
    figures = copy_ratio(FORMS[0](1, 64, CPU), CPU, 2)
    assert figures["bytes"] == 4 * 128 * 64 * 2 and figures["transfers"] == 16
