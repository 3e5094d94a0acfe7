"""Well-known recipes of large models, and what moving their weights costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Sizes are GB = 1e9 bytes of bf16 weights; nodes of 8 ranks."""

    model: str
    ranks: int
    train: str
    rollout: str
    model_gb: float
    train_shard_gb: float
    engine_shard_gb: float
    full_gather_gb: float  # per rank
    moved_gb: float  # per rank
    crossing_gb: float  # bytes that cross nodes, per rank


RECIPES = {
    "deepseek-v3-128": Recipe(
        "deepseek-v3-671b",
        128,
        "tp=8,pp=4,last=13,cp=4,ep=32,etp=1",
        "tp=64,dp=8,ep=64,a2a=deepep",
        *(1342.1, 11.74, 33.07, 1330.3, 31.39, 22.37),
    ),
    "deepseek-v3-256": Recipe(
        "deepseek-v3-671b",
        256,
        "pp=16,first=3,last=2,ep=16",
        "tp=32",
        *(1342.1, 7.25, 43.93, 1334.8, 43.58, 40.78),
    ),
    "glm-4.5-64": Recipe(
        "glm-4.5-355b",
        64,
        "tp=8,pp=4,cp=2,ep=16,etp=1",
        "tp=32,dp=4,ep=32,a2a=deepep",
        *(705.6, 11.58, 30.00, 694.0, 28.59, 21.53),
    ),
    "qwen3-235b-64": Recipe(
        "qwen3-235b-a22b",
        64,
        "tp=4,pp=4,last=22,cp=2,ep=16,etp=1",
        "tp=32,dp=4,ep=32,a2a=deepep",
        *(470.2, 8.11, 16.38, 462.1, 16.00, 13.92),
    ),
    "kimi-k2-256": Recipe(
        "kimi-k2-1t",
        256,
        "tp=8,pp=8,last=5,cp=4,ep=32,etp=1",
        "tp=16,dp=8,ep=16",
        *(2052.8, 8.53, 137.7, 2044.3, 136.8, 125.2),
    ),
}
SLOW = ("deepseek-v3-256",)
"""Counting these by painting takes about half a minute."""
