"""From scores to one credit per trajectory, and from credits to one advantage per token."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

SAME_SCORE = 1e-9
"""Scores of a group that differ by less than this share of the largest count as equal."""


def group_credits(
    scores: Sequence[float], groups: Sequence[Hashable], *, normalize_by_std: bool, eps: float
) -> list[float]:
    """GRPO's group-relative credit: (score - mean) / (std + eps), statistics per group.

    std is the sample standard deviation (n - 1). Groups may differ in size and be in any order. A
    group of one, or of equal scores, gets exactly zero.

    Source: arXiv:2402.03300, section 4.1.2; without the division arXiv:2503.20783, section 3.2.

    Args:
        scores: [N], one per trajectory.
        groups: [N], equal for the answers to one prompt.

    Raises:
        ValueError: a score is not finite.
    """
    members: dict[Hashable, list[int]] = {}
    for i, (group, score) in enumerate(zip(groups, scores, strict=True)):
        if not math.isfinite(score):
            raise ValueError(f"score {i} of group {group!r} must be finite, is {score}")
        members.setdefault(group, []).append(i)
    credits = [0.0] * len(scores)
    for indices in members.values():
        values = [scores[i] for i in indices]
        if max(values) - min(values) <= SAME_SCORE * max(1.0, *map(abs, values)):
            continue
        mean = math.fsum(values) / len(values)
        variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
        scale = math.sqrt(variance) + eps if normalize_by_std else 1.0
        for i in indices:
            credits[i] = (scores[i] - mean) / scale
    return credits


def kl_to_go(kl: Tensor, positions: Tensor) -> Tensor:
    """Sum of ``kl`` from each token to the end of its sequence.

    With the KL divergence in the reward, token t's advantage is its credit minus the coefficient
    times this: a token answers for what it and its successors do.

    Args:
        kl: [T], zero at tokens that are not trained.
        positions: [T] int64, zero exactly where a sequence starts.

    Returns:
        [T] float32.
    """
    if not len(kl):
        return kl.float()
    # float64: differences of sums over the whole stream would lose the small ones
    after = kl.double().flip(0).cumsum(0).flip(0)
    starts = (positions == 0).nonzero().squeeze(1)
    sequence = (positions == 0).cumsum(0) - 1
    beyond = torch.cat([after[starts[1:]], after.new_zeros(1)])
    return (after - beyond[sequence]).float()
