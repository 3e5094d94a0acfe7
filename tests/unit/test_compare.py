"""The largest gap is named, and the change is that of its reason."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from rlhf.compare import compare, step_medians
from rlhf.planner.compare import Facts, advice, rows_of
from rlhf.planner.load import Load
from rlhf.planner.memory import Machine
from rlhf.planner.speeds import CPU
from rlhf.promise import Kept
from rlhf.track.journal import History

FACTS = Facts(
    calibrated=True,
    answer_tokens=(512.0, 80.0),
    prompt_tokens=(32.0, 21.0),
    trained_share=0.5,
    shares={"pipeline": 0.2, "tail_idle": 0.1, "reward_wait": 0.3},
)
MEASURED = {"rollout": 4.0, "update_actor": 3.0, "reshard": 0.5, "wait": 9.0}


def said(predicted, with_load=None, facts=FACTS, outside=()):
    rows = rows_of(predicted, MEASURED, with_load, outside)
    return rows, *advice(rows, facts, "c.yaml")


def test_phases_that_only_one_side_knows_are_left_out_and_the_largest_gap_is_first():
    rows, gap, _ = said({"rollout": 3.0, "update_actor": 0.5, "reshard": 0.5, "restore": 1.0})
    assert [row.phase for row in rows] == ["update_actor", "rollout", "reshard"]
    assert gap == "update_actor: 3 s measured, 0.5 predicted: 2.5 s more, 33% of a step"


def test_a_plan_that_holds_asks_for_nothing():
    assert said({"rollout": 3.2, "update_actor": 2.5})[2] == "nothing: the plan holds"
    small = said({"rollout": 4.0, "update_actor": 3.0, "reshard": 0.2})
    assert small[2] == "nothing: the plan holds", "a gap of less than 5 % of a step"


def test_answers_of_other_lengths_than_assumed_are_the_reason_before_the_machine_is():
    _, _, change = said({"rollout": 12.0}, with_load={"rollout": 4.2})
    assert "--prompt-tokens 21 --answer-tokens 80 (assumed were 32 and 512)" in change
    assert "50% of the answers were trained" in change


def test_constants_that_nobody_measured_are_the_next_reason():
    facts = Facts(False, *[(1.0, 1.0)] * 2, 1.0, {})
    assert "rlhf tune c.yaml" in said({"rollout": 1.0}, {"rollout": 1.1}, facts)[2]


def test_with_measured_constants_the_cause_with_the_largest_share_is_what_to_change():
    assert said({"rollout": 1.0}, {"rollout": 1.0})[2].startswith("make the reward faster")
    assert "tokens_per_microbatch" in said({"update_actor": 1.0}, {"update_actor": 1.0})[2]
    assert "calibrate again" in said({"update_actor": 9.0}, {"update_actor": 9.0})[2]


def test_a_checkpoint_is_in_no_step():
    rows = rows_of({"save": 1.0, "rollout": 4.0}, {**MEASURED, "save": 99.0}, None, ("save",))
    assert [row.phase for row in rows] == ["rollout", "save"]
    assert advice(rows, FACTS, "c.yaml")[1] == "nothing: the plan holds"


def test_the_first_step_counts_only_if_there_is_no_other():
    steps = [{"step": 0, "x": 9.0}, {"step": 1, "x": 1.0}, {"step": 2, "x": 3.0, "y": None}]
    assert step_medians(History(steps))["x"] == 2.0
    assert step_medians(History(steps[:1]))["x"] == 9.0
    assert "y" not in step_medians(History(steps))


def test_a_folder_without_a_plan_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"plan\.json: no such file; --compare needs"):
        compare(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a plan that this version reads"):
        compare(tmp_path)


def test_a_plan_of_another_version_and_a_run_without_a_step_are_refused(tmp_path):
    plan = Kept(
        speeds=CPU.model_dump(),
        calibration=None,
        load=asdict(Load(1, 1, 1.0, 1.0, 1.0, 8, 1)),
        machine=asdict(Machine(1, 1, 1, other_bytes=1)),
        seconds={},
        sent_bytes=0,
        local_bytes=0,
        memory_gib={},
        process_gib=0.0,
    )
    for changed in (
        {"load": {"turns": 1}},
        {"machine": {"racks": 1}},
        {"speeds": {"warp": 1}},
        {"seconds": None},
    ):
        replace(plan, **changed).write(tmp_path)
        with pytest.raises(ValueError, match=r"plan\.json: is not a plan that this version reads"):
            compare(tmp_path)
    plan.write(tmp_path)
    (tmp_path / "accounting.jsonl").write_text('{"steps_done": 0, "wall_s": [1.0]}\n')
    (tmp_path / "metrics.jsonl").write_text('{"steps_done": 0, "eval/accuracy": 0.5}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: has no step; --compare needs one"):
        compare(tmp_path)
