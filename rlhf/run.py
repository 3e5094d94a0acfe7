"""A run: the parts that a loop works with, built by :func:`rlhf.build.build`."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from rlhf.algorithms.algorithm import Algorithm
from rlhf.checkpoint import Checkpoints
from rlhf.config.schema import Config
from rlhf.data.mix import PromptSource
from rlhf.evaluate import Evaluator
from rlhf.ground import Ground
from rlhf.recorder import Recorder
from rlhf.roles.actor import Actor
from rlhf.roles.critic import NullCritic
from rlhf.roles.reference import NullReference, Reference
from rlhf.rollout.batcher import Batcher
from rlhf.rollout.collect import Collector, Sampling
from rlhf.rollout.resharder import Resharder


@dataclass
class Run:
    """Everything that ``loop.train`` uses, and that a loop of your own may use."""

    config: Config
    first_step: int
    sampling: Sampling
    prompts: PromptSource
    collector: Collector
    batcher: Batcher
    actor: Actor
    reference: Reference | NullReference
    critic: NullCritic
    algorithm: Algorithm
    resharder: Resharder
    evaluator: Evaluator
    checkpoints: Checkpoints
    recorder: Recorder
    ground: Ground

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End engines, sinks and process groups; every closer runs even if one raises."""
        self.ground.stopper.close()
        errors = []
        while self.ground.closers:
            try:
                self.ground.closers.pop()()
            except Exception as error:  # noqa: BLE001  (all closers must run; raised below)
                errors.append(error)
        if errors:
            raise errors[0]
