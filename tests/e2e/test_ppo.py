"""Whole PPO runs: with a reward model, resumed bit for bit, and the example as it stands."""

import shutil
import subprocess
import sys

import pytest

from rlhf.bench.copy_task import build
from tests.e2e.test_runs import numbers
from tests.helpers.runs import ROOT, clean_environment, read_metrics, rlhf, tiny_config
from tests.helpers.tiny_models import make_tiny_classifier


def ppo_config(folder, **sections):
    make_tiny_classifier(folder / "reward_model", "qwen3", seed=3)
    return tiny_config(
        folder,
        num_steps=4,
        train={"pp": 1, "tp": 2, "sequence_parallel": True},
        batch={"updates_per_step": 2},
        algorithm={"name": "ppo", "gae": {"bootstrap_truncated": True}},
        critic={"optimizer": {"lr": 1e-3}, "head_std": 0.02, "warmup_steps": 1},
        reward_model={"path": str(folder / "reward_model"), "weight": 0.1},
        checkpoint={"every": 2},
        **sections,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    config = ppo_config(folder)
    status, _, err = rlhf("train", str(config))
    assert status == 0, err
    return folder


def steps_of(run):
    return [line for line in read_metrics(run) if "reward/mean" in line]


def test_every_step_values_scores_and_learns(whole):
    steps = steps_of(whole / "run")
    assert len(steps) == 4
    for line in steps:
        assert line["gap/mean_abs"] <= 1e-5
        assert line["critic/grad_norm"] > 0
        assert "critic/explained_variance" in line
        assert line["critic/value"] + line["critic/advantage"] == pytest.approx(
            line["critic/return"], abs=1e-6
        )
        assert {f"seconds/score_{role}" for role in ("critic", "reward_model")} <= line.keys()
    assert [line["step"] for line in steps if "optim/grad_norm" in line] == [1, 2, 3]


def test_a_run_resumed_from_a_checkpoint_repeats_the_whole_one(whole, tmp_path):
    """Actor, critic, both optimizers: metrics of the last two steps equal bit for bit."""
    config = ppo_config(tmp_path)
    saved = "run/checkpoints/step_00000002"
    assert (whole / saved / "critic").is_dir()
    shutil.copytree(whole / saved, tmp_path / saved)
    status, _, err = rlhf("train", str(config))
    assert status == 0, err
    again = [n for n in numbers(tmp_path / "run") if "reward/mean" in n]
    assert again == [n for n in numbers(whole / "run") if n.get("step") in (2, 3)]


def test_a_checkpoint_without_a_critic_is_refused_by_name(whole, tmp_path):
    config = ppo_config(tmp_path)
    saved = "run/checkpoints/step_00000002"
    shutil.copytree(whole / saved, tmp_path / saved)
    shutil.rmtree(tmp_path / saved / "critic")
    status, _, err = rlhf("train", str(config))
    assert status not in (0, 75)
    assert "has no critic" in err
    assert "give another run_dir" in err


def test_the_example_runs(tmp_path):
    model = build(tmp_path / "model")
    overrides = (
        f"model.path={model}",
        f"critic.path={model}/judge",
        f"data.train.0.path={model}/train.jsonl",
    )
    run = (f"run_dir={tmp_path}/run", "num_steps=2", "critic.warmup_steps=1")
    status, _, err = rlhf("train", "configs/ppo_copy.yaml", *overrides, *run)
    assert status == 0, err
    first, second = steps_of(tmp_path / "run")
    assert 0 < first["reward/solved"] < 0.3, "half learned, on purpose"
    assert {"critic/explained_variance", "optim/grad_norm"} <= second.keys()


@pytest.mark.slow
def test_grpo_and_ppo_learn_the_copy_task():
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.bench.learn_copy"],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
