"""Reference: the frozen model that the actor is kept near to, or its absence."""

from __future__ import annotations

from torch import Tensor

from rlhf.dist.gate import PhaseGate
from rlhf.mcore.forward import logprobs
from rlhf.mcore.model import TrainModel
from rlhf.types import Batch, Phase


class Reference:
    """Log-probabilities under the frozen weights, on the actor's grid."""

    def __init__(self, *, model: TrainModel, temperature: float, gate: PhaseGate) -> None:
        self._model = model
        self._temperature = temperature
        self._gate = gate

    def logprobs(self, batch: Batch, step: int) -> Tensor | None:
        """ref_logprobs [T] float32. Collective over all ranks: the phase begins together."""
        with self._gate.phase(Phase.SCORE, step, "reference"):
            return logprobs(self._model, batch.microbatches(), self._temperature)


class NullReference:
    """No reference: the column is not written."""

    def logprobs(self, batch: Batch, step: int) -> Tensor | None:
        return None
