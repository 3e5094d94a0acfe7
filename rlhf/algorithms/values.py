"""What the critic learns, and how good its values are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf.algorithms.aggregate import weighted_sum
from rlhf.track.metrics import Mean, Metric


def critic_loss(
    values: Tensor, columns: Mapping[str, Tensor], *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared distance to the return; with ``clip``, of two values the worse.

    L = sum w max((v - R)^2, (v_clip - R)^2) / 2,   v_clip = old + clamp(v - old, -clip, clip)

    Source: arXiv:1707.06347 has the plain form; the clipped one is that of its authors' code
    (openai/baselines, ppo2/model.py).

    Args:
        values: [n] now, with gradient.
        columns: [n] each: values (before the update), returns, loss_weights.

    Returns:
        Loss [] (already divided by global denominators) and sums [] for :func:`critic_metrics`.
    """
    old, returns = columns["values"], columns["returns"]
    loss = (values - returns).square()
    clipped = torch.zeros_like(loss)
    if clip is not None:
        near = old + (values - old).clamp(-clip, clip)
        bounded = (near - returns).square()
        clipped = (bounded > loss).float()
        loss = torch.maximum(loss, bounded)
    total = weighted_sum(loss / 2, columns["loss_weights"])
    return total, {
        "value_loss": total.detach(),
        "tokens": torch.ones_like(old).sum(),
        "value_clipped": clipped.sum(),
    }


def critic_metrics(sums: Mapping[str, float]) -> dict[str, Metric]:
    """Metrics of one update of the critic from the sums over its micro-batches and ranks."""
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    return {
        "critic/loss": Mean(sums["value_loss"]),
        "critic/clipped": Mean(sums["value_clipped"] / tokens, tokens),
    }


def value_sums(values: Tensor, returns: Tensor) -> Tensor:
    """Partial sums over trained tokens, to be added over ranks.

    Args:
        values, returns: [n] at trained tokens.

    Returns:
        [5] float64 on the host: tokens; sums of returns, their squares, of errors
        (returns - values), their squares.
    """
    r, e = returns.double(), (returns - values).double()
    number = r.new_tensor(float(len(r)))
    return torch.stack([number, r.sum(), r.square().sum(), e.sum(), e.square().sum()]).cpu()


NUM_VALUE_SUMS = 5


def value_metrics(sums: Tensor) -> dict[str, Metric]:
    """From the sums of all ranks.

    critic/explained_variance = 1 - var(returns - values) / var(returns): 1 is a perfect critic, 0
    one that knows no more than the mean, below 0 one that misleads; left out while all returns are
    equal. critic/advantage is before whitening.
    """
    number, r, r2, e, e2 = sums.tolist()
    if not number:
        return {}
    out: dict[str, Metric] = {
        "critic/return": Mean(r / number, number),
        "critic/value": Mean((r - e) / number, number),
        "critic/advantage": Mean(e / number, number),
    }
    spread, left = r2 - r * r / number, e2 - e * e / number
    if spread > 1e-12 * max(r2, 1e-12):
        out["critic/explained_variance"] = Mean(1 - left / spread, number)
    return out
