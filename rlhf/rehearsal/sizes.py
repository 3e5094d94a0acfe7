"""Sizes of a job beside those of its rehearsal."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rlhf.config.schema import Config
from rlhf.weights.model_shape import ModelShape

MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)
EXPERTS = (
    "num_experts",
    "num_experts_per_token",
    "ffn_size",
    "num_shared_experts",
    "first_dense",
    "num_groups",
    "topk_groups",
)
KEYS = (
    "num_steps",
    "train.vpp",
    "train.first",
    "train.last",
    "train.tokens_per_microbatch",
    "train.logprob_chunk_tokens",
    "rollout.max_running_requests",
    "rollout.kv_tokens",
    "rollout.sampling.max_new_tokens",
    "data.max_prompt_tokens",
    "batch.prompts_per_step",
    "batch.samples_per_prompt",
    "batch.updates_per_step",
    "reshard.window_mib",
    "reshard.verify_every",
    "memory.stream_mib",
    "checkpoint.every",
    "algorithm.skip_zero_signal",
)


def size_rows(
    config: Config, small: Config, shape: ModelShape, small_shape: ModelShape
) -> list[tuple[str, Any, Any, str]]:
    """Those that differ: name, configured, rehearsed, remark."""
    rows = [(name, getattr(shape, name), getattr(small_shape, name)) for name in MODEL]
    for part, names in (("moe", EXPERTS), ("mla", None)):
        full, less = getattr(shape, part), getattr(small_shape, part)
        if full is None:
            continue
        rows += [
            (f"{part} {name}", getattr(full, name), getattr(less, name))
            for name in names or [field.name for field in fields(full)]
        ]
    rows += [(key, _value(config, key), _value(small, key)) for key in KEYS]
    return [(name, _word(a), _word(b), "") for name, a, b in rows if a != b]


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _word(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
