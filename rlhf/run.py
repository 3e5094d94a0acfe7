"""A run: the parts that a loop works with, built by :func:`rlhf.build`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rlhf.algorithms.algorithm import Algorithm
from rlhf.checkpoint import Checkpoints
from rlhf.config.schema import Config
from rlhf.data.mix import PromptSource
from rlhf.dist.stop import EXIT_STOPPED, StopRequested
from rlhf.ending import end_failed, save_asked
from rlhf.evaluate import Evaluator
from rlhf.ground import Ground
from rlhf.recorder import Recorder
from rlhf.reshard.export import Exporter
from rlhf.roles.actor import Actor
from rlhf.roles.critic import Critic, NullCritic
from rlhf.roles.reference import NullReference, Reference
from rlhf.roles.reward_model import NullRewardModel, RewardModel
from rlhf.rollout.batcher import Batcher
from rlhf.rollout.collect import Collector, Sampling
from rlhf.rollout.resharder import Resharder
from rlhf.types import Phase


@dataclass
class Run:
    """Everything that ``loop.train`` uses, and that a loop of your own may use."""

    config: Config
    first_step: int
    sampling: Sampling
    prompts: PromptSource
    collector: Collector
    reward_model: RewardModel | NullRewardModel
    batcher: Batcher
    actor: Actor
    reference: Reference | NullReference
    critic: Critic | NullCritic
    algorithm: Algorithm
    resharder: Resharder
    evaluator: Evaluator
    checkpoints: Checkpoints
    recorder: Recorder
    exporter: Exporter
    ground: Ground

    def finish(self) -> None:
        """The run is over: the HF folder, the curves, the tables and the last line.

        Collective over all ranks.
        """
        steps_done = self.checkpoints.steps_done
        if self.config.checkpoint.export_hf:
            folder = Path(self.config.run_dir) / "hf"
            with self.ground.gate.phase(Phase.SAVE, steps_done, "export"):
                self.exporter.write(folder, self.config.model.path, lambda: None)
            self.recorder.log_phase(steps_done, f"{Phase.SAVE}_export")
        self.recorder.finish(steps_done)

    def save_asked(self, why: StopRequested) -> None:
        """The run was asked to stop: save, say so, close. Collective over all ranks."""
        save_asked(self.checkpoints, why, is_first=self.ground.plan.world.is_first)
        self.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; an error or a stop request ends the process as under ``rlhf train``."""
        if isinstance(error, StopRequested):
            self.save_asked(error)
            raise SystemExit(EXIT_STOPPED)
        if isinstance(error, Exception):
            end_failed(self.config.run_dir, self.ground.stopper, error)
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
