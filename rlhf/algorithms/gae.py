"""Generalised advantage estimation on packed batches, and whitening over all ranks.

Columns are [T] over sequences back to back; ``positions`` restarts at 0 with each. Only trained
tokens take part: what lies between them (a tool's text), before and behind is skipped, whatever
values it has, and costs no decay.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

WHITEN_EPS = 1e-8
"""Added to the variance."""


def last_trained(mask: Tensor, positions: Tensor) -> Tensor:
    """[T] bool: the last trained token of each sequence that has any."""
    at, last = _trained(mask, positions)
    out = torch.zeros_like(mask)
    out[at[last]] = True
    return out


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    positions: Tensor,
    *,
    gamma: float,
    lam: float,
    end_values: Tensor | None = None,
) -> Tensor:
    """Advantages of the trained tokens, in the order t = 0, 1, ... of one sequence's own:

        A[t] = d[t] + gamma * lam * A[t + 1],   d[t] = rewards[t] + gamma * V[t + 1] - V[t]

    Source: arXiv:1506.02438, eq. 16.

    Args:
        rewards: [T] for taking token t.
        values: [T] V of the state before token t.
        end_values: [T] at the last trained token of a sequence, V of the state after it; None: 0,
            every sequence has ended for good.

    Returns:
        [T] float32, zero where ``mask`` is False.
    """
    at, last = _trained(mask, positions)
    now = values[at].double()
    end = torch.zeros_like(now) if end_values is None else end_values[at].double()
    after = torch.where(last, end, now.roll(-1))
    delta = rewards[at].double() + gamma * after - now
    decay = torch.where(last, 0.0, torch.full_like(now, gamma * lam))
    out = torch.zeros(mask.shape, device=mask.device)
    out[at] = _suffix_sums(delta, decay).float()
    return out


def whiten_sums(x: Tensor, mask: Tensor) -> Tensor:
    """[3] float64 on the host: number, sum and sum of squares where ``mask``; add over ranks."""
    kept = x[mask].double()
    number = kept.new_tensor(float(len(kept)))
    return torch.stack([number, kept.sum(), kept.square().sum()]).cpu()


def whiten(x: Tensor, mask: Tensor, sums: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + WHITEN_EPS) where ``mask``, zero elsewhere.

    Args:
        sums: :func:`whiten_sums` of all ranks, added; the variance is the sample's (n - 1).
    """
    number, total, squares = sums.tolist()
    mean = total / max(number, 1.0)
    variance = max(squares - number * mean * mean, 0.0) / max(number - 1.0, 1.0)
    return torch.where(mask, (x - mean) / (variance + WHITEN_EPS) ** 0.5, 0.0)


def _trained(mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [n] of the trained tokens, and which of them are the last of their sequence [n]."""
    at = mask.nonzero().squeeze(1)
    sequence = (positions == 0).cumsum(0)[at]
    return at, pad(sequence[1:] != sequence[:-1], (0, 1), value=True)[: len(at)]


def _suffix_sums(x: Tensor, decay: Tensor) -> Tensor:
    """out[t] = x[t] + decay[t] * out[t + 1], by doubling: log2(n) passes over all of it."""
    out, step = x, 1
    while step < len(x):
        out = out + decay * pad(out[step:], (0, step))
        decay = decay * pad(decay[step:], (0, step))
        step *= 2
    return out
