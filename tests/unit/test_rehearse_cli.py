"""``rlhf rehearse`` before it starts anything: what it refuses, what it keeps, what it writes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from rlhf.cli import main
from rlhf.config.load import load_config
from rlhf.data.byte_tokenizer import write_byte_tokenizer
from rlhf.preflight import check, check_data
from rlhf.weights.find_model import find_model
from rlhf.weights.random_model import write_random_model
from tests.helpers.shapes import make_raw

ROOT = Path(__file__).parents[2]
LARGE = ROOT / "configs" / "grpo_600b.yaml"
RECIPES = [LARGE, *sorted((ROOT / "configs" / "recipes").glob("*.yaml"))]


def _refused(capsys, words: str) -> str:
    assert main(["rehearse", *shlex.split(words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("train.ep=24", ["train: world=128 must be a multiple of etp*ep*pp=96", "smaller etp, ep"]),
        (
            "train.ep=64",
            ["train: world=128 must be a multiple of etp*ep*pp=256", "smaller etp, ep"],
        ),
        ("train.last=14", ["train.first, train.last: 47 of the model's 61 layers are left for 3"]),
        ("train.vpp=2", ["train.vpp=2 must divide the layers of every stage"]),
        ("train.pp=64 train.last=null", ["train: world=128 must be a multiple of tp*pp*cp=2048"]),
        ("rollout.ep=24", ["rollout.ep=24 must divide rollout.tp=64"]),
        ("rollout.dp=3", ["rollout.dp=3 must divide rollout.tp=64"]),
        ("train.sequence_parallel=false", ["train.sequence_parallel: must be true for a model"]),
        ("batch.updates_per_step=3", ["batch.updates_per_step: 3 must divide"]),
        ("train.tokens_per_microbatch=1024", ["train.tokens_per_microbatch: 1024 must hold"]),
        ("train.last=14 batch.updates_per_step=3", ["train.first, train.last", "updates_per_step"]),
    ],
)
def test_a_planted_fault_is_found_at_full_size_by_its_key(capsys, changed, said):
    text = _refused(capsys, f"{LARGE} {changed} --ranks 4")
    assert text.startswith(f"{LARGE}:")
    for part in said:
        assert part in text


def test_experts_that_do_not_divide_are_found(capsys):
    glm = ROOT / "configs" / "recipes" / "glm_4_5_64.yaml"
    text = _refused(capsys, f"{glm} train.pp=2 train.ep=64 --gpus 128")
    assert text.startswith(f"{glm}:train.ep: 64 must divide the model's experts 160; set it to one")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rehearsal_passes_the_checks_of_a_run(capsys, tmp_path, path, ranks):
    """And keeps every kind of thing that its layouts and its model have."""
    if ranks > load_config(path).dist.ranks:
        assert "must be at most the 1 ranks" in _refused(capsys, f"{path} --ranks {ranks}")
        return
    gpu = "--gpu-mem-gb 24" if "smollm2" in path.stem else ""
    words = f"rehearse {path} --ranks {ranks} --keep {tmp_path / 'kept'} --dry-run {gpu}"
    assert main(shlex.split(words)) == 0
    assert "layouts, batch and lengths hold" in capsys.readouterr().out
    config = load_config(tmp_path / "kept" / "rehearsal.yaml")
    shape = check(config, ranks, "rehearsal")
    check_data(config)
    own = load_config(path)
    assert config.memory.optimizer == own.memory.optimizer
    for name in ("dtype", "fp32_head"):
        assert getattr(config.model, name) == getattr(own.model, name)
    assert config.train.recompute == own.train.recompute
    assert config.algorithm.kl == own.algorithm.kl
    assert (config.critic is None) == (own.critic is None)
    full = find_model(own.model.path)
    for name in ("family", "tied_embeddings", "qkv_bias", "qk_norm", "norm_eps", "rope_scaling"):
        assert getattr(shape, name) == getattr(full, name)
    assert (shape.num_kv_heads < shape.num_heads) == (full.num_kv_heads < full.num_heads)
    for part in ("moe", "mla"):
        mine, theirs = getattr(shape, part), getattr(full, part)
        assert (mine is None) == (theirs is None)
    if shape.moe is not None:
        assert shape.moe.num_experts > shape.moe.num_experts_per_token
        for name in ("num_shared_experts", "first_dense", "scoring", "expert_bias"):
            assert bool(getattr(shape.moe, name)) == bool(getattr(full.moe, name)), name
        assert (shape.moe.num_groups > 1) == (full.moe.num_groups > 1)
    if shape.mla is not None:
        assert (shape.mla.q_lora_rank is None) == (full.mla.q_lora_rank is None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nothing.yaml", "nothing.yaml: no such file"),
        (f"{LARGE} --ranks 0", "--ranks: must be at least 1, is 0"),
        (f"{LARGE} --ranks 256", "--ranks: must be at most the 128 ranks of the job"),
        (f"{LARGE} --keep {ROOT}", f"--keep: {ROOT} must be a new or empty folder"),
        (f"{LARGE} --keep /dev/null/x", "--keep: /dev/null/x cannot be made"),
        (f"{LARGE} --gpus 0", "--gpus: must be at least 1, is 0"),
        (f"{LARGE} --gpus-per-node 0", "--gpus-per-node: must be at least 1, is 0"),
        (f"{LARGE} --gpu-mem-gb nan", "--gpu-mem-gb: must be above 0 and below 1e+09 GB, is nan"),
        (f"{LARGE} --loop nothing.py:train", "--loop nothing.py:train: no file"),
        (f"{LARGE} train=auto", "train: auto: a rehearsal needs the layout that is to be made"),
        (f"{LARGE} --ranks 3", "give one of 1, 2, 4, 8, 16, 32, 64, 128"),
        (f"{LARGE} model.path=deepseek", "model.path: model 'deepseek' is no folder"),
    ],
)
def test_wrong_use_is_refused_with_what_to_do(capsys, words, said):
    assert said in _refused(capsys, words)


def test_one_rank_is_too_few_and_the_message_says_which_axis_needs_how_many(capsys):
    text = _refused(capsys, f"{LARGE} --ranks 1")
    assert "--ranks: must be at least 2, is 1" in text
    assert "2 ranks keep train.pp, rollout.tp, rollout.ep, rollout.dp; 4 ranks keep" in text
    assert text.rstrip().endswith("8 keep all")


@pytest.fixture
def own(tmp_path):
    """A user's folders, all of them: actor, critic, reward model; PPO on four ranks."""
    for name, head in (("actor", False), ("critic", False), ("judge", True)):
        raw = make_raw("qwen3", head_dim=4, vocab_size=320)
        write_random_model(tmp_path / name, raw, "bfloat16", seed=1, head=head)
        write_byte_tokenizer(tmp_path / name)
    config = {
        "run_dir": str(tmp_path / "run"),
        "num_steps": 100,
        "model": {"path": str(tmp_path / "actor")},
        "dist": {"ranks": 4},
        "train": {"tp": 2, "pp": 2, "sequence_parallel": True, "tokens_per_microbatch": 64},
        "rollout": {"tp": 2, "sampling": {"max_new_tokens": 16}},
        "data": {
            "train": [{"type": "jsonl", "name": "sums", "path": str(tmp_path / "absent.jsonl")}],
            "max_prompt_tokens": 16,
        },
        "algorithm": {"name": "ppo", "kl": {"place": "reward", "coef": 0.01}},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 1, "updates_per_step": 4},
        "optimizer": {"lr": 1e-5, "warmup_steps": 20, "decay": "cosine"},
        "critic": {"path": str(tmp_path / "critic"), "optimizer": {"lr": 1e-5}, "warmup_steps": 9},
        "reward_model": {"path": str(tmp_path / "judge")},
    }
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def test_all_roles_of_a_user_are_made_small_and_pass_the_checks(capsys, tmp_path, own):
    kept = tmp_path / "kept"
    assert main(["rehearse", str(own), "--ranks", "2", "--keep", str(kept), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "has no weights here" not in out
    assert "comes with none" not in out
    config = load_config(kept / "rehearsal.yaml")
    assert config.critic.path == str(kept / "critic")
    assert config.reward_model.path == str(kept / "reward_model")
    assert (config.critic.warmup_steps, config.optimizer.warmup_steps) == (1, 1)
    check(config, 2, "rehearsal")
    check_data(config)


def test_folders_are_looked_at_before_anything_is_made_small(capsys, tmp_path, own):
    raw = make_raw("qwen3", head_dim=4, vocab_size=384)
    write_random_model(tmp_path / "critic", raw, "bfloat16", seed=1)
    facts = tmp_path / "actor" / "config.json"
    facts.write_text(facts.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 6'))
    text = _refused(capsys, f"{own} --ranks 2")
    assert f"{own}:model.path: {tmp_path / 'actor'}: model.layers.4." in text
    assert f"{own}:critic.path: {tmp_path / 'critic'} has a vocabulary of 384, the actor" in text
    text = _refused(capsys, f"{own} reward_model.path={tmp_path / 'critic'} --ranks 2")
    assert "reward_model.path: " in text
    assert "must be a sequence classifier" in text
