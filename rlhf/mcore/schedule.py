"""The learning rate as a function of the update."""

from __future__ import annotations

import math

from rlhf.config.schema import OptimizerSection


def learning_rate(cfg: OptimizerSection, update: int, total_updates: int) -> float:
    """Learning rate of update 0, 1, ... ``total_updates - 1``.

    Rises linearly to ``lr``, which update ``warmup_steps`` is the first to have; then goes to
    ``min_lr``, which the last update has (linear, cosine), or stays (constant).
    """
    if update < cfg.warmup_steps:
        return cfg.lr * (update + 1) / (cfg.warmup_steps + 1)
    if cfg.decay == "constant":
        return cfg.lr
    span = max(1, total_updates - 1 - cfg.warmup_steps)
    done = min(1.0, (update - cfg.warmup_steps) / span)
    left = 1 - done if cfg.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left
