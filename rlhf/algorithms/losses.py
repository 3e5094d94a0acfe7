"""Losses per token: pure functions of log-probabilities. All are minimised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Of the policy ratio: exp() never sees more. Clamped before exp: after it, 0 * inf is NaN."""

LARGEST_KL_LOG_RATIO = 10.0
"""Of k3: its gradient, up to e^10 = 22026, then fits float16 too."""

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """[n] each; which bound a token met is for metrics."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    """bool: ratio below 1 - clip_low with a negative advantage, no gradient."""
    clipped_high: Tensor
    """bool: ratio above 1 + clip_high with a positive advantage, no gradient."""
    dual_clipped: Tensor
    """bool: loss bounded by dual_clip with a negative advantage, no gradient."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clipped policy loss, with its own upper bound (clip-higher) and an optional dual clip.

    L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = exp(logprobs - old_logprobs);
    for A < 0 with a dual clip c: min(L, -c A).

    Source: arXiv:1707.06347, eq. 7; clip-higher arXiv:2503.14476, eq. 10; dual clip
    arXiv:1912.09729, eq. 5.

    Args:
        logprobs: [n] now, with gradient.
        old_logprobs: [n] before the update.
        advantages: [n].

    Raises:
        ValueError: ``dual_clip`` is not above 1, or shapes differ.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, is {dual_clip}")
    if not logprobs.shape == old_logprobs.shape == advantages.shape:
        raise ValueError(
            f"shapes must be equal: logprobs {tuple(logprobs.shape)}, old_logprobs "
            f"{tuple(old_logprobs.shape)}, advantages {tuple(advantages.shape)}"
        )
    ratio = torch.exp(_log_ratio(logprobs, old_logprobs))
    low, high = 1 - clip_low, 1 + clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    negative = advantages < 0
    dual = torch.zeros_like(negative)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        dual = negative & (loss > bound)
        loss = torch.where(dual, bound, loss)
    return PolicyLoss(
        loss=loss,
        ratio=ratio,
        clipped_low=negative & (ratio < low),
        clipped_high=(advantages > 0) & (ratio > high),
        dual_clipped=dual,
    )


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """One-sample estimates of KL(policy || reference) at tokens that the policy sampled.

    d = logprobs - ref_logprobs; k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The mean of k1 and k3
    under the policy is the divergence; k1 may be negative, k3 never is. As a term of the loss, the
    expected gradient of k2 is the divergence's own and that of k1 is zero.

    Source: http://joschu.net/blog/kl-approx.html

    Returns:
        [n] float32, whatever the inputs are; value and gradient are finite for any finite inputs
        (k3 is constant beyond LARGEST_KL_LOG_RATIO).
    """
    d = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    x = (-d).clamp(max=LARGEST_KL_LOG_RATIO)
    return torch.expm1(x) - x


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs.float() - old_logprobs.float()).clamp(max=LARGEST_LOG_RATIO)
