"""What a reward rule is."""

from __future__ import annotations

from typing import Protocol

from rlhf.types import Prompt, Score, Trajectory


class Reward(Protocol):
    """One rule. Sees text; token ids stay in the trajectory for rules that need them."""

    @property
    def name(self) -> str: ...

    def check(self, prompt: Prompt) -> None:
        """Whether the rule can judge answers to this prompt; called once, before the run.

        Raises:
            ValueError: it cannot, e.g. the expected answer is no number.
        """
        ...

    def score(self, prompt: Prompt, text: str, trajectory: Trajectory) -> Score:
        """The value of one answer. ``text`` is without stop token and special tokens."""
        ...
