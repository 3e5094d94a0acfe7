"""Where a layer of ours puts the gradient of its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WeightGradient:
    """Adds to megatron's float32 gradient buffer if the weight has one, else collects.

    In a buffer the gradients of all micro-batches add up without passing through autograd, which
    would allocate, round to the weight's dtype and copy once per micro-batch.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight: Any = weight
        self._buffered = hasattr(weight, "main_grad")
        self.sum: Tensor = (
            self._weight.main_grad
            if self._buffered
            else torch.zeros_like(weight, dtype=torch.float32)
        )
        """[like the weight] float32; add to it in place."""

    def finish(self) -> Tensor:
        """What to return to autograd, once all is added; in any case its hooks fire.

        With a buffer the values are never read: megatron sees ``grad_added_to_main_grad``.
        """
        if not self._buffered:
            return self.sum.to(self._weight.dtype)
        self._weight.grad_added_to_main_grad = True
        return torch.empty_like(self._weight)


def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target += left @ right, the product in ``right``'s dtype; ``target`` is a float32 view."""
    if right.dtype == torch.float32:
        target.addmm_(left, right)
    else:
        target.add_(left.to(right.dtype) @ right)
