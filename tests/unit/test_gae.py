"""Advantages from values: closed forms, what is skipped, whitening, and the critic's loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.algorithms.algorithm import Algorithm
from rlhf.algorithms.gae import gae, last_trained, whiten, whiten_sums
from rlhf.algorithms.values import critic_loss, critic_metrics, value_metrics, value_sums
from rlhf.config.schema import AlgorithmSection
from rlhf.types import Batch, PackedSequence
from tests.unit.test_algorithms import facts, tensor

floats = st.floats(-3, 3, width=32)
fractions = st.floats(0, 1, width=32)


@st.composite
def packed(draw):
    """Sequences of (reward, value, trained, value after it), and settings."""
    token = st.tuples(floats, floats, st.booleans(), floats)
    return (
        draw(st.lists(st.lists(token, min_size=1, max_size=9), max_size=5)),
        draw(fractions),
        draw(fractions),
    )


def _one_sequence(tokens, gamma, lam):
    """Straight from the definition, from the last trained token back; zero where not trained."""
    out = [0.0] * len(tokens)
    advantage, after, last = 0.0, 0.0, True
    for t in reversed(range(len(tokens))):
        reward, value, trained, end = tokens[t]
        if not trained:
            continue
        after = end if last else after
        advantage = reward + gamma * after - value + gamma * lam * advantage
        after, last = value, False
        out[t] = advantage
    return out


@settings(max_examples=100)
@given(packed())
def test_gae_is_its_recursion_over_the_trained_tokens_of_each_sequence(case):
    sequences, gamma, lam = case
    flat = [token for s in sequences for token in s]
    rewards, values, trained, end = (list(c) for c in zip(*flat, strict=True)) if flat else [[]] * 4
    mask = torch.tensor(trained, dtype=torch.bool)
    positions = torch.tensor([i for s in sequences for i in range(len(s))], dtype=torch.int64)
    wild = torch.where(mask, torch.tensor(values), math.nan)  # of no effect where not trained
    got = gae(
        torch.where(mask, torch.tensor(rewards), math.inf),
        wild,
        mask,
        positions,
        gamma=gamma,
        lam=lam,
        end_values=torch.tensor(end),
    )
    want = [a for s in sequences for a in _one_sequence(s, gamma, lam)]
    assert got.tolist() == pytest.approx(want, rel=1e-4, abs=1e-4)
    last = last_trained(mask, positions)
    assert int(last.sum()) == sum(any(t[2] for t in s) for s in sequences)
    assert not (last & ~mask).any()


def test_at_the_ends_of_lambda():
    """1: return minus value. 0: one step ahead."""
    mask, positions = torch.ones(3, dtype=torch.bool), torch.arange(3)
    rewards, values = tensor(0, 0, 1), tensor(0.2, 0.4, 0.6)
    far = gae(rewards, values, mask, positions, gamma=1.0, lam=1.0)
    near = gae(rewards, values, mask, positions, gamma=1.0, lam=0.0)
    assert far.tolist() == pytest.approx([0.8, 0.6, 0.4])
    assert near.tolist() == pytest.approx([0.2, 0.2, 0.4])


@settings(max_examples=50)
@given(st.lists(st.lists(st.tuples(floats, st.booleans()), max_size=6), min_size=1, max_size=4))
def test_whitening_is_that_of_all_shards_together(shards):
    xs = [torch.tensor([x for x, _ in s]) for s in shards]
    masks = [torch.tensor([m for _, m in s], dtype=torch.bool) for s in shards]
    sums = torch.stack([whiten_sums(x, m) for x, m in zip(xs, masks, strict=True)]).sum(0)
    whole = torch.cat([whiten(x, m, sums) for x, m in zip(xs, masks, strict=True)])
    kept = torch.cat([x[m] for x, m in zip(xs, masks, strict=True)]).double()
    assert not whole[~torch.cat(masks)].any()
    assert whole.isfinite().all()
    if len(kept) > 1 and kept.std() > 1e-2:
        want = (kept - kept.mean()) / kept.std()
        assert torch.allclose(whole[torch.cat(masks)].double(), want, atol=1e-3)


def section(**changes) -> AlgorithmSection:
    return AlgorithmSection.model_validate({"name": "ppo", **changes})


def batch(**columns) -> Batch:
    """Two answers of two tokens to prompts of one, then a token of padding."""
    mask = torch.tensor([False, True, True] * 2 + [False])
    written = {"values": tensor(0, 0.5, 0.5, 0, 0.25, 0, 0)}
    return Batch(
        tokens=torch.arange(7),
        positions=torch.tensor([0, 1, 2, 0, 1, 2, 0]),
        mask=mask,
        micro_bounds=((0, 7),),
        mini_bounds=((0, 1),),
        sequences=((PackedSequence(0, 0, 3), PackedSequence(1, 3, 3)),),
        credits=tensor(0, 1, 1, 0, -1, -1, 0),
        **{**written, **columns},
    )


def _written(settings, total=lambda sums: sums, **columns):
    made = Algorithm(section(**settings), 8, total).assign_advantages(batch(**columns))
    return made.advantages.tolist(), made.returns.tolist()


PLAIN = {"gae": {"gamma": 1.0, "lam": 1.0, "whiten": False}}


def test_the_score_is_the_reward_of_the_last_token():
    advantages, returns = _written(PLAIN)
    assert returns == pytest.approx([0, 1, 1, 0, -1, -1, 0])
    assert advantages == pytest.approx([0, 0.5, 0.5, 0, -1.25, -1, 0])


def test_kl_in_the_reward_is_paid_per_token():
    kl = {"kl": {"place": "reward", "estimator": "k1", "coef": 0.5}}
    old = tensor(0, -1, -1, 0, -1, -1, 0)
    ref = old - tensor(9, 0.2, 0.4, 9, 0, 0, 9)
    _, returns = _written({**PLAIN, **kl}, old_logprobs=old, ref_logprobs=ref)
    assert returns == pytest.approx([0, 1 - 0.1 - 0.2, 1 - 0.2, 0, -1, -1, 0])


def test_a_truncated_answer_goes_on_at_its_end_value():
    _, returns = _written(PLAIN, end_values=tensor(0, 0, 0, 0, 0, 0.75, 0))
    assert returns == pytest.approx([0, 1, 1, 0, -0.25, -0.25, 0])


def test_whitening_uses_the_sums_of_all_ranks_and_leaves_returns_alone():
    seen = []

    def total(sums):
        seen.append(sums)
        return sums + torch.tensor([1.0, 3.0, 9.0])  # another rank has one token of advantage 3

    whitened = {"gae": {**PLAIN["gae"], "whiten": True}}
    advantages, returns = _written(whitened, total)
    everyone = torch.tensor([0.5, 0.5, -1.25, -1.0, 3.0])
    want = ((everyone - everyone.mean()) / everyone.std())[:4].tolist()
    assert [advantages[i] for i in (1, 2, 4, 5)] == pytest.approx(want, rel=1e-5)
    assert returns == pytest.approx([0, 1, 1, 0, -1, -1, 0])
    assert len(seen) == 1


def test_every_answer_is_trained_whatever_its_score():
    algorithm = Algorithm(section(), 8, lambda sums: sums)
    step = facts(0, 0, 1, 0.5)
    assert algorithm.credits(step) == {0: 0, 1: 0, 2: 1, 3: 0.5}
    assert algorithm.keep(step, algorithm.credits(step)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="must be finite, is nan"):
        algorithm.credits(facts(math.nan))


# --- what the critic learns ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "old", "target", "loss", "slope", "clipped"),
    [
        (0.5, 0.5, 1.0, 0.125, -0.5, 0),
        (0.9, 0.5, 1.0, 0.045, 0.0, 1),  # moved further than clip and nearer: no gradient
        (0.1, 0.5, 1.0, 0.405, -0.9, 0),  # moved away: what it is counts
        (0.6, 0.5, 1.0, 0.08, -0.4, 0),
        (2.0, 1.5, 1.0, 0.5, 1.0, 0),
    ],
)
def test_critic_loss_closed_form_and_gradient(now, old, target, loss, slope, clipped):
    value = tensor(now).requires_grad_()
    columns = {"values": tensor(old), "returns": tensor(target), "loss_weights": tensor(1)}
    out, sums = critic_loss(value, columns, clip=0.2)
    out.backward()
    assert float(out.detach()) == pytest.approx(loss, rel=1e-5)
    assert float(value.grad) == pytest.approx(slope, abs=1e-6)
    assert float(sums["value_clipped"]) == clipped
    plain, _ = critic_loss(value, columns, clip=None)
    assert float(plain.detach()) == pytest.approx((now - target) ** 2 / 2, rel=1e-5)


def test_critic_sums_add_up_over_micro_batches():
    torch.manual_seed(0)
    now, columns = (
        torch.randn(9),
        {
            "values": torch.randn(9),
            "returns": torch.randn(9),
            "loss_weights": torch.full((9,), 1 / 9),
        },
    )
    whole, _ = critic_loss(now, columns, clip=0.2)
    sums: dict[str, float] = {}
    for a, b in ((0, 4), (4, 4), (4, 9)):
        part = {name: column[a:b] for name, column in columns.items()}
        for name, value in critic_loss(now[a:b], part, clip=0.2)[1].items():
            sums[name] = sums.get(name, 0.0) + float(value)
    metrics = critic_metrics(sums)
    assert metrics["critic/loss"].value == pytest.approx(float(whole), rel=1e-5)
    assert 0 < metrics["critic/clipped"].value < 1
    assert critic_metrics({"tokens": 0.0}) == {}


@settings(max_examples=50)
@given(st.lists(st.tuples(floats, floats), min_size=2, max_size=30), st.integers(0, 30))
def test_explained_variance_is_that_of_all_ranks(pairs, cut):
    values, returns = (torch.tensor(c) for c in zip(*pairs, strict=True))
    sums = value_sums(values[:cut], returns[:cut]) + value_sums(values[cut:], returns[cut:])
    metrics = {name: m.value for name, m in value_metrics(sums).items()}
    assert metrics["critic/return"] == pytest.approx(float(returns.mean()), abs=1e-5)
    assert metrics["critic/value"] == pytest.approx(float(values.mean()), abs=1e-5)
    assert metrics["critic/advantage"] == pytest.approx(float((returns - values).mean()), abs=1e-5)
    spread = float(returns.double().var(correction=0))
    if spread > 1e-3:
        left = float((returns - values).double().var(correction=0))
        assert metrics["critic/explained_variance"] == pytest.approx(
            1 - left / spread, abs=1e-3, rel=1e-3
        )


def test_a_perfect_critic_explains_everything_and_equal_returns_nothing():
    returns = tensor(0, 1, 2)
    assert value_metrics(value_sums(returns, returns))["critic/explained_variance"].value == 1
    assert "critic/explained_variance" not in value_metrics(value_sums(returns, torch.ones(3)))
    assert value_metrics(value_sums(tensor(), tensor())) == {}
