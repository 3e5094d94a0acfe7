"""A tiny tuning ends with a configuration that runs and a calibration that the plan reads."""

from __future__ import annotations

import json

from rlhf.config.load import load_config
from rlhf.planner.speeds import read_speeds
from tests.helpers.runs import rlhf, tiny_config


def test_tuning_writes_a_configuration_and_constants_for_the_plan(tmp_path):
    config = tiny_config(tmp_path, num_steps=2)
    out, speeds = tmp_path / "tuned.yaml", tmp_path / "speeds.yaml"
    words = ["--minutes", "0.1", "--out", str(out), "--calibration", str(speeds), "--json"]
    status, said, err = rlhf("tune", str(config), *words)
    assert status == 0, err
    report = json.loads(said)
    tried = report["settings"]["train.tokens_per_microbatch"]
    assert tried["current"] == 64
    assert len(tried["tried"]) > 2
    assert all(c["num_rounds"] >= 2 for c in tried["tried"])
    assert set(report["untried"]) == {
        *("reshard.window_mib", "rollout.max_running_requests", "rollout.kv_tokens")
    }
    tuned = load_config(out)
    assert tuned.train.tokens_per_microbatch == tried["kept"]
    assert tuned.track.calibration == str(speeds)
    assert tuned.run_dir == str(tmp_path / "run"), "the run's own folder, not that of a slice"
    assert not (tmp_path / "run").exists()
    assert read_speeds(speeds).device.startswith("CPU")
    assert {"rollout", "reshard", "switch", "save"} <= set(report["measured_s"])
    status, text, err = rlhf("plan", str(out), "--calibration", str(speeds), "--json")
    assert status in (0, 1), err
    assert json.loads(text)


def test_wrong_use_is_refused_before_anything_runs(tmp_path):
    config = tiny_config(tmp_path)
    status, _, err = rlhf("tune", str(config), "--minutes", "0")
    assert (status, err.strip()) == (2, "--minutes: must be at least 0.1, is 0")
    status, _, err = rlhf("tune", str(config), "--out", str(config))
    assert status == 2
    assert "would overwrite another file of this command" in err


def test_a_slice_that_fails_is_told_with_its_last_words(tmp_path):
    config = tiny_config(tmp_path)
    (tmp_path / "reward.py").write_text("def share_of_letters(*_):\n    raise KeyError('broken')\n")
    words = [f"--out={tmp_path / 'o.yaml'}", f"--calibration={tmp_path / 's.yaml'}"]
    status, _, err = rlhf("tune", str(config), *words)
    assert status == 1
    assert f"a slice of {config} with its own settings ended with status" in err
    assert "broken" in err
    assert not (tmp_path / "o.yaml").exists()
