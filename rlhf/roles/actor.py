"""Actor: the model that is trained and whose weights the engines serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rlhf.dist.gate import PhaseGate
from rlhf.mcore.forward import LossFn, TrainStats, logprobs, train
from rlhf.mcore.model import TrainModel
from rlhf.mcore.optimizer import Optimizer
from rlhf.types import Batch, MicroBatch, Phase


class Updates(Protocol):
    """Where the statistics of an update go."""

    def __call__(self, stats: TrainStats) -> None: ...


class Actor:
    """Log-probabilities and updates of the policy, each in its own phase."""

    def __init__(
        self,
        *,
        model: TrainModel,
        optimizer: Optimizer,
        loss_fn: LossFn,
        temperature: float,
        first_step: int,
        gate: PhaseGate,
        on_update: Updates,
    ) -> None:
        """``first_step``: the step of its first update; before, the critic learns alone."""
        self.model = model
        self.optimizer = optimizer
        self._loss_fn = loss_fn
        self._temperature = temperature
        self._first_step = first_step
        self._gate = gate
        self._on_update = on_update

    @property
    def params(self) -> Mapping[str, Tensor]:
        """This rank's shard by parameter name; live tensors, not copies."""
        return self.model.params

    def logprobs(self, batch: Batch, step: int) -> Tensor:
        """old_logprobs [T] float32 of the trained tokens, before any update of the step.

        Collective over all ranks: the phase begins and ends together.
        """
        with self._gate.phase(Phase.SCORE, step, "actor"):
            return logprobs(self.model, batch.microbatches(), self._temperature)

    def score(self, micro: Sequence[MicroBatch]) -> Tensor:
        """[sum T] float32 log-probabilities at temperature 1, within the caller's phase.

        Collective over the ranks of one replica.
        """
        return logprobs(self.model, micro, 1.0)

    def update(self, minibatch: Batch, step: int) -> None:
        """One optimizer step, none before the first step. Collective over all ranks."""
        if step < self._first_step:
            return
        with self._gate.phase(Phase.UPDATE, step, "actor"):
            stats = train(
                self.model,
                self.optimizer,
                minibatch.microbatches(),
                self._loss_fn,
                self._temperature,
            )
            self._on_update(stats)
