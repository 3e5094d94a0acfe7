"""Credits, losses and aggregation: closed forms, gradients, invariance under any split."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.algorithms.advantages import group_credits, kl_to_go
from rlhf.algorithms.aggregate import token_weights, weighted_sum
from rlhf.algorithms.algorithm import Algorithm, update_metrics
from rlhf.algorithms.gap import gap_metrics, gap_sums
from rlhf.algorithms.losses import kl_estimate, policy_loss
from rlhf.config.schema import AlgorithmSection
from rlhf.types import Batch, PackedSequence, Score, Status, TrajectoryFacts

floats = st.floats(-3, 3, width=32)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def alone(sums: torch.Tensor) -> torch.Tensor:
    """The sum over all replicas where there is one."""
    return sums


def facts(*scores: float, group_size: int = 2) -> list[TrajectoryFacts]:
    return [
        TrajectoryFacts(
            index=i,
            group=i // group_size,
            owner=0,
            domain="d",
            num_tokens=4,
            num_trained_tokens=2,
            logprob_sum=-1.0,
            score=Score(score, {}),
            status=Status.STOPPED,
            min_version=0,
            max_version=0,
        )
        for i, score in enumerate(scores)
    ]


# --- credits -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("abc"), floats), max_size=12), st.booleans())
def test_credits_of_a_group_have_mean_zero_and_unit_spread(pairs, normalize):
    groups, scores = [g for g, _ in pairs], [s for _, s in pairs]
    credits = group_credits(scores, groups, normalize_by_std=normalize, eps=1e-6)
    for group in set(groups):
        mine = torch.tensor([c for c, g in zip(credits, groups, strict=True) if g == group])
        values = torch.tensor([s for s, g in zip(scores, groups, strict=True) if g == group])
        assert abs(float(mine.sum())) < 1e-3
        spread = float(values.max() - values.min())
        if spread > 1e-2:
            want = 1.0 if normalize else float(values.std())
            assert float(mine.std()) == pytest.approx(want, rel=1e-3)
        if spread == 0:
            assert credits and not mine.any()


def test_equal_scores_give_exactly_zero_however_they_were_rounded():
    assert (
        group_credits([0.3, 0.1 + 0.2, 0.3], ["a"] * 3, normalize_by_std=True, eps=1e-6)
        == [0.0] * 3
    )


def test_a_score_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="must be finite, is nan"):
        group_credits([1.0, math.nan], ["a", "a"], normalize_by_std=True, eps=1e-6)


@given(st.lists(st.lists(floats, min_size=1, max_size=5), max_size=4))
def test_kl_to_go_is_the_sum_to_the_end_of_the_own_sequence(sequences):
    kl = torch.tensor([x for s in sequences for x in s])
    positions = torch.tensor([i for s in sequences for i in range(len(s))], dtype=torch.int64)
    want = [math.fsum(s[i:]) for s in sequences for i in range(len(s))]
    assert kl_to_go(kl, positions).tolist() == pytest.approx(want, abs=1e-5)


# --- losses --------------------------------------------------------------------------------------

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "which"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.5, 2.0, -2.56, 0.0, "clipped_high"),
        (0.5, 2.0, -1.0, -1.0, None),
        (0.5, -1.0, 0.8, 0.0, "clipped_low"),
        (1.5, -1.0, 1.5, 1.5, None),
        (5.0, -2.0, 6.0, 0.0, "dual_clipped"),
        (5.0, 2.0, -2.56, 0.0, "clipped_high"),
        (1.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_policy_loss_closed_form_and_gradient(ratio, advantage, loss, slope, which):
    """``slope`` is the derivative by the log-probability: the ratio's own is the ratio."""
    old = tensor(-1.0)
    now = (old + math.log(ratio)).requires_grad_()
    out = policy_loss(now, old, tensor(advantage), **CLIP)
    out.loss.sum().backward()
    assert float(out.loss.detach()) == pytest.approx(loss, rel=1e-5)
    assert float(now.grad) == pytest.approx(slope, rel=1e-5, abs=1e-6)
    flags = {n for n in ("clipped_low", "clipped_high", "dual_clipped") if getattr(out, n).any()}
    assert flags == ({which} if which else set())


def test_policy_gradient_of_the_first_update_is_that_of_reinforce():
    now = torch.randn(50, requires_grad=True)
    advantages = torch.randn(50)
    policy_loss(now, now.detach(), advantages, **CLIP).loss.sum().backward()
    assert torch.allclose(now.grad, -advantages)


def test_policy_loss_stays_finite_and_refuses_nonsense():
    now = tensor(-1.0, -500.0).requires_grad_()
    out = policy_loss(now, tensor(-500.0, -1.0), tensor(-1.0, -1.0), clip_low=0.2, clip_high=0.2)
    out.loss.sum().backward()
    assert out.loss.isfinite().all()
    assert now.grad.isfinite().all()
    with pytest.raises(ValueError, match=r"dual_clip must be above 1, is 0.8"):
        policy_loss(now, now, now, clip_low=0.2, clip_high=0.2, dual_clip=0.8)
    with pytest.raises(ValueError, match="shapes must be equal"):
        policy_loss(now, now[:1], now, clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    ],
)
@given(d=st.floats(-8, 8))
def test_kl_estimates_closed_form_and_gradient(estimator, value, slope, d):
    now = torch.tensor([d], dtype=torch.float64).float().requires_grad_()
    out = kl_estimate(now, tensor(0.0), estimator)
    out.sum().backward()
    d = float(now.detach())
    assert float(out.detach()) == pytest.approx(value(d), rel=1e-4, abs=1e-6)
    assert float(now.grad) == pytest.approx(slope(d), rel=1e-4, abs=1e-5)


def test_kl_estimates_against_the_exact_divergence():
    """Under the policy, k1 and k3 average to KL(p || q), and k2's gradient is the divergence's."""
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(7, dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    exact = (logp.exp() * (logp - ref)).sum()
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    p = logp.exp().detach()
    for estimator in ("k1", "k3"):
        assert float((p * kl_estimate(logp, ref, estimator)).sum().detach()) == pytest.approx(
            float(exact.detach()), rel=1e-5
        )
    (slope,) = torch.autograd.grad(
        (p * kl_estimate(logp, ref, "k2")).sum(), logits, retain_graph=True
    )
    assert torch.allclose(slope, want, atol=1e-5)
    (slope,) = torch.autograd.grad((p * kl_estimate(logp, ref, "k1")).sum(), logits)
    assert torch.allclose(slope, torch.zeros_like(want), atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    ("now", "ref", "dtype"),
    [(-120.0, -1.0, torch.float32), (-1.0, -120.0, torch.float32), (-14.0, -0.5, torch.float16)],
)
def test_kl_estimates_are_finite_in_value_and_gradient(estimator, now, ref, dtype):
    logprobs = torch.tensor([now], dtype=dtype, requires_grad=True)
    value = kl_estimate(logprobs, torch.tensor([ref], dtype=dtype), estimator)
    value.sum().backward()
    assert value.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert estimator == "k1" or float(value.detach()) >= 0


# --- aggregation ---------------------------------------------------------------------------------


def closed_form(sequences: list[torch.Tensor], mode: str, length: int) -> float:
    filled = [s.double() for s in sequences if len(s)]
    if not filled:
        return 0.0
    if mode == "token-mean":
        return float(torch.cat(filled).mean())
    if mode == "sequence-mean":
        return float(torch.stack([s.mean() for s in filled]).mean())
    return float(sum(s.sum() for s in filled) / (len(filled) * length))


@settings(max_examples=60)
@given(
    st.lists(st.lists(floats, max_size=6), max_size=8),
    st.sampled_from(["token-mean", "sequence-mean", "fixed-length"]),
    st.randoms(use_true_random=False),
)
def test_aggregation_is_the_closed_form_under_any_split(sequences, mode, rng):
    """Sums over shuffled parts (micro-batches of ranks) give the loss and its gradient."""
    losses = [torch.tensor(s) for s in sequences]
    weights = token_weights([len(s) for s in sequences], mode, 10)
    order = list(range(len(losses)))
    rng.shuffle(order)
    cuts = sorted(rng.choices(range(len(order) + 1), k=3))
    parts = [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(order)])]
    total, leaves = 0.0, {}
    for part in parts:
        leaves.update({i: losses[i].clone().requires_grad_() for i in part})
        values = torch.cat([leaves[i] for i in part] or [torch.zeros(0)])
        weight = torch.cat([torch.full_like(losses[i], weights[i]) for i in part] or [values])
        loss = weighted_sum(values, weight)
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(closed_form(losses, mode, 10), rel=1e-5, abs=1e-6)
    for i, leaf in leaves.items():
        if len(leaf):
            assert torch.allclose(leaf.grad, torch.full_like(leaf, weights[i]))


def test_what_has_no_weight_counts_nowhere_not_even_nan():
    values = tensor(1.0, math.nan, 3.0).requires_grad_()
    loss = weighted_sum(values, tensor(0.5, 0.0, 0.5))
    loss.backward()
    assert float(loss.detach()) == 2.0
    assert values.grad.tolist() == [0.5, 0.0, 0.5]
    assert float(weighted_sum(tensor(math.nan), tensor(0.0))) == 0.0
    with pytest.raises(ValueError, match="needs a length"):
        token_weights([1], "fixed-length")


# --- the whole algorithm -------------------------------------------------------------------------


def section(**changes) -> AlgorithmSection:
    return AlgorithmSection.model_validate(changes)


def batch(kl: list[float]) -> Batch:
    """Two sequences of prompt 1 + answer 2, then 2 of padding."""
    mask = torch.tensor([False, True, True] * 2 + [False] * 2)
    old = -torch.ones(8) * mask
    return Batch(
        tokens=torch.arange(8),
        positions=torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]),
        mask=mask,
        micro_bounds=((0, 8),),
        mini_bounds=((0, 1),),
        sequences=((PackedSequence(0, 0, 3), PackedSequence(1, 3, 3)),),
        credits=tensor(0, 1, 1, 0, -1, -1, 0, 0),
        old_logprobs=old,
        ref_logprobs=old - torch.tensor(kl),
    )


def test_kl_in_reward_lowers_what_led_to_it_and_nothing_else():
    algorithm = Algorithm(section(kl={"place": "reward", "estimator": "k1", "coef": 0.5}), 8, alone)
    kl = [9.0, 1.0, 2.0, 9.0, 0.0, 4.0, 9.0, 9.0]
    advantages = algorithm.assign_advantages(batch(kl)).advantages
    assert advantages.tolist() == pytest.approx([0, -0.5, 0, 0, -3, -3, 0, 0])


def test_without_kl_in_reward_advantages_are_the_credits():
    plain = batch([1.0] * 8)
    for kl in ({}, {"kl": {"place": "loss", "coef": 1.0}}):
        advantages = Algorithm(section(**kl), 8, alone).assign_advantages(plain).advantages
        assert torch.equal(advantages, plain.credits)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [2, 3]),
        ({"skip_zero_signal": False}, [0, 1, 2, 3]),
        ({"entropy_coef": 0.1}, [0, 1, 2, 3]),
        ({"kl": {"place": "loss", "coef": 0.1}}, [0, 1, 2, 3]),
        ({"kl": {"place": "reward", "coef": 0.1}}, [0, 1, 2, 3]),
    ],
)
def test_only_what_has_no_gradient_is_left_out(changes, kept):
    algorithm = Algorithm(section(**changes), 8, alone)
    step = facts(1, 1, 0, 1)
    assert algorithm.keep(step, algorithm.credits(step)) == kept


def test_loss_is_the_sum_of_its_terms_and_its_sums_add_up_to_means():
    algorithm = Algorithm(
        section(entropy_coef=0.1, dual_clip=3.0, kl={"place": "loss", "coef": 0.01}), 8, alone
    )
    torch.manual_seed(0)
    n = 12
    now = (-torch.rand(n)).requires_grad_()
    entropy = torch.rand(n, requires_grad=True)
    columns = {
        "old_logprobs": -torch.rand(n),
        "ref_logprobs": -torch.rand(n),
        "advantages": torch.randn(n),
        "loss_weights": torch.full((n,), 1 / n),
    }
    policy = policy_loss(now, columns["old_logprobs"], columns["advantages"], **CLIP)
    kl = kl_estimate(now, columns["ref_logprobs"], "k3")
    want = policy.loss.mean() + 0.01 * kl.mean() - 0.1 * entropy.mean()
    gradient = torch.autograd.grad(want, [now, entropy], retain_graph=True)

    sums: dict[str, float] = {}
    total = 0.0
    for a, b in ((0, 5), (5, 5), (5, 12)):  # micro-batches, one of them empty
        loss, part = algorithm.loss_fn(
            now[a:b], entropy[a:b], {name: c[a:b] for name, c in columns.items()}
        )
        loss.backward(retain_graph=True)
        total += float(loss.detach())
        assert not any(v.requires_grad for v in part.values())
        sums = {name: sums.get(name, 0.0) + float(v) for name, v in part.items()}
    assert total == pytest.approx(float(want.detach()), rel=1e-5)
    assert torch.allclose(now.grad, gradient[0], atol=1e-6)
    assert torch.allclose(entropy.grad, gradient[1], atol=1e-6)

    metrics = {name: metric.value for name, metric in update_metrics(sums).items()}
    assert metrics == pytest.approx(
        {
            "policy/loss": float(policy.loss.detach().mean()),
            "policy/kl_loss": 0.01 * float(kl.detach().mean()),
            "policy/kl_ref": float(kl.detach().mean()),
            "policy/kl_old": float(kl_estimate(columns["old_logprobs"], now.detach(), "k3").mean()),
            "policy/entropy_trained": float(entropy.detach().mean()),
            "policy/ratio": float(policy.ratio.detach().mean()),
            "policy/clipped_low": float(policy.clipped_low.float().mean()),
            "policy/clipped_high": float(policy.clipped_high.float().mean()),
            "policy/dual_clipped": float(policy.dual_clipped.float().mean()),
        },
        rel=1e-4,
        abs=1e-7,
    )


def test_an_update_without_tokens_has_zero_loss_a_gradient_and_no_metrics():
    algorithm = Algorithm(section(), 8, alone)
    now = torch.zeros(0, requires_grad=True)
    empty = dict.fromkeys(("old_logprobs", "advantages", "loss_weights"), torch.zeros(0))
    loss, sums = algorithm.loss_fn(now, torch.zeros(0), empty)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert update_metrics({name: float(v) for name, v in sums.items()}) == {}


def test_fixed_length_divides_by_the_answer_limit_unless_told():
    assert Algorithm(section(aggregation="fixed-length"), 8, alone).loss_weights({3: 2, 5: 4}) == {
        3: 1 / 16,
        5: 1 / 16,
    }
    told = Algorithm(section(aggregation="fixed-length", fixed_length_tokens=5), 8, alone)
    assert told.loss_weights({3: 2, 5: 0}) == {3: 1 / 5, 5: 1 / 5}


# --- gap between engine and trainer --------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=50), st.integers(0, 50))
def test_gap_sums_add_up_over_ranks(distances, cut):
    rollout = -torch.ones(len(distances))
    old = rollout + torch.tensor(distances)
    sums = gap_sums(rollout[:cut], old[:cut]) + gap_sums(rollout[cut:], old[cut:])
    metrics = {name: m.value for name, m in gap_metrics(sums).items()}
    d = (old - rollout).abs().double()
    assert metrics["gap/mean_abs"] == pytest.approx(float(d.mean()), abs=1e-6)
    k3 = torch.expm1((old - rollout).double()) - (old - rollout).double()
    assert metrics["gap/k3"] == pytest.approx(float(k3.mean()), rel=1e-3, abs=1e-6)
    exact = float(d.quantile(0.99, interpolation="higher"))
    assert metrics["gap/p99"] >= exact * 0.999 or metrics["gap/p99"] >= float(
        d.quantile(0.99, interpolation="lower")
    )
    assert metrics["gap/p99"] <= max(exact * 1.13, 2e-9)


def test_gap_of_nothing_or_of_nan_does_not_break():
    assert gap_metrics(gap_sums(torch.zeros(0), torch.zeros(0))) == {}
    assert math.isnan(gap_metrics(gap_sums(tensor(math.nan), tensor(0.0)))["gap/mean_abs"].value)
    assert gap_metrics(gap_sums(tensor(-1.0), tensor(-1.0)))["gap/p99"].value == 1e-9
