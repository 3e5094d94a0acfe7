"""RewardModel: a frozen classifier that scores whole answers, or its absence.

Credits compare answers over all ranks, so scores must be known everywhere before a batch is packed
for training. This role therefore packs the rollout for itself: every answer goes to one replica,
which values its last token, and the numbers, which are few, go back to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlhf.dist.gate import PhaseGate
from rlhf.mcore.forward import values
from rlhf.mcore.model import TrainModel
from rlhf.types import Batch, Phase, Rollout, Score

PART = "reward_model"


class RewardModel:
    """Adds its weighted number to the score of every trajectory."""

    def __init__(
        self,
        *,
        model: TrainModel,
        weight: float,
        pack: Callable[[Rollout], Batch],
        gather: Callable[[Any], list[Any]],
        speaks: bool,
        gate: PhaseGate,
    ) -> None:
        """
        Args:
            pack: every trajectory of a rollout to one replica. Collective over all ranks.
            gather: every rank's value on every rank. Collective over all ranks.
            speaks: this rank reports for its replica.
        """
        self._model = model
        self._weight = weight
        self._pack = pack
        self._gather = gather
        self._speaks = speaks
        self._gate = gate

    def score(self, rollout: Rollout, step: int) -> Rollout:
        """The rollout with score = rule's score + weight * value of the last token.

        Collective over all ranks: the phase begins and ends together.

        Raises:
            ValueError: the model gave a value that is not finite.
        """
        with self._gate.phase(Phase.SCORE, step, PART):
            batch = self._pack(rollout)
            mine = self._value_ends(batch)
            known: dict[int, float] = {}
            for part in self._gather(mine if self._speaks else {}):
                known.update(part)
            facts = tuple(
                replace(f, score=self._with(f.score, known[f.index], f.index))
                for f in rollout.facts
            )
            return replace(rollout, facts=facts)

    def _value_ends(self, batch: Batch) -> dict[int, float]:
        """Trajectory index -> value of the state after its last token."""
        ends = {
            s.index: begin + s.start + s.length - 1
            for (begin, _), sequences in zip(batch.micro_bounds, batch.sequences, strict=True)
            for s in sequences
        }
        asked = torch.zeros_like(batch.mask)
        asked[list(ends.values())] = True
        after = values(
            self._model, batch.microbatches(), [asked[a:b] for a, b in batch.micro_bounds]
        )
        return dict(zip(ends, after[list(ends.values())].tolist(), strict=True))

    def _with(self, score: Score, value: float, index: int) -> Score:
        if not math.isfinite(value):
            raise ValueError(f"reward_model: value of trajectory {index} must be finite: {value}")
        return Score(score.value + self._weight * value, {**score.parts, PART: value})


class NullRewardModel:
    """No reward model: scores are those of the rules."""

    def score(self, rollout: Rollout, step: int) -> Rollout:
        return rollout
