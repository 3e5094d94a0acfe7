"""Critic: absent for algorithms that need no values."""

from __future__ import annotations

from torch import Tensor

from rlhf.types import Batch


class NullCritic:
    """No critic: the column is not written and there is nothing to update."""

    def values(self, batch: Batch, step: int) -> Tensor | None:
        return None

    def update(self, minibatch: Batch, step: int) -> None:
        return None
