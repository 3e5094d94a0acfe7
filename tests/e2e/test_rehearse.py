"""Whole rehearsals of recipes, as a user starts them."""

from __future__ import annotations

from tests.helpers.runs import ROOT, read_metrics, rlhf


def test_671b_on_128_gpus_runs_on_four_ranks(tmp_path):
    """Pipeline with a shorter last stage, tensor and expert parallel training, two engines with
    DP-attention and experts over their ranks; all the lines of a real run."""
    kept = tmp_path / "kept"
    status, out, err = rlhf(
        "rehearse", "configs/grpo_600b.yaml", "--ranks", "4", "--keep", str(kept)
    )
    assert status == 0, out + err
    steps = [row for row in read_metrics(kept / "run") if "reward/mean" in row]
    assert len(steps) == 2
    assert all(row["optim/grad_norm"] > 0 and row["reshard/verify_s"] > 0 for row in steps)
    for line in (
        "train.pp                               4           2",
        "train.cp                               4           1  not kept",
        "rollout.a2a: deepep -> none: not supported yet",
        "ran      2 steps",
        "reshard  3 times, what engines hold has the checksums of what was sent",
        "saved    step 1, step 2; exported as a Hugging Face folder",
        "the rehearsal ran on 4 ranks",
    ):
        assert line in out, line
    assert (ROOT / "configs" / "grpo_600b.yaml").is_file()
