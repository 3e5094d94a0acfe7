"""Critic: the model that values each state, or its absence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf.algorithms.gae import last_trained
from rlhf.dist.gate import PhaseGate
from rlhf.mcore.forward import LossFn, train, values
from rlhf.mcore.model import TrainModel
from rlhf.mcore.optimizer import Optimizer
from rlhf.roles.actor import Updates
from rlhf.types import Batch, Phase


class Critic:
    """Values and their updates, on the actor's grid, each in its own phase."""

    def __init__(
        self,
        *,
        model: TrainModel,
        optimizer: Optimizer,
        loss_fn: LossFn,
        values_ends: bool,
        gate: PhaseGate,
        on_update: Updates,
    ) -> None:
        """``values_ends``: write ``end_values`` too, for answers that were cut off."""
        self.model = model
        self.optimizer = optimizer
        self._loss_fn = loss_fn
        self._values_ends = values_ends
        self._gate = gate
        self._on_update = on_update

    def values(self, batch: Batch, step: int) -> Mapping[str, Tensor]:
        """The columns ``values`` and, if asked for, ``end_values`` [T] float32, in one pass.

        Collective over all ranks: the phase begins and ends together.
        """
        with self._gate.phase(Phase.SCORE, step, "critic"):
            ends = _cut_off_ends(batch) if self._values_ends else torch.zeros_like(batch.mask)
            asked = batch.mask.roll(-1) | ends  # no sequence begins with a trained token
            after = values(
                self.model, batch.microbatches(), [asked[a:b] for a, b in batch.micro_bounds]
            )
            columns = {"values": torch.where(batch.mask, after.roll(1), 0.0)}
            if self._values_ends:
                columns["end_values"] = torch.where(ends, after, 0.0)
            return columns

    def update(self, minibatch: Batch, step: int) -> None:
        """One optimizer step. Collective over all ranks."""
        with self._gate.phase(Phase.UPDATE, step, "critic"):
            self._on_update(
                train(self.model, self.optimizer, minibatch.microbatches(), self._loss_fn)
            )


class NullCritic:
    """No critic: no column is written and there is nothing to update."""

    def values(self, batch: Batch, step: int) -> Mapping[str, Tensor]:
        return {}

    def update(self, minibatch: Batch, step: int) -> None:
        return None


def _cut_off_ends(batch: Batch) -> Tensor:
    """[T] bool: the last trained token of each answer that was cut off."""
    cut_off = torch.zeros_like(batch.mask)
    for (begin, _), sequences in zip(batch.micro_bounds, batch.sequences, strict=True):
        for s in sequences:
            if s.truncated:
                cut_off[begin + s.start : begin + s.start + s.length] = True
    return last_trained(batch.mask, batch.positions) & cut_off
