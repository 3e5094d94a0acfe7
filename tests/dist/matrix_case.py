"""Models and pairs of layouts of the matrix, and the movement of one pair between real shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.reshard.execute import Mover
from rlhf.reshard.schedule import rank_plans
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalHub
from rlhf.rollout.probe import write_config
from rlhf.weights.families import (
    check_rollout,
    check_train,
    full_pieces,
    reshard_spread,
    rollout_param_shapes,
    rollout_pieces,
    train_pieces,
)
from rlhf.weights.hf_checkpoint import load_pieces, write_tensors
from rlhf.weights.model_shape import ModelShape, load_model_shape, parse_model_shape
from tests.helpers.megatron_rank import as_rank, frozen_model
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.sglang_probe import Live
from tests.helpers.shapes import MODELS
from tests.helpers.shards import dtypes_of

AREA_BYTES = 1 << 14
"""Small enough that a movement has several rounds."""
SIZES = {  # 8 divides what is cut over tp but the vocabulary, and nothing is the same by chance
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": 16,
    "num_key_value_heads": 8,
    # SGLang asks for these
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
RAW = {
    name: {**SIZES, **MODELS[family], **settings}
    for name, family, settings in [
        ("llama", "llama", {}),
        ("qwen2", "qwen2", {}),
        ("qwen2 tied", "qwen2", {"tie_word_embeddings": True}),
        ("qwen3", "qwen3", {}),
        ("qwen3_moe", "qwen3_moe", {**EXPERTS, "num_experts": 16}),
        ("deepseek_v3", "deepseek_v3", DEEPSEEK),
        ("moonlight", "deepseek_v3", {**DEEPSEEK, "q_lora_rank": None, "n_group": 1}),
        ("glm4_moe", "glm4_moe", {**EXPERTS, "n_routed_experts": 16}),
    ]
}
DENSE = [
    (1, {}, {}),
    (2, {"tp": 2}, {"pp": 2}),
    (2, {"pp": 2, "first": 1}, {"tp": 2}),
    (3, {"pp": 3, "first": 1, "last": 1}, {}),
    (4, {"tp": 2, "pp": 2, "last": 1}, {"tp": 4}),
    (4, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2}),
    (4, {"tp": 2, "cp": 2}, {}),
    (4, {"tp": 4}, {"pp": 4}),
    (4, {"cp": 2}, {"tp": 4, "dp": 2}),
    (6, {"tp": 2, "pp": 3}, {"tp": 2, "pp": 3}),
    (8, {"tp": 2, "pp": 2, "cp": 2}, {"tp": 8}),
    (8, {"tp": 4, "pp": 2}, {"tp": 4}),
    (8, {"tp": 2, "pp": 2, "vpp": 2}, {"tp": 4, "pp": 2}),
    (8, {"tp": 2, "pp": 4}, {"tp": 8, "dp": 4}),
    (8, {"pp": 4}, {"tp": 2}),
    (7, {}, {}),
]
MIXED = [
    (1, {}, {}),
    (2, {"ep": 2}, {"tp": 2}),
    (2, {"tp": 2}, {"tp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 2}, {"tp": 4, "dp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 4, "etp": 1}, {"tp": 4, "ep": 4, "a2a": "deepep"}),
    (4, {"pp": 2, "ep": 2, "first": 1}, {"tp": 2, "pp": 2}),
    (4, {"pp": 2, "vpp": 2, "ep": 2}, {"tp": 4, "ep": 2}),
    (6, {"tp": 2, "pp": 3, "first": 1, "last": 1, "ep": 2, "etp": 1}, {"tp": 2}),
    (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {"tp": 8, "dp": 8, "ep": 8}),
    (8, {"tp": 2, "cp": 2, "ep": 4, "etp": 2}, {"tp": 4, "dp": 4, "ep": 4, "a2a": "deepep"}),
    (8, {"tp": 4, "pp": 2, "ep": 4, "etp": 1}, {"tp": 8}),
    (8, {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 2}, {"tp": 2, "ep": 2, "pp": 2}),
    (8, {"tp": 2, "pp": 4, "ep": 2, "etp": 1}, {"tp": 8, "dp": 2, "ep": 4}),
    (8, {"ep": 8}, {"tp": 4, "ep": 2, "redundant_experts": 4}),
    (8, {"tp": 2, "ep": 2, "etp": 4}, {"tp": 8, "ep": 8, "a2a": "deepep"}),
]


@dataclass(frozen=True)
class Pair:
    """A model between two layouts of the same ranks."""

    name: str
    model: str  # of RAW
    train: TrainLayout
    rollout: RolloutLayout

    def features(self) -> set[str]:
        """What is peculiar about the two layouts."""
        shape, train, rollout = parse_model_shape(RAW[self.model]), self.train, self.rollout
        kv_heads = shape.num_heads if shape.mla else shape.num_kv_heads
        found = {
            "TP": train.tp > 1,
            "PP": train.pp > 1,
            "uneven stages": train.first != train.last,
            "VPP": train.vpp > 1,
            "CP": train.cp > 1,
            "EP": train.ep > 1,
            "ETP above 1": train.etp is not None and train.etp > 1,
            "ETP 1": train.etp == 1 < train.tp,
            "engine TP": rollout.tp > 1,
            "DP-attention": rollout.dp > 1,
            "engine EP": rollout.ep > 1,
            "TP of experts": rollout.expert_tp > 1 and shape.moe is not None,
            "whole shared experts": rollout.a2a == "deepep",
            "engine PP": rollout.pp > 1,
            "copied KV heads": rollout.attention_tp > kv_heads,
            "redundant experts": rollout.redundant_experts > 0,
            "engines": rollout.num_engines > 1,
        }
        return {name for name, is_so in found.items() if is_so}


def pairs_of(model: str) -> list[Pair]:
    """What the model admits."""
    shape = parse_model_shape(RAW[model])
    out = []
    for world, train, rollout in MIXED if shape.moe else DENSE:
        name = f"{model} on {world}: {_words(train)} to {_words(rollout)}"
        pair = Pair(name, model, TrainLayout(world, **train), RolloutLayout(world, **rollout))
        try:
            check_train(shape, pair.train)
            check_rollout(shape, pair.rollout)
        except LayoutError:
            continue
        out.append(pair)
    return out


def _words(grid: Mapping[str, int | str]) -> str:
    return "-".join(f"{key}{value}" for key, value in grid.items()) or "one"


def write_model(folder: Path, model: str) -> None:
    """A checkpoint of random numbers: bfloat16, and float32 where families have it so."""
    folder.mkdir()
    write_config(folder, RAW[model])
    generator = torch.Generator().manual_seed(0)
    tensors = {
        piece.tensor: torch.randn([n for _, n in piece.region], generator=generator).to(
            getattr(torch, piece.dtype or "bfloat16")
        )
        for piece in full_pieces(load_model_shape(folder))
    }
    write_tensors(folder / "model.safetensors", tensors)


def moved(job: tuple[str, Pair]) -> list[dict[str, Live]]:
    """The engines' parameters by rank, out of Megatron's of all ranks; NaN where nothing came.

    To be called in a process with Megatron; the job has the model's folder.
    """
    folder, pair = job
    shape, ranks = load_model_shape(folder), range(pair.train.world)
    held = [_shard(folder, shape, pair.train, rank) for rank in ranks]
    plans = rank_plans(
        reshard_spread(shape, pair.train, pair.rollout),
        Topology.of(len(ranks), 2),
        itemsize=torch.bfloat16.itemsize,
        area_bytes=AREA_BYTES,
    )
    hub, targets = LocalHub(len(ranks)), [_empty(shape, pair.rollout, rank) for rank in ranks]
    movers = [
        Mover(plan, held[r], hub.transport(r), targets[r], dtype=torch.bfloat16)
        for r, plan in enumerate(plans)
    ]
    jobs: list[Callable[[], Any]] = [partial(mover.run, no_poll) for mover in movers]
    in_threads(jobs)
    return [{name: Live.of(tensor) for name, tensor in target.items()} for target in targets]


def _shard(folder: str, shape: ModelShape, layout: TrainLayout, rank: int) -> Mapping[str, Tensor]:
    with as_rank(layout, rank):
        params = frozen_model(folder, layout).params
        load_pieces(folder, train_pieces(shape, layout, rank), params)
    return params


def _empty(shape: ModelShape, layout: RolloutLayout, rank: int) -> dict[str, Tensor]:
    dtypes = dtypes_of(rollout_pieces(shape, layout, rank), torch.bfloat16)
    return {
        name: torch.full(size, float("nan"), dtype=dtypes.get(name, torch.bfloat16))
        for name, size in rollout_param_shapes(shape, layout, rank).items()
    }
