"""How token losses become one number: a weight per token, from global counts.

The weights are such that the plain sum of weight * token loss over all micro-batches and ranks is
the aggregated loss. So no cut into micro-batches or ranks can change the loss or its gradient, and
nobody averages averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "sequence-mean", "fixed-length"]


def token_weights(
    num_tokens: Sequence[int], mode: Aggregation, fixed_length: int | None = None
) -> list[float]:
    """The weight of each trained token of each sequence.

    token-mean     1 / tokens                        every token counts alike (arXiv:2503.14476)
    sequence-mean  1 / (sequences * own tokens)      every sequence counts alike (arXiv:2402.03300)
    fixed-length   1 / (sequences * fixed_length)    no length bias (arXiv:2503.20783)

    Sequences without trained tokens count nowhere; with no token at all every weight is 0.

    Args:
        num_tokens: trained tokens of every sequence of one update, over all ranks.
        fixed_length: divisor of fixed-length.
    """
    sequences = sum(1 for n in num_tokens if n > 0)
    if sequences == 0:
        return [0.0] * len(num_tokens)
    if mode == "token-mean":
        return [1.0 / sum(num_tokens)] * len(num_tokens)
    if mode == "sequence-mean":
        return [1.0 / (sequences * n) if n else 0.0 for n in num_tokens]
    if not fixed_length:
        raise ValueError("fixed-length aggregation needs a length above 0")
    return [1.0 / (sequences * fixed_length)] * len(num_tokens)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights * values; what has weight 0 is left out whatever its value, NaN included.

    Args:
        values: [n], may need a gradient; tokens of weight 0 get none.
        weights: [n].
    """
    # selected, not multiplied: NaN * 0 is NaN, in the value and in the gradient
    return torch.where(weights != 0, values, 0.0).mul(weights).sum()
