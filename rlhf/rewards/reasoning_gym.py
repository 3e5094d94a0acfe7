"""The scorers of the reasoning-gym package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf.types import Prompt, Score, Trajectory

GARBAGE = "zzz"


class ReasoningGymReward:
    """The task's own scorer on the stripped text, from 0 to 1.

    Some scorers raise on texts that they cannot read: that is an answer worth 0, counted as
    ``scorer_error``.
    """

    name = "reasoning_gym"

    def __init__(self) -> None:
        self._scorers: dict[str, Callable[[str, Any], float]] = {}
        self._checked: set[str] = set()

    def check(self, prompt: Prompt) -> None:
        if not {"task", "item"} <= set(prompt.metadata):
            raise ValueError("needs prompts of a reasoning_gym source")
        task = str(prompt.metadata["task"])
        if task in self._checked:
            return
        value = self._score(prompt, GARBAGE).value
        if value >= 0.5:
            raise ValueError(
                f"the scorer of {task} gives {value} to {GARBAGE!r}; use reward: exact_match"
            )
        self._checked.add(task)

    def score(self, prompt: Prompt, text: str, trajectory: Trajectory) -> Score:
        return self._score(prompt, text)

    def _score(self, prompt: Prompt, text: str) -> Score:
        task = str(prompt.metadata["task"])
        if task not in self._scorers:
            from reasoning_gym import get_score_answer_fn

            self._scorers[task] = get_score_answer_fn(task)
        try:
            value = float(self._scorers[task](text.strip(), prompt.metadata["item"]))
        except Exception:  # noqa: BLE001  third-party code on arbitrary text; counted below
            return Score(0.0, {"correct": 0.0, "scorer_error": 1.0})
        return Score(value, {"correct": float(value >= 1), "scorer_error": 0.0})
