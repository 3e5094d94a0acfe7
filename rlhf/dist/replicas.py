"""Sums over the data parallel replicas of the training grid, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.dist.groups import PhaseGroup
from rlhf.dist.layout import TrainLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Replicas:
    """All ranks of a replica hold the same batch; one of them speaks for it."""

    layout: TrainLayout
    group: PhaseGroup

    @property
    def speaks(self) -> bool:
        """Whether this rank does."""
        at = self.layout.coord(self.group.world.rank)
        return at.tp == at.pp == at.cp == 0

    def total(self, sums: Tensor) -> Tensor:
        """Element-wise sum of a host tensor over replicas, on every rank. Collective, all ranks."""
        return self.group.sum(sums if self.speaks else sums.new_zeros(sums.shape))
