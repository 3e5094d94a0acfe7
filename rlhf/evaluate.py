"""Held-out accuracy: every evaluation prompt answered greedily by the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf.rollout.collect import Collector, Sampling
from rlhf.types import Phase, Prompt, Rollout

SOLVED = 1.0
"""A score of this or more is a right answer."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Share of held-out prompts answered right (score 1) after ``step`` steps, and mean score."""

    step: int
    value: float
    mean_score: float
    num_items: int


class Evaluator:
    """Evaluates before the first step, every ``every`` steps and after the last one."""

    def __init__(
        self,
        *,
        collector: Collector,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        every: int,
        num_steps: int,
        on_result: Callable[[Accuracy, Rollout], None],
    ) -> None:
        self._collector = collector
        self._prompts = prompts
        self._sampling = sampling
        self._every = every
        self._num_steps = num_steps
        self._on_result = on_result

    def maybe_run(self, steps_done: int) -> None:
        """Evaluate if it is due after ``steps_done`` steps. Collective over all ranks."""
        edge = steps_done in (0, self._num_steps)
        if self._prompts and (edge or (self._every and steps_done % self._every == 0)):
            self.run(steps_done)

    def run(self, steps_done: int) -> Accuracy:
        """Evaluate now. Collective over all ranks."""
        rollout = self._collector.collect(
            self._prompts, steps_done, self._sampling, phase=Phase.EVAL
        )
        values = [f.score.value for f in rollout.facts]
        num = len(values)
        solved = sum(v >= SOLVED for v in values)
        result = Accuracy(steps_done, solved / num, sum(values) / num, num)
        self._on_result(result, rollout)
        return result
