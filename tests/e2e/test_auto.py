"""Layouts that the solver picks are layouts that run."""

import pytest
import yaml

from tests.helpers.runs import read_metrics, rlhf, tiny_config


@pytest.mark.slow
def test_the_layouts_chosen_for_four_ranks_and_a_model_with_experts_train(tmp_path):
    path = tiny_config(
        tmp_path,
        "qwen3_moe",
        num_steps=2,
        dist={"ranks": 4},
        algorithm={"skip_zero_signal": False},
    )
    raw = yaml.safe_load(path.read_text())
    raw["train"] = {"auto": True, "tokens_per_microbatch": 64}
    raw["rollout"]["auto"] = True
    path.write_text(yaml.safe_dump(raw))
    status, _, err = rlhf("train", str(path))
    assert status == 0, err
    assert err.count("layouts chosen, ") == 1
    steps = [line for line in read_metrics(tmp_path / "run") if "reward/mean" in line]
    assert [line["step"] for line in steps] == [0, 1]
    assert all(0 <= line["gap/mean_abs"] <= 1e-5 for line in steps)
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert not written["train"]["auto"] and not written["rollout"]["auto"]
    for section in ("train", "rollout"):
        for key in ("tp", "pp", "ep", "dp"):
            if written[section].get(key, 1) > 1:
                assert f"{section}.{key}={written[section][key]}" in err
