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
    from rlhf.rollout.node_host import NodeHost

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
    def hosts_engine(self) -> bool:
        """Whether this rank starts its node's host of its engine."""
        return self.rollout.hosts_on(self.world.rank, self.world.local_size)

    @property
    def nodes_per_engine(self) -> int:
        return self.rollout.nodes_per_engine(self.world.local_size)

    @property
    def engine_node(self) -> int:
        """Number of this rank's node among those of its engine."""
        inside = self.world.rank - self.rollout.leader(self.engine)
        return inside // self.world.local_size if self.nodes_per_engine > 1 else 0

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
    host: NodeHost | None = None
    """The engine host that this rank has started."""
