"""What all parts of a run stand on: the plan, and what a rank has opened so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Config
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.dist.stop import Stopper
from rlhf.dist.world import World
from rlhf.weights.model_shape import ModelShape

if TYPE_CHECKING:
    import torch

    from rlhf.dist.gate import PhaseGate
    from rlhf.dist.groups import PhaseGroup

Closer = Callable[[], Any]


@dataclass(frozen=True)
class Plan:
    """What follows from configuration, model and world, before anything is started."""

    config: Config
    world: World
    shape: ModelShape
    train: TrainLayout
    rollout: RolloutLayout

    @property
    def engine(self) -> int:
        """Number of this rank's engine."""
        return self.rollout.coord(self.world.rank).engine

    @property
    def leads_engine(self) -> bool:
        return self.rollout.leader(self.engine) == self.world.rank

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer that any phase asks for."""
        sampling, evaluation = self.config.rollout.sampling, self.config.eval
        return max(sampling.max_new_tokens, evaluation.max_new_tokens or 0)


@dataclass
class Ground:
    """What all parts stand on."""

    plan: Plan
    stopper: Stopper
    device: torch.device
    group: PhaseGroup
    gate: PhaseGate
    closers: list[Closer]
