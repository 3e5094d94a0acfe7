"""Impossible combinations are refused by name before anything starts; possible ones are not."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from rlhf.bench.copy_task import write_data
from rlhf.config.check import ENGINE_RESERVED_TOKENS, check_config
from rlhf.config.faults import ConfigError
from rlhf.config.load import load_config, load_text
from rlhf.config.schema import Config
from rlhf.config.yaml_text import dump_yaml, parse_yaml
from rlhf.rollout.engine import RESERVED_TOKENS
from rlhf.weights.model_shape import ModelShape, MoEShape

CONFIGS = [
    path
    for path in sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    if path.stem != "grpo_600b"  # no change of one key makes it small
]

SMALL = """
run_dir: runs/small
num_steps: 4
model: {path: models/small, dtype: float32}
rollout:
  sampling: {max_new_tokens: 8, stop: ["\\n"]}
  kv_tokens: 4096
data:
  train:
    - {type: reasoning_gym, name: sums, task: chain_sum, params: {min_terms: 2}, held_out: 8}
  eval:
    - {type: reasoning_gym, name: sums, task: chain_sum, params: {min_terms: 2}, held_out: 8,
       split: held_out}
  max_prompt_tokens: 64
algorithm: {kl: {place: loss, coef: 1e-3}}
batch: {prompts_per_step: 4, samples_per_prompt: 4, updates_per_step: 2}
optimizer: {lr: 1e-6, warmup_steps: 1}
eval: {every: 2}
"""


def shape(**changes: Any) -> ModelShape:
    facts: dict[str, Any] = {
        "family": "llama",
        "num_layers": 30,
        "hidden_size": 576,
        "ffn_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position": 8192,
        "tied_embeddings": True,
        "qkv_bias": False,
        "qk_norm": False,
        "norm_eps": 1e-5,
        "rope_theta": 1e5,
        "rope_scaling": None,
        "rotary_dim": 64,
        "eos_token_ids": (2,),
    }
    return ModelShape(**{**facts, **changes})


def check(*overrides: str, world: int = 2, **changes: Any) -> None:
    config = load_text(Config, SMALL, "small.yaml", overrides)
    check_config(config, shape(**changes), world, "small.yaml")


def test_block_fp8_is_taken_where_all_blocks_are_whole():
    sizes = {"hidden_size": 512, "ffn_size": 1024, "num_heads": 8, "num_kv_heads": 2}
    sizes |= {"family": "qwen3", "qk_norm": True, "head_dim": 128}
    fp8 = ["rollout.quantization=block_fp8", "train.tp=2"]
    check(*fp8, "rollout.tp=2", **sizes)
    with pytest.raises(ConfigError, match=r"rollout\.tp: .*320"):
        check(*fp8, "rollout.tp=2", **{**sizes, "ffn_size": 640})


PPO = ("algorithm.name=ppo", "critic.optimizer.lr=1e-4")


@pytest.mark.parametrize("world", [1, 2, 8])
def test_the_plain_configuration_holds(world):
    check(world=world)


def test_ppo_needs_no_second_answer_to_a_prompt():
    check(*PPO, "batch.samples_per_prompt=1", "batch.updates_per_step=1", "critic.warmup_steps=2")


def test_context_parallelism_needs_nothing_of_heads_or_engines():
    check("train.cp=4", "train.tokens_per_microbatch=72", world=4)


@pytest.mark.parametrize(
    ("overrides", "world", "words"),
    [
        (["train.tp=2"], 2, ["train.tp: 2 must divide", "heads 9", "KV heads 3", "one of 1, 3"]),
        (["rollout.tp=2"], 2, ["rollout.tp: 2 must divide", "9", "one of 1, 3"]),
        (["train.pp=3"], 2, ["train: world=2 must be a multiple of tp*pp*cp=3"]),
        (["train.pp=2", "train.first=30"], 2, ["30 layers", "pp=2", "first=30"]),
        (["train.pp=2", "train.vpp=4"], 2, ["train.vpp=4 must divide"]),
        (["train.pp=31"], 31, ["train.pp: pp*vpp=31 must be at most the model's 30 layers"]),
        (
            ["train.pp=4", "train.first=1", "train.tp=1"],
            4,
            ["train.first, train.last: 29", "30 layers", "3 stages", "first=1", "one of 1, 3, 5,"],
        ),
        (["train.pp=4"], 4, ["train.first, train.last: 30", "4 stages", "last may be one of 3, 6"]),
        (["train.vpp=2"], 2, ["train.vpp: 2 chunks need train.pp > 1"]),
        (["train.first=2"], 2, ["train.first: needs train.pp > 1"]),
        (["train.sequence_parallel=true"], 2, ["train.sequence_parallel: needs train.tp > 1"]),
        (["train.cp=3"], 4, ["train: world=4 must be a multiple of tp*pp*cp=3"]),
        (["train.ep=2"], 2, ["train.ep: must be 1, is 2", "llama has no experts"]),
        (["train.etp=1"], 2, ["train.etp: must be left out, is 1"]),
        (["rollout.dp=3", "rollout.tp=3"], 3, ["rollout.dp: must be 1, is 3"]),
        (["rollout.ep=3", "rollout.tp=3"], 3, ["rollout.ep: must be 1, is 3"]),
        (["rollout.pp=2"], 2, ["rollout.pp: must be 1, is 2"]),
        (["rollout.a2a=deepep"], 2, ["rollout.a2a: must be none"]),
        (["rollout.quantization=block_fp8"], 2, ["rollout.quantization: must be none"]),
        (["memory.stream_mib=4"], 2, ["memory.stream_mib: 4 has no effect while memory.optimizer"]),
        (["rollout.routes=true"], 2, ["rollout.routes: must be false: llama has no routed"]),
        (["rollout.tp=3"], 4, ["rollout: world=4 must be a multiple of tp*pp=3"]),
        (["batch.updates_per_step=3"], 1, ["batch.updates_per_step: 3 must divide", "4*4=16"]),
        ([], 16, ["8 responses per update", "multiple of the 16 data-parallel ranks"]),
        (["batch.samples_per_prompt=1"], 1, ["batch.samples_per_prompt: must be at least 2, is 1"]),
        (["algorithm.kl={coef: 0.1}"], 1, ["algorithm.kl.coef: 0.1 has no effect"]),
        (["algorithm.kl={place: reward}"], 1, ["algorithm.kl.coef: must be given"]),
        (
            ["algorithm.fixed_length_tokens=9"],
            1,
            ["algorithm.fixed_length_tokens: 9 has no effect"],
        ),
        (["algorithm.gae.lam=0.9"], 1, ["algorithm.gae.lam: 0.9 has no effect", "name is grpo"]),
        (["critic.optimizer.lr=1"], 1, ["critic: has no effect while algorithm.name is grpo"]),
        (["algorithm.name=ppo"], 1, ["critic: must be given while algorithm.name is ppo"]),
        (
            [*PPO, "algorithm.skip_zero_signal=false"],
            1,
            ["algorithm.skip_zero_signal: False has no effect while algorithm.name is ppo"],
        ),
        ([*PPO, "critic.warmup_steps=4"], 1, ["critic.warmup_steps: 4 must be below num_steps=4"]),
        (
            [*PPO, "critic.warmup_steps=2", "optimizer.warmup_steps=4"],
            1,
            ["optimizer.warmup_steps: 4 must be below its 4 updates"],
        ),
        (
            [*PPO, "critic.optimizer.warmup_steps=8"],
            1,
            ["critic.optimizer.warmup_steps: 8 must be below its 8 updates"],
        ),
        (
            [*PPO, "critic.optimizer.min_lr=1"],
            1,
            ["critic.optimizer.min_lr: 1.0 must be at most critic.optimizer.lr=0.0001"],
        ),
        (["algorithm.dual_clip=1.1"], 1, ["algorithm.dual_clip: 1.1 must be above", "1.28"]),
        (["rollout.sampling.temperature=0"], 1, ["rollout.sampling.temperature: must be above 0"]),
        (["rollout.sampling.top_p=0.9"], 1, ["rollout.sampling.top_p: must be 1", "0.9"]),
        (
            ["rollout.sampling.top_k=0"],
            1,
            ["rollout.sampling.top_k: must be -1 (all tokens), is 0"],
        ),
        (["rollout.sampling.top_k=-2"], 1, ["rollout.sampling.top_k: must be -1", "is -2"]),
        (["rollout.sampling.top_k=5"], 1, ["rollout.sampling.top_k: must be -1", "5"]),
        (["rollout.sampling.max_new_tokens=8121"], 1, ["64 + 8121 + 8 = 8193", "8192 positions"]),
        (["eval.max_new_tokens=9000"], 1, ["eval.max_new_tokens: ", "9072", "8192"]),
        (["rollout.kv_tokens=79"], 1, ["rollout.kv_tokens: 79 must be at least", "80"]),
        (["train.tokens_per_microbatch=71"], 1, ["train.tokens_per_microbatch: 71", "72"]),
        (
            ["train.tokens_per_microbatch=79", "train.cp=5"],
            5,
            ["train.tokens_per_microbatch: 79", "72, padded to 80, a multiple of 10"],
        ),
        (["rollout.max_running_requests=7"], 2, ["rollout.max_running_requests: 7", "least 8"]),
        (["optimizer.min_lr=1"], 1, ["optimizer.min_lr: 1.0 must be at most optimizer.lr=1e-06"]),
        (["optimizer.min_lr=1e-7"], 1, ["optimizer.min_lr: 1e-07 has no effect"]),
        (["optimizer.warmup_steps=8"], 1, ["optimizer.warmup_steps: 8 must be below", "8 updates"]),
        (["data.eval=[]"], 1, ["eval.every: 2 needs data.eval"]),
        (["data.eval.0.held_out=4"], 1, ["data.eval.0.held_out: 4 must equal", "held_out=8"]),
        (["data.train.0.split=held_out"], 1, ["data.train.0.split: must be train here"]),
        (["data.train.0.size=8"], 1, ["data.train.0.held_out: 8 must be below size=8"]),
        (
            ["data.train=[{type: jsonl, name: a, path: none.jsonl}]"],
            1,
            ["data.train.0.path: no such file: none.jsonl"],
        ),
        ([f"run_dir={__file__}/x"], 1, [f"run_dir: {__file__} must be a folder that this"]),
        ([f"run_dir={'x' * 300}"], 1, ["run_dir: ", "name too long"]),
        (["run_dir=/proc/x"], 1, ["run_dir: /proc must be a folder that this user can write to"]),
        (
            ["reshard.window_mib=100000000"],
            1,
            ["window_mib: two windows of 100000000 MiB", "195312 GiB", "less than 1024 GiB"],
        ),
        (
            ["rollout.kv_tokens=100000000000"],
            1,
            ["kv_tokens: the KV cache of 100000000000", "4291534 GiB", "less than 1024 GiB"],
        ),
    ],
)
def test_impossible_combinations_are_refused_by_name(overrides, world, words):
    with pytest.raises(ConfigError) as caught:
        check(*overrides, world=world)
    assert [f for f in caught.value.faults if all(w in f for w in words)], caught.value.faults
    assert all(f.startswith("small.yaml:") for f in caught.value.faults)


def test_an_engine_may_copy_kv_heads_but_not_cut_them_unevenly():
    sizes = {"num_heads": 12, "num_kv_heads": 4}
    for tp in (2, 4):
        check(f"rollout.tp={tp}", world=tp, **sizes)
    with pytest.raises(ConfigError, match=r"6 must divide .* its 4 KV heads .* one of 1, 2, 4, 12"):
        check("rollout.tp=6", world=6, **sizes)


def test_the_reserve_is_the_engines_own():
    assert ENGINE_RESERVED_TOKENS == RESERVED_TOKENS


def test_all_rules_speak_at_once():
    with pytest.raises(ConfigError) as caught:
        check("train.tp=2", "rollout.sampling.top_p=0.5", "algorithm.kl.coef=null")
    keys = [f.split(":")[1].split("=")[0] for f in caught.value.faults]
    assert keys == ["train.tp", "algorithm.kl.coef", "rollout.sampling.top_p"]


JUNK: list[Any] = [
    *(None, "", "x", "1e-6", "off", True, -1, 0, 1, 2, 3, 7, 10**12, 0.5, -0.5, 1e300, 1e-300),
    *(float("nan"), float("inf"), [], [1], ["x"], {}, {"x": 1}, [[]], "a" * 500, "é\u2028"),
]


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [p for k, v in items for p in [(*prefix, k), *paths(v, (*prefix, k))]]


def mutate(raw: dict[str, Any], rng: random.Random) -> str:
    """Change one place; returns the name of the key that changed."""
    path = rng.choice(paths(raw))
    parent: Any = raw
    for part in path[:-1]:
        parent = parent[part]
    name = next(str(p) for p in reversed(path) if isinstance(p, str))
    kind = rng.choice(["junk", "junk", "junk", "junk", "delete", "rename", "add"])
    if kind == "delete" and isinstance(parent, dict):
        del parent[path[-1]]
    elif kind == "rename" and isinstance(parent, dict):
        parent[path[-1] + "x"] = parent.pop(path[-1])
    elif kind == "add" and isinstance(parent, dict):
        parent["surprise"] = rng.choice(JUNK)
        return "surprise"
    else:
        parent[path[-1]] = rng.choice(JUNK)
    return name


@pytest.mark.parametrize("source", [*CONFIGS, "small"], ids=lambda s: getattr(s, "stem", s))
def test_mutations_are_valid_or_refused_with_the_key_named(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "models" / "copy")  # of the copy recipes
    text = SMALL if source == "small" else source.read_text(encoding="utf-8")
    rng = random.Random(0)
    stated, _ = parse_yaml(text)
    # every key of the schema can be hit, not only those that the recipe states
    full = load_text(Config, text, "x").model_dump(mode="json")
    outcomes = {"valid": 0, "refused": 0}
    file = tmp_path / "mutated.yaml"
    for _ in range(200):
        raw = copy.deepcopy(rng.choice([stated, full, full]))
        key = mutate(raw, rng)
        file.write_text(dump_yaml(raw), encoding="utf-8")
        try:
            config = load_config(file)
            check_config(config, shape(), config.dist.ranks or 2, str(file))
            outcomes["valid"] += 1
        except ConfigError as error:
            outcomes["refused"] += 1
            about_ranks = "train: world" in str(error) or "data-parallel" in str(error)
            assert key in str(error) or about_ranks, (key, error.faults)
            assert all(f.startswith((str(file), "override")) for f in error.faults)
    assert min(outcomes.values()) > 20, outcomes


def test_experts_over_tp_need_sequence_parallel():
    moe = MoEShape(8, 2, 64, 0, 0, "softmax", True, 1.0, 1, 1, False)
    facts = {"family": "qwen3_moe", "moe": moe, "num_heads": 8, "num_kv_heads": 4}
    check("train.tp=2", "train.sequence_parallel=true", world=2, **facts)
    with pytest.raises(ConfigError, match=r"train\.sequence_parallel: must be true .*tp is 2"):
        check("train.tp=2", world=2, **facts)
