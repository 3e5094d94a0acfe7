"""Which rule scores which domain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from rlhf.config.faults import did_you_mean
from rlhf.config.schema import DataSection
from rlhf.rewards.function import FunctionReward
from rlhf.rewards.match import ExactMatch, NumberMatch
from rlhf.rewards.reasoning_gym import ReasoningGymReward
from rlhf.rewards.reward import Reward
from rlhf.types import Prompt, Score, Trajectory

RULES: Mapping[str, Callable[[], Reward]] = {
    "exact_match": ExactMatch,
    "first_number": lambda: NumberMatch("first"),
    "last_number": lambda: NumberMatch("last"),
    "reasoning_gym": ReasoningGymReward,
}


def make_reward(name: str) -> Reward:
    """A rule by name, or a user's function as ``file.py:function``.

    Raises:
        ValueError: unknown name, or a function that cannot be used.
    """
    if name in RULES:
        return RULES[name]()
    if ":" in name:
        return FunctionReward(name)
    raise ValueError(
        f"unknown reward {name!r}; {did_you_mean(name, RULES)}; "
        "a function of your own is given as file.py:function"
    )


class Rewards:
    """Scores by domain."""

    def __init__(self, by_domain: Mapping[str, Reward]) -> None:
        self._by_domain = dict(by_domain)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Refuse prompts that their rule cannot judge, before anything is sampled.

        Raises:
            ValueError: names domain, rule and prompt.
        """
        for prompt in prompts:
            reward = self._rule(prompt)
            try:
                reward.check(prompt)
            except ValueError as error:
                raise ValueError(f"reward {reward.name}, prompt {prompt.uid}: {error}") from error

    def score(self, prompt: Prompt, text: str, trajectory: Trajectory) -> Score:
        """The value of one answer, by the rule of the prompt's domain.

        Raises:
            ValueError: the rule gave a value that is not finite.
        """
        reward = self._rule(prompt)
        score = reward.score(prompt, text, trajectory)
        if not math.isfinite(score.value):
            raise ValueError(
                f"reward {reward.name}, prompt {prompt.uid}: value must be finite, is {score.value}"
            )
        return score

    def _rule(self, prompt: Prompt) -> Reward:
        if prompt.domain not in self._by_domain:
            raise ValueError(
                f"prompt {prompt.uid}: domain {prompt.domain!r} has no reward; "
                f"{did_you_mean(prompt.domain, self._by_domain)}"
            )
        return self._by_domain[prompt.domain]


def build_rewards(data: DataSection) -> Rewards:
    """The rule of every training and evaluation domain.

    Raises:
        ValueError: unknown rule, unusable function, or one domain with two rules.
    """
    names: dict[str, str] = {}
    for source in (*data.train, *data.eval):
        first = names.setdefault(source.name, source.reward)
        if first != source.reward:
            raise ValueError(
                f"domain {source.name!r} must have one reward, has {first} and {source.reward}; "
                "give one of the sources another name"
            )
    return Rewards({domain: make_reward(name) for domain, name in names.items()})
