"""Algorithms by name: each a combination of a credit rule, an advantage rule and a token loss.

Another algorithm is another entry of ``RECIPES``; the rest of the program sees :class:`Algorithm`
only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.algorithms.advantages import group_credits, kl_to_go
from rlhf.algorithms.aggregate import token_weights, weighted_sum
from rlhf.algorithms.gae import gae, last_trained, whiten, whiten_sums
from rlhf.algorithms.losses import PolicyLoss, kl_estimate, policy_loss
from rlhf.config.schema import AlgorithmSection, Config
from rlhf.track.metrics import Mean, Metric
from rlhf.types import Batch, TrajectoryFacts

CreditRule = Callable[[Sequence[TrajectoryFacts], AlgorithmSection], list[float]]
Total = Callable[[Tensor], Tensor]
"""Sum of a host tensor over all DP replicas. Collective over all ranks."""
AdvantageRule = Callable[[Batch, AlgorithmSection, Total], Batch]
TokenLoss = Callable[[Tensor, Mapping[str, Tensor], AlgorithmSection], PolicyLoss]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes an algorithm."""

    credits: CreditRule
    """Facts of all trajectories of a step -> one credit each."""
    advantages: AdvantageRule
    """Batch with credits and what the roles wrote -> the same with the advantages."""
    token_loss: TokenLoss
    """(logprobs [n], columns [n], settings) -> loss per token."""
    needs_critic: bool = False
    """Values decide the advantages too, so that a credit of zero may have a gradient."""


def _group_relative(facts: Sequence[TrajectoryFacts], section: AlgorithmSection) -> list[float]:
    return group_credits(
        [f.score.value for f in facts],
        [f.group for f in facts],
        normalize_by_std=section.normalize_by_std,
        eps=section.std_eps,
    )


def _scores(facts: Sequence[TrajectoryFacts], section: AlgorithmSection) -> list[float]:
    for f in facts:
        if not math.isfinite(f.score.value):
            raise ValueError(f"score of trajectory {f.index} must be finite, is {f.score.value}")
    return [f.score.value for f in facts]


def _same_for_all_tokens(batch: Batch, section: AlgorithmSection, total: Total) -> Batch:
    """The credit, less the KL divergence to come if that is in the reward."""
    advantages = _column(batch, "credits").clone()
    if section.kl.place == "reward":
        to_go = kl_to_go(_kl_penalty(batch, section), batch.positions)
        advantages -= torch.where(batch.mask, to_go, 0.0)
    return batch.with_columns(advantages=advantages)


def _from_values(batch: Batch, section: AlgorithmSection, total: Total) -> Batch:
    """GAE; the credit is the reward of the last trained token. Collective over all ranks if
    advantages are whitened.
    """
    values, settings = _column(batch, "values"), section.gae
    last = last_trained(batch.mask, batch.positions)
    rewards = torch.where(last, _column(batch, "credits"), 0.0)
    if section.kl.place == "reward":
        rewards -= _kl_penalty(batch, section)
    advantages = gae(
        rewards,
        values,
        batch.mask,
        batch.positions,
        gamma=settings.gamma,
        lam=settings.lam,
        end_values=batch.end_values,
    )
    returns = torch.where(batch.mask, advantages + values, 0.0)
    if settings.whiten:
        sums = total(whiten_sums(advantages, batch.mask))
        advantages = whiten(advantages, batch.mask, sums)
    return batch.with_columns(advantages=advantages, returns=returns)


def _kl_penalty(batch: Batch, section: AlgorithmSection) -> Tensor:
    """[T] kl.coef times the divergence from the reference, zero at tokens that are not trained."""
    old, ref = _column(batch, "old_logprobs"), _column(batch, "ref_logprobs")
    kl = kl_estimate(old, ref, section.kl.estimator)
    return (section.kl.coef or 0.0) * torch.where(batch.mask, kl, 0.0)


def _clipped(
    logprobs: Tensor, columns: Mapping[str, Tensor], section: AlgorithmSection
) -> PolicyLoss:
    return policy_loss(
        logprobs,
        columns["old_logprobs"],
        columns["advantages"],
        clip_low=section.clip_low,
        clip_high=section.clip_high,
        dual_clip=section.dual_clip,
    )


RECIPES: Mapping[str, Recipe] = {
    "grpo": Recipe(credits=_group_relative, advantages=_same_for_all_tokens, token_loss=_clipped),
    "ppo": Recipe(credits=_scores, advantages=_from_values, token_loss=_clipped, needs_critic=True),
}


class Algorithm:
    """One recipe with its settings. Pure but for ``total``: equal inputs give equal results."""

    def __init__(self, section: AlgorithmSection, max_new_tokens: int, total: Total) -> None:
        """``max_new_tokens``: divisor of fixed-length aggregation if the section has none."""
        self._section = section
        self._total = total
        self._recipe = RECIPES[section.name]
        self._fixed_length = section.fixed_length_tokens or max_new_tokens
        self._kl_coef = section.kl.coef or 0.0

    @property
    def needs_reference(self) -> bool:
        return self._section.kl.place != "off"

    @property
    def needs_critic(self) -> bool:
        return self._recipe.needs_critic

    def credits(self, facts: Sequence[TrajectoryFacts]) -> dict[int, float]:
        """Trajectory index -> credit."""
        return dict(
            zip((f.index for f in facts), self._recipe.credits(facts, self._section), strict=True)
        )

    def keep(self, facts: Sequence[TrajectoryFacts], credit: Mapping[int, float]) -> list[int]:
        """Indices of the trajectories worth training, in order.

        Without KL and entropy terms and values a trajectory of zero credit has zero gradient, so
        leaving it out saves its passes and changes nothing but the counts that
        :meth:`loss_weights` is given.
        """
        plain = self._section.kl.place == "off" and self._section.entropy_coef == 0
        skip = self._section.skip_zero_signal and plain and not self.needs_critic
        return [f.index for f in facts if not skip or credit[f.index] != 0]

    def loss_weights(self, lengths: Mapping[int, int]) -> dict[int, float]:
        """Trajectory index -> weight of each of its tokens.

        Args:
            lengths: trained tokens of every trajectory that counts in one update, on all ranks.
        """
        weights = token_weights(
            list(lengths.values()), self._section.aggregation, self._fixed_length
        )
        return dict(zip(lengths, weights, strict=True))

    def assign_advantages(self, batch: Batch) -> Batch:
        """Writes ``advantages`` [T], with a critic ``returns`` [T] too.

        Reads credits; values and end_values with a critic; old_logprobs and ref_logprobs with
        kl.place = reward. Collective over all ranks (a sum of a few numbers) if advantages are
        whitened.
        """
        return self._recipe.advantages(batch, self._section, self._total)

    def loss_fn(
        self, logprobs: Tensor, entropy: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch's share, and plain sums for :func:`update_metrics`.

        L = sum w (policy loss + kl.coef * KL [in loss] - entropy_coef * entropy)

        Args:
            logprobs: [n] float32 of the trained tokens, with gradient.
            entropy: [n] of the policy there, with gradient if entropy_coef > 0.
            columns: [n] each: loss_weights, old_logprobs, advantages; ref_logprobs with a
                reference.

        Returns:
            Loss [] (already divided by global denominators) and sums [] each, without gradient:
            they add up over micro-batches and ranks.
        """
        weights = columns["loss_weights"]
        policy = self._recipe.token_loss(logprobs, columns, self._section)
        total = weighted_sum(policy.loss, weights)
        sums = {"policy_loss": total.detach()}
        if self._section.entropy_coef:
            total = total - self._section.entropy_coef * weighted_sum(entropy, weights)
        if "ref_logprobs" in columns:
            kl = kl_estimate(logprobs, columns["ref_logprobs"], self._section.kl.estimator)
            if self._section.kl.place == "loss":
                penalty = self._kl_coef * weighted_sum(kl, weights)
                total = total + penalty
                sums["kl_loss"] = penalty.detach()
            sums["kl_ref"] = kl_estimate(logprobs.detach(), columns["ref_logprobs"], "k3").sum()
        return total, sums | _token_sums(policy, logprobs, entropy, columns)


def build_algorithm(config: Config, total: Total) -> Algorithm:
    """The configured algorithm."""
    return Algorithm(config.algorithm, config.rollout.sampling.max_new_tokens, total)


def _token_sums(
    policy: PolicyLoss, logprobs: Tensor, entropy: Tensor, columns: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    with torch.no_grad():
        old = columns["old_logprobs"]
        return {
            "tokens": torch.ones_like(old).sum(),
            "entropy_trained": entropy.detach().float().sum(),
            "ratio": policy.ratio.detach().sum(),
            "clipped_low": policy.clipped_low.float().sum(),
            "clipped_high": policy.clipped_high.float().sum(),
            "dual_clipped": policy.dual_clipped.float().sum(),
            # old tokens are samples of the old policy: KL(old || now)
            "kl_old": kl_estimate(old, logprobs.detach(), "k3").sum(),
        }


def update_metrics(sums: Mapping[str, float]) -> dict[str, Metric]:
    """Metrics of one update from the sums over all its micro-batches and ranks."""
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    out: dict[str, Metric] = {"policy/loss": Mean(sums["policy_loss"])}
    if "kl_loss" in sums:
        out["policy/kl_loss"] = Mean(sums["kl_loss"])
    per_token = set(sums) - {"tokens", "policy_loss", "kl_loss"}
    return out | {f"policy/{name}": Mean(sums[name] / tokens, tokens) for name in per_token}


def _column(batch: Batch, name: str) -> Tensor:
    column = getattr(batch, name)
    assert column is not None, f"{name} must be written before advantages"
    assert isinstance(column, Tensor)
    return column
