"""Which rule scores which domain."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from numbers import Real

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

    def __init__(self, by_domain: Mapping[str, Reward], timeout_s: float) -> None:
        """``timeout_s``: longest time for one answer."""
        self._by_domain = dict(by_domain)
        self._timeout_s = timeout_s

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
            ValueError: the rule raised or took too long, or a value or part is no finite number.
        """
        reward = self._rule(prompt)
        where = f"reward {reward.name}, prompt {prompt.uid}"
        score = _call_within(
            self._timeout_s, lambda: reward.score(prompt, text, trajectory), f"{where}: no score"
        )
        for name, value in {**score.parts, "value": score.value}.items():
            if not math.isfinite(_as_float(value)):
                shown = f"about 2**{value.bit_length()}" if isinstance(value, int) else repr(value)
                raise ValueError(f"{where}: {name} must be a finite number, is {shown:.80}")
        return Score(float(score.value), {name: float(v) for name, v in score.parts.items()})

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
    by_domain = {domain: make_reward(name) for domain, name in names.items()}
    return Rewards(by_domain, data.reward_timeout_s)


def _as_float(value: object) -> float:
    """NaN for what is no number, or too large a one."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.nan


def _call_within(limit_s: float, call: Callable[[], Score], what: str) -> Score:
    """``call()`` in a daemon thread: one that never returns ends the run and cannot keep it."""
    scores: list[Score] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            scores.append(call())
        except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(limit_s, threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    if not scores:
        raise ValueError(
            f"{what} within data.reward_timeout_s={limit_s:g} s; mend it or raise that"
        )
    return scores[0]
