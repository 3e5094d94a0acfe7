"""Operations on advantages and losses."""

import math

import torch

from rlhf.algorithms.advantages import group_credits
from rlhf.algorithms.aggregate import token_weights, weighted_sum
from rlhf.algorithms.gae import WHITEN_EPS, gae, last_trained, whiten, whiten_sums
from rlhf.algorithms.losses import kl_estimate, policy_loss
from tests.cases.case import Case, Op, floats


def masked_mean_(case: Case) -> Case:
    """As a token-mean loss of one sequence."""
    mask = torch.tensor(case["mask"]).float()
    (weight,) = token_weights([int(mask.sum())], "token-mean")
    value = float(weighted_sum(floats(case["values"]), mask * weight))
    return {"value": value, "finite": math.isfinite(value)}


def kl_estimate_(case: Case) -> Case:
    logp, ref = torch.tensor([case["logp"]]), torch.tensor([case["ref_logp"]])
    return {"value": float(kl_estimate(logp, ref, case["estimator"]))}


def kl_extreme(case: Case) -> Case:
    dtype = getattr(torch, case["dtype"])
    logp = torch.tensor([case["logp"]], dtype=dtype, requires_grad=True)
    value = kl_estimate(logp, torch.tensor([case["ref_logp"]], dtype=dtype), case["estimator"])
    value.sum().backward()
    assert logp.grad is not None
    return {
        "finite_value": bool(value.isfinite().all()),
        "finite_gradient": bool(logp.grad.isfinite().all()),
        "value": float(value.detach()),
    }


def kl_full(case: Case) -> Case:
    """Our estimators are for sampled tokens: their mean under the policy is the divergence."""
    policy, ref = (torch.tensor(case[k], dtype=torch.float64) for k in ("policy", "ref"))
    k3 = float((policy * kl_estimate(policy.log(), ref.log(), "k3")).sum())
    k1 = float((policy * kl_estimate(policy.log(), ref.log(), "k1")).sum())
    assert math.isclose(k1, k3, rel_tol=1e-5), (k1, k3)
    return {"kl_policy_ref": k1}


def group_advantage(case: Case) -> Case:
    assert case["ddof"] == 1, "the sample standard deviation is the only one"
    credits = group_credits(
        case["rewards"], case["group_ids"], normalize_by_std=case["use_std"], eps=case["eps"]
    )
    return {"advantages": credits}


def gae_(case: Case) -> Case:
    mask = torch.tensor(case["mask"]).bool()
    rewards, values = floats(case["rewards"]), floats(case["values"])
    advantages = gae(
        rewards,
        values,
        mask,
        torch.arange(len(mask)),
        gamma=case["gamma"],
        lam=case["lam"],
        end_values=torch.full(mask.shape, case["bootstrap_value"]),
    )
    returns = torch.where(mask, advantages + values, 0.0)
    return {"advantages": advantages.tolist(), "returns": returns.tolist()}


def terminal_reward_index(case: Case) -> Case:
    mask = torch.tensor(case["mask"]).bool()
    last = last_trained(mask, torch.arange(len(mask)))
    rewards = torch.where(last, case["score"], 0.0)
    return {"index": int(last.nonzero()), "token_rewards": rewards.tolist()}


def global_whiten(case: Case) -> Case:
    """Every shard adds its sums, an empty one too, and applies the whole."""
    assert (case["ddof"], case["eps"]) == (1, WHITEN_EPS)
    shards = [floats(shard) for shard in case["shards"]]
    masks = [torch.tensor(mask).bool() for mask in case["masks"]]
    pairs = list(zip(shards, masks, strict=True))
    sums = torch.stack([whiten_sums(x, mask) for x, mask in pairs]).sum(0)
    return {"whitened": [whiten(x, mask, sums).tolist() for x, mask in pairs]}


def ppo_token_loss(case: Case) -> Case:
    loss = policy_loss(
        torch.tensor([case["ratio"]]).log(),
        torch.zeros(1),
        torch.tensor([float(case["advantage"])]),
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        dual_clip=case["dual_clip_c"],
    ).loss
    return {"loss": float(loss)}


MODES = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
    "seq-mean-token-sum-norm": "fixed-length",
}


def loss_aggregate(case: Case) -> Case:
    """Sums of micro-batches, then of ranks, as training makes them."""
    ranks = case["ranks"]
    sequences = [s for rank in ranks for micro in rank for s in micro]
    lengths = [sum(mask) for _, mask in sequences]
    weights = iter(token_weights(lengths, MODES[case["mode"]], case["norm_length"]))
    total = 0.0
    for rank in ranks:
        for micro in rank:
            losses = torch.cat([floats(values) for values, _ in micro])
            weight = torch.cat([torch.tensor(mask).float() * next(weights) for _, mask in micro])
            total += float(weighted_sum(losses, weight))
    return {"global_loss": total}


OPS: dict[str, Op] = {
    "masked_mean": masked_mean_,
    "kl_estimate": kl_estimate_,
    "kl_extreme": kl_extreme,
    "kl_full": kl_full,
    "group_advantage": group_advantage,
    "loss_aggregate": loss_aggregate,
    "ppo_token_loss": ppo_token_loss,
    "gae": gae_,
    "terminal_reward_index": terminal_reward_index,
    "global_whiten": global_whiten,
}
