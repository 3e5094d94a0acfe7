"""A model with experts and latent attention through the whole loop, experts over ranks."""

import json

import torch
from safetensors.torch import load_file

from tests.helpers.runs import read_metrics, rlhf, tiny_config


def test_a_deepseek_model_trains_over_ep_and_is_exported(tmp_path):
    """EP2 training, one engine of EP2 and DP-attention 2; the trainer's and the engine's
    log-probabilities agree after each reshard."""
    config = tiny_config(
        tmp_path,
        "deepseek_v3",
        num_steps=2,
        train={"pp": 1, "ep": 2},
        rollout={"tp": 2, "ep": 2, "dp": 2, "routes": True},
        algorithm={"skip_zero_signal": False},
        checkpoint={"export_hf": True},
    )
    facts = tmp_path / "model" / "config.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"num_nextn_predict_layers": 1}))
    status, _, err = rlhf("train", str(config))
    assert status == 0, err
    assert err.count("num_nextn_predict_layers=1: layers for multi-token prediction") == 1
    steps = [line for line in read_metrics(tmp_path / "run") if "reward/mean" in line]
    assert [line["step"] for line in steps] == [0, 1]
    assert all(0 <= line["gap/mean_abs"] <= 1e-5 for line in steps)
    assert all(line["optim/grad_norm"] > 0 for line in steps)
    # Every group is trained, so engine and trainer send the same tokens to the same experts.
    assert all(line["experts/distance"] <= 0.01 for line in steps)
    assert all(line["experts/rollout_max_over_mean"] > 1.1 for line in steps)

    before = load_file(tmp_path / "model" / "model.safetensors")
    after = {}
    for file in (tmp_path / "run" / "hf").glob("*.safetensors"):
        after |= load_file(file)
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {
        n: (t.shape, t.dtype) for n, t in before.items()
    }
    for part in ("experts.7.up_proj", "kv_a_proj_with_mqa", "shared_experts.down_proj"):
        name = f"model.layers.3.{'self_attn' if 'kv_a' in part else 'mlp'}.{part}.weight"
        assert not torch.equal(before[name], after[name]), name
    exported = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert exported["num_nextn_predict_layers"] == 0
