"""How far the engine's log-probabilities are from the trainer's, for the same tokens and weights.

Sums add up over micro-batches and ranks; the histogram gives the quantile without gathering.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf.algorithms.losses import kl_estimate
from rlhf.track.metrics import Mean, Metric

SMALLEST, DECADES, BINS_PER_DECADE = 1e-9, 11, 20
NUM_BINS = DECADES * BINS_PER_DECADE + 2
"""Below SMALLEST, log-spaced bins up to 100, above."""


def gap_sums(rollout_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Partial sums over trained tokens, to be added over ranks.

    Args:
        rollout_logprobs, old_logprobs: [n] at trained tokens.

    Returns:
        [3 + NUM_BINS] float64: tokens, sum of |d|, sum of k3 (estimate of KL(engine || trainer)),
        histogram of |d|; d = old_logprobs - rollout_logprobs.
    """
    distance = (old_logprobs.double() - rollout_logprobs.double()).abs()
    place = (distance.clamp(min=1e-300) / SMALLEST).log10() * BINS_PER_DECADE
    bins = (place.floor() + 1).nan_to_num(NUM_BINS).clamp(0, NUM_BINS - 1).long()
    head = torch.stack(
        [
            distance.new_tensor(float(len(distance))),
            distance.sum(),
            kl_estimate(rollout_logprobs, old_logprobs, "k3").double().sum(),
        ]
    )
    return torch.cat([head, torch.bincount(bins, minlength=NUM_BINS).double()])


def gap_metrics(sums: Tensor) -> Mapping[str, Metric]:
    """gap/mean_abs, gap/p99 (upper edge of its bin, 12 % wide) and gap/k3 from summed sums."""
    num, total, k3 = (float(x) for x in sums[:3])
    if not num:
        return {}
    return {
        "gap/mean_abs": Mean(total / num, num),
        "gap/p99": Mean(quantile(sums[3:], 0.99), num),
        "gap/k3": Mean(k3 / num, num),
    }


def quantile(histogram: Tensor, share: float) -> float:
    """The upper edge of the bin in which ``share`` of the values is reached."""
    counts = histogram.cumsum(0)
    bin_index = int(torch.searchsorted(counts, share * counts[-1]))
    return SMALLEST * math.pow(10.0, min(bin_index, NUM_BINS - 1) / BINS_PER_DECADE)
