"""What is tried of a setting lies between what must fit and what could still change anything."""

from __future__ import annotations

import pytest

from rlhf.config.load import load_config
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.tune.command import check_targets
from rlhf.tune.records import Pass, Round
from rlhf.tune.settings import (
    Setting,
    cache_setting,
    concurrency_setting,
    microbatch_setting,
    window_setting,
)
from rlhf.tune.slices import without_keys
from rlhf.tune.tuner import admit, tune

DEMO = "configs/demo.yaml"
TRAIN, ROLLOUT = TrainLayout(2, pp=2), RolloutLayout(2)


def demo(*overrides):
    return load_config(DEMO, overrides)


def test_micro_batches_hold_the_longest_sequence_and_no_more_than_a_step():
    setting = microbatch_setting(demo(), TRAIN, step_tokens=2000)
    assert setting.current == 768
    assert sorted(setting.values) == [192, 384, 576, 768, 1152, 1536, 3072]
    tight = microbatch_setting(demo("train.tokens_per_microbatch=69"), TRAIN, step_tokens=69)
    assert tight.values == (69,)
    assert "no other size holds a sequence of 69 tokens" in tight.why_none


def test_windows_stop_where_everything_passes_at_once():
    assert sorted(window_setting(demo(), moved_bytes=512 * 2**20).values) == [16, 32, 64, 128]
    one = window_setting(demo("reshard.window_mib=4"), moved_bytes=1000)
    assert one.values == (4,)
    assert "one round" in one.why_none


def test_concurrency_is_tried_where_a_share_need_not_be_admitted_whole():
    fixed = concurrency_setting(demo(), ROLLOUT)
    assert fixed.values == (64,)
    assert "rollout.deterministic admits an engine's whole share of 64" in fixed.why_none
    free = demo("rollout.deterministic=false", "rollout.max_running_requests=32")
    assert sorted(concurrency_setting(free, ROLLOUT).values) == [16, 32, 64]


def test_a_cache_that_holds_all_running_answers_need_not_grow():
    assert cache_setting(demo(), ROLLOUT, sequence_tokens=27).values == (2560,)
    assert cache_setting(demo(), ROLLOUT, sequence_tokens=69).values == (2560, 5120)
    share = cache_setting(demo("rollout.kv_tokens=null"), ROLLOUT, sequence_tokens=69)
    assert share.key == "rollout.mem_fraction"
    assert share.values == (0.6, 0.5, 0.7)


def test_what_the_planner_refuses_is_not_measured_and_is_named():
    setting = Setting("a.b", (1, 2, 4), ("rollout",))
    admitted, refused = admit(setting, lambda word: "too large" if word == "a.b=4" else None)
    assert admitted.values == (1, 2)
    assert [(r.value, r.why) for r in refused] == [(4, "too large")]
    alone, _ = admit(setting, lambda word: "too large")
    assert alone.values == (1,)
    assert alone.why_none == "all others are refused"


def test_settings_of_a_slice_go_before_those_of_the_user():
    mine = ["run_dir=x", "data.eval.0.path=y", "optimizer.lr=1", "train.pp=2"]
    assert without_keys(mine, ["run_dir=z", "data.eval=[]", "optimizer.lr=0"]) == ["train.pp=2"]


class Machine:
    """Seconds of phases as functions of settings, and a log of what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, name, job, changes):
        self.asked.append(name)
        changed = dict(word.split("=") for word in changes)
        reshard = 2.0 if changed.get("reshard.window_mib") == "16" else 4.0
        seconds = {"rollout": 5.0, "reshard": reshard, "switch": 1.0}
        sizes = job.microbatch_tokens
        passes = [Pass(size, 1, 1, {"update_actor": 10.0 - size / 1000}) for size in sizes]
        rounds = [Round(8, 8, 4.0, 4.0, 4, dict(seconds), list(passes)) for _ in range(4)]
        return rounds, 0.0


def test_each_setting_is_searched_with_what_was_found_before_it():
    machine = Machine()
    settings = [
        Setting("reshard.window_mib", (32, 16), ("reshard",)),
        Setting("train.tokens_per_microbatch", (1000, 4000), ("update",)),
        Setting("rollout.kv_tokens", (100,), ("rollout",), "they fit"),
    ]
    found = tune(settings, machine, seconds=60, refused=())
    assert found.overrides == ["train.tokens_per_microbatch=4000", "reshard.window_mib=16"]
    assert machine.asked[0] == "passes"
    assert machine.asked[1:5] == [
        *("reshard.window_mib-32-0", "reshard.window_mib-16-0"),
        *("reshard.window_mib-16-1", "reshard.window_mib-32-1"),
    ]
    assert found.step_s == pytest.approx(5 + 4 + 1 + 9)
    assert found.tuned_step_s == pytest.approx(5 + 2 + 1 + 6)
    assert [s.key for s in found.untried] == ["rollout.kv_tokens"]


def test_files_that_would_overwrite_others_are_refused(tmp_path):
    config = tmp_path / "c.yaml"
    with pytest.raises(ValueError, match="would overwrite another file"):
        check_targets(str(config), config, tmp_path / "s.yaml")
    with pytest.raises(ValueError, match=r"--calibration .*: no folder"):
        check_targets(str(config), tmp_path / "o.yaml", tmp_path / "none" / "s.yaml")
    with pytest.raises(ValueError, match="is a folder; name a file"):
        check_targets(str(config), tmp_path, tmp_path / "s.yaml")
