"""Whole rehearsals, as a user starts them: recipes, and data and rewards of one's own."""

from __future__ import annotations

import json

from rlhf.config.load import load_config
from tests.helpers.runs import read_metrics, rlhf, tiny_config


def _steps(kept):
    return [row for row in read_metrics(kept / "run") if "reward/mean" in row]


def test_671b_on_128_gpus_runs_on_four_ranks(tmp_path):
    """Pipeline with a shorter last stage, tensor and expert parallel training, two engines with
    DP-attention and experts over their ranks; all the lines of a real run."""
    kept = tmp_path / "kept"
    status, out, err = rlhf(
        "rehearse", "configs/grpo_600b.yaml", "--ranks", "4", "--keep", str(kept)
    )
    assert status == 0, out + err
    steps = _steps(kept)
    assert len(steps) == 2
    assert all(row["optim/grad_norm"] > 0 and row["reshard/verify_s"] > 0 for row in steps)
    config = load_config(kept / "rehearsal.yaml")
    assert (config.memory.time_slice, config.memory.optimizer) == ("all", "host")
    for line in (
        "train.pp                               4           2",
        "train.cp                               4           1  not kept",
        "rollout.a2a: deepep -> none: not supported yet",
        "ran        2 steps",
        "reshard    3 times, what engines hold has the checksums of what was sent",
        "saved      step 1, step 2; exported as a Hugging Face folder",
        "the rehearsal ran on 4 ranks",
    ):
        assert line in out, line


def test_ppo_of_a_dense_model_runs_on_two_ranks_and_goes_on(tmp_path):
    """Critic and its warm-up; biases of queries and keys; saved, loaded, one more step; a loop of
    one's own."""
    kept, loop = tmp_path / "kept", tmp_path / "loop.py"
    loop.write_text(
        "from pathlib import Path\n"
        "from rlhf.loop import train as usual\n"
        "def train(run):\n"
        "    usual(run)\n"
        f"    Path({str(tmp_path)!r}, f'step{{run.first_step}}').touch()\n",
        encoding="utf-8",
    )
    own = ("--ranks", "2", "--resume", "--loop", f"{loop}:train", "--keep", str(kept))
    status, out, err = rlhf("rehearse", "configs/recipes/qwen2_5_7b_8_ppo.yaml", *own)
    assert status == 0, out + err
    steps = _steps(kept)
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert all(row["critic/grad_norm"] > 0 for row in steps)
    assert ["optim/grad_norm" in row for row in steps] == [False, True, True], "warm-up of one step"
    assert (tmp_path / "step0").exists()
    assert (tmp_path / "step2").exists()
    assert "resumed    from the checkpoint of step 2: one more step" in out


def test_own_rows_reward_and_tokenizer_are_used_and_what_fails_is_told(tmp_path):
    """The reward raises; the run says so by its file, and the rehearsal fails."""
    config = tiny_config(tmp_path, num_steps=50)
    (tmp_path / "reward.py").write_text(
        "def share_of_letters(prompt, text, trajectory):\n"
        "    raise KeyError('no such unit: ' + prompt.answer)\n",
        encoding="utf-8",
    )
    kept = tmp_path / "kept"
    status, out, err = rlhf("rehearse", str(config), "--ranks", "2", "--keep", str(kept))
    assert status == 1, out + err
    assert f"reward {tmp_path / 'reward.py'}:share_of_letters raised on prompt copy/" in err
    assert "no such unit: " in err
    assert "the rehearsal failed after" in out
    assert f"kept       {kept}" in out
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    few = (kept / "train.0.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(few) == 16
    assert {json.loads(row)["prompt"] for row in few} <= {json.loads(r)["prompt"] for r in lines}
    tokenizer = (tmp_path / "model" / "tokenizer.json").read_bytes()
    assert (kept / "actor" / "tokenizer.json").read_bytes() == tokenizer
