"""Runs whose roles have memory in their own phases only: the numbers are those of any other run."""

import re

import pytest

from tests.e2e.test_runs import numbers
from tests.helpers.runs import read_metrics, rlhf, tiny_config

GRPO = {"kl": {"place": "loss", "coef": 0.05}}
CRITIC = {"optimizer": {"lr": 1e-3}, "head_std": 0.02}
CASES = {
    "grpo float32": {"algorithm": GRPO},
    "grpo bfloat16": {"algorithm": GRPO, "model": {"dtype": "bfloat16"}},
    "ppo float32": {"algorithm": {"name": "ppo"}, "critic": CRITIC, "train": {"pp": 1}},
    "ppo bfloat16": {
        "algorithm": {"name": "ppo", "kl": {"place": "loss", "coef": 0.05}},
        "critic": CRITIC,
        "train": {"pp": 1, "tp": 2, "sequence_parallel": True},
        "model": {"dtype": "bfloat16"},
    },
}
QUICK = "grpo float32"


def _run(folder, time_slice, until, **sections):
    """Up to each step of ``until``, each time by the same command."""
    for num_steps in until:
        config = tiny_config(
            folder,
            num_steps=num_steps,
            batch={"updates_per_step": 2},
            checkpoint={"every": 2},
            memory={"time_slice": time_slice},
            **sections,
        )
        status, _, err = rlhf("train", str(config))
        assert status == 0, err
    return folder / "run"


@pytest.mark.parametrize(
    "name",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_metrics_do_not_depend_on_who_has_memory_when(name, tmp_path):
    """Bit by bit, and so do those of a run that goes on from a checkpoint."""
    kept = _run(tmp_path / "engine", "engine", [3], **CASES[name])
    sliced = _run(tmp_path / "all", "all", [2, 3], **CASES[name])
    assert numbers(sliced) == numbers(kept)
    line = next(line for line in read_metrics(sliced) if line.get("step") == 1)
    roles = {"actor", *(["critic"] if "critic" in CASES[name] else [])}
    for role in roles:
        assert line[f"memory/score_{role}_gib"] > 0
        assert not any(key.startswith("memory/over/") for key in line)
    assert line["memory/rollout_gib"] < line["memory/update_actor_gib"]
    text = (sliced / "memory.txt").read_text(encoding="utf-8")
    rollout = text[text.index("ROLLOUT") :].partition("process")[0]
    assert not re.search(r"actor weights|reference|critic weights", rollout)
