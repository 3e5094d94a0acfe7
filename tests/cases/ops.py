"""Each abstract operation of the cases, mapped to the product's own code: glue only.

``OPS[op](input)`` returns a dict with the keys of ``expected``, or raises. ``WAITING`` says what
each operation without a mapping waits for.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import create_model

from rlhf.algorithms.advantages import group_credits
from rlhf.algorithms.aggregate import token_weights, weighted_sum
from rlhf.algorithms.gae import WHITEN_EPS, gae, last_trained, whiten, whiten_sums
from rlhf.algorithms.losses import kl_estimate, policy_loss
from rlhf.checkpoint import COMPLETE, complete_steps, select_delete, select_resume
from rlhf.config.check import batch_faults, sampling_faults
from rlhf.config.load import load_text
from rlhf.config.schema import BatchSection, Float, Int, SamplingSection, Section
from rlhf.data.jsonl import read_jsonl
from rlhf.data.mix import EpochOrder, PromptSource
from rlhf.data.prompts import drop_empty, drop_overlong
from rlhf.data.sources import Row
from rlhf.data.tokenizer import load_tokenizer
from rlhf.dist.layout import LayoutError, TrainLayout, division_faults
from rlhf.dist.stop import consensus
from rlhf.mcore.logprobs import HeadSettings, linear_logprobs
from rlhf.mcore.stream import keep_whole
from rlhf.packing import Budget, SequenceCost, schedule_microbatches
from rlhf.rollout.collect import response_mask, to_trajectory
from rlhf.rollout.engine import Completion
from rlhf.types import MicroBatch, Prompt, Status, Trajectory
from tests.helpers.tiny_models import tiny_tokenizer

Case = dict[str, Any]


def _floats(values: list[Any]) -> torch.Tensor:
    return torch.tensor([math.nan if v == "NaN" else float(v) for v in values])


# --- configuration -------------------------------------------------------------------------------


def _type(declared: Any) -> Any:
    if isinstance(declared, dict):
        return _model(declared)
    if declared.startswith("list["):
        return list[_type(declared[5:-1])]  # type: ignore[misc]
    if declared.startswith("optional["):
        return _type(declared[9:-1]) | None
    return {"float": Float, "int": Int, "bool": bool, "str": str}[declared]


def _model(schema: dict[str, Any]) -> type[Section]:
    fields: dict[str, Any] = {name: (_type(kind), ...) for name, kind in schema.items()}
    return create_model("Declared", __base__=Section, **fields)


def yaml_typed_load(case: Case) -> Case:
    return {"values": load_text(_model(case["schema"]), case["yaml"], "case.yaml").model_dump()}


def env_in_config(case: Case) -> Case:
    model = _model({"field": case["field_type"]})
    loaded = load_text(model, "", "environment", [f"field={case['env_value']}"])
    return {"value": loaded.model_dump()["field"]}


def parallel_validate(case: Case) -> Case:
    given = {k: case[k] for k in ("world", "tp", "pp", "cp", "ep", "etp") if k in case}
    faults = []
    if "heads" in case:
        faults += division_faults("train.tp", case["tp"], {"attention heads": case["heads"]})
    if "experts" in case:
        faults += division_faults("train.ep", case.get("ep", 1), {"experts": case["experts"]})
    try:
        layout = TrainLayout(**given)
    except LayoutError as error:
        return {"valid": False, "faults": faults + error.faults}
    if faults:
        return {"valid": False, "faults": faults}
    return {"valid": True, "dp": layout.dp, "edp": layout.edp}


def batch_validate(case: Case) -> Case:
    updates = case["prompts"] * case["n"] / case["mini"]
    try:
        batch = BatchSection(
            prompts_per_step=case["prompts"],
            samples_per_prompt=case["n"],
            updates_per_step=updates,
        )
    except ValueError:
        return {"valid": False}
    sizes = (batch.prompts_per_step, batch.samples_per_prompt, batch.updates_per_step)
    if list(batch_faults(*sizes, case["dp"])):
        return {"valid": False}
    return {"valid": True, "updates": sizes[2], "per_rank": case["mini"] // case["dp"]}


# --- data ----------------------------------------------------------------------------------------


def jsonl_read(case: Case) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_bytes(case["text"].encode("utf-8"))
        return {"records": len(read_jsonl(file)), "errors": []}


def bos_count(case: Case) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer().save_pretrained(folder)
        file = Path(folder) / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({**settings, "add_bos_token": case["tokenizer_adds_bos"]}))
        tokenizer = load_tokenizer(folder)
        text = "<bos>2+2?" if case["rendered_starts_with_bos"] else "2+2?"
        return {"bos_tokens": tokenizer.encode(text).count(tokenizer.bos_id)}


def overlong_prompt(case: Case) -> Case:
    kept = drop_overlong(case["prompt_lengths"], case["max_prompt_length"])
    every = range(len(case["prompt_lengths"]))
    return {"kept": kept, "dropped": [i for i in every if i not in kept]}


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def empty_prompt(case: Case) -> Case:
    rows = [Row(f"row {i}", i, text, "") for i, text in enumerate(case["prompts"])]
    handler, logger = _Warnings(), logging.getLogger("rlhf.data.prompts")
    logger.addHandler(handler)
    try:
        kept = {row.number for row in drop_empty(rows)}
    finally:
        logger.removeHandler(handler)
    dropped = [row.number for row in rows if row.number not in kept]
    named = all(f"row {i}" in " ".join(handler.messages) for i in dropped)
    return {"dropped": dropped, "warned": named}


def dataloader_resume(case: Case) -> Case:
    """A short last batch is filled from the next epoch: its part of this epoch is compared."""
    size = case["batch_size"]
    order = EpochOrder(case["dataset_size"], "0", case["shuffle"])
    whole = size if case["drop_last"] else 1
    draws = order.draws(case["batches_consumed"] * size, size, whole)
    epoch = draws[0].epoch
    return {"epoch": epoch, "next_batch": [d.row for d in draws if d.epoch == epoch]}


def sampler_partition(case: Case) -> Case:
    num, ranks = case["dataset_size"], case["dp"]
    prompts = [Prompt(str(i), "d", "", (i,), "") for i in range(num)]
    orders = [
        [p.uid for p in PromptSource([prompts], [1.0], seed=seed).take(0, num)]
        for seed in case["seed_by_rank"]
    ]
    shares = [set(order[rank::ranks]) for rank, order in enumerate(orders)]
    union = set().union(*shares)
    return {
        "union_size": len(union),
        "overlap": sum(map(len, shares)) - len(union),
        "same_permutation_on_all_ranks": all(order == orders[0] for order in orders),
    }


# --- log-probabilities ---------------------------------------------------------------------------


def _logprob(logits: list[float], token: int, temperature: float, num_columns: int) -> float:
    """A head of hidden size 1 whose weight is the logits."""
    settings = HeadSettings(
        temperature=temperature, first_column=0, num_columns=num_columns, chunk_rows=1, fp32=True
    )
    weight = torch.tensor(logits)[:, None]
    row, target = torch.tensor([0]), torch.tensor([token])
    out, _ = linear_logprobs(torch.ones(1, 1), weight, row, target, settings)
    return float(out)


def token_logprob(case: Case) -> Case:
    _refuse_truncation(case["top_p"], case["top_k"], refused=False)
    logits = case["logits"]
    return {"logprob": _logprob(logits, case["token"], case["temperature"], len(logits))}


def padded_vocab_logprob(case: Case) -> Case:
    """The ranks of a TP group hold these columns side by side; tests/dist has the real group."""
    return {"logprob": _logprob(case["logits_padded"], case["token"], 1.0, case["real_vocab"])}


def truncated_logprob(case: Case) -> Case:
    """The configuration refuses to sample so; both sides then are the full distribution."""
    _refuse_truncation(case["top_p"], case["top_k"], refused=True)
    logits = [math.log(p) for p in case["probs"]]
    return {"full_vocab_logprob": _logprob(logits, case["token"], 1.0, len(logits))}


def _refuse_truncation(top_p: float, top_k: int, *, refused: bool) -> None:
    """``top_k`` 0 is "all tokens" in the cases, -1 in a configuration."""
    faults = list(sampling_faults(SamplingSection(top_p=top_p, top_k=top_k or -1)))
    assert bool(faults) == refused, (top_p, top_k, faults)


def packed_labels_(case: Case) -> Case:
    """The token that each row's hidden state is asked for, when all that can be are trained."""
    borders = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
    tokens = torch.tensor(case["input_ids"])
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[borders[:-1].long()] = False
    stream = keep_whole(MicroBatch(tokens, torch.zeros_like(tokens), mask, borders, {}))
    labels: list[int | None] = [None] * len(tokens)
    rows = stream.needed[stream.source].tolist()
    for row, target in zip(rows, stream.targets.tolist(), strict=True):
        labels[row] = target
    return {"labels": labels}


def response_mask_(case: Case) -> Case:
    mask = response_mask(len(case["ids"]), 0, case["generated_length"])
    return {"mask": [int(m) for m in mask]}


def _trajectory(prompt_ids: list[int], generated: list[int]) -> Trajectory:
    prompt = Prompt("d/0", "d", "", tuple(prompt_ids), "")
    done = Completion(
        key=0,
        token_ids=generated,
        logprobs=[-1.0] * len(generated),
        status=Status.STOPPED,
        version=0,
    )
    return to_trajectory(prompt, 0, done)


def token_fidelity(case: Case) -> Case:
    if "turn1_generated_ids" in case:
        trajectory = _trajectory([1], case["turn1_generated_ids"])
        return {"train_ids": trajectory.tokens[trajectory.loss_mask].tolist()}
    trajectory = _trajectory(case["prompt_ids"], [])
    return {
        "train_ids": trajectory.tokens.tolist(),
        "lengths_match": len(trajectory.rollout_logprobs) == case["logprobs_len"],
    }


# --- losses --------------------------------------------------------------------------------------


def masked_mean_(case: Case) -> Case:
    """As a token-mean loss of one sequence."""
    mask = torch.tensor(case["mask"]).float()
    (weight,) = token_weights([int(mask.sum())], "token-mean")
    value = float(weighted_sum(_floats(case["values"]), mask * weight))
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
    rewards, values = _floats(case["rewards"]), _floats(case["values"])
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
    shards = [_floats(shard) for shard in case["shards"]]
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
            losses = torch.cat([_floats(values) for values, _ in micro])
            weight = torch.cat([torch.tensor(mask).float() * next(weights) for _, mask in micro])
            total += float(weighted_sum(losses, weight))
    return {"global_loss": total}


# --- batches, checkpoints, stopping --------------------------------------------------------------


def pack_schedule(case: Case) -> Case:
    budget = Budget(
        tokens=case["cap"], align=case.get("align", 1), multiple=case["multiple_per_rank"]
    )
    schedule = schedule_microbatches(case["lengths"], case["dp"], budget, SequenceCost(1.0, 0.0))
    return {"schedule": schedule}


def ckpt_resume_select(case: Case) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        for entry in case["dirs"]:
            step = Path(folder) / f"step_{entry['step']}"
            step.mkdir()
            if entry["complete"]:
                (step / COMPLETE).write_text("{}")
        return {"resume": select_resume(complete_steps(Path(folder)))}


def ckpt_retention(case: Case) -> Case:
    complete, keep = case["complete"], case["keep"]
    return {
        "delete_before_pending_is_durable": select_delete(complete, keep),
        "delete_after": select_delete([*complete, case["pending"]], keep),
    }


def stop_consensus(case: Case) -> Case:
    agreed = consensus(case["flags_by_rank"])
    return {"stop_on_every_rank": bool(agreed)}


OPS: dict[str, Callable[[Case], Case]] = {
    "yaml_typed_load": yaml_typed_load,
    "env_in_config": env_in_config,
    "parallel_validate": parallel_validate,
    "batch_validate": batch_validate,
    "jsonl_read": jsonl_read,
    "bos_count": bos_count,
    "overlong_prompt": overlong_prompt,
    "empty_prompt": empty_prompt,
    "dataloader_resume": dataloader_resume,
    "sampler_partition": sampler_partition,
    "token_logprob": token_logprob,
    "truncated_logprob": truncated_logprob,
    "padded_vocab_logprob": padded_vocab_logprob,
    "packed_labels": packed_labels_,
    "response_mask": response_mask_,
    "token_fidelity": token_fidelity,
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
    "pack_schedule": pack_schedule,
    "ckpt_resume_select": ckpt_resume_select,
    "ckpt_retention": ckpt_retention,
    "stop_consensus": stop_consensus,
}

BEHAVIOUR: dict[tuple[str, str], str] = {
    (
        "stop_consensus",
        "at_step",
    ): "tests/e2e/test_failures.py::test_a_signal_saves_and_leaves_nothing",
    (
        "truncated_logprob",
        "kept",
    ): "tests/unit/test_config_check.py::test_impossible_combinations_are_refused_by_name",
    (
        "truncated_logprob",
        "renormalised_logprob",
    ): "tests/unit/test_config_check.py::test_impossible_combinations_are_refused_by_name",
}
"""(operation, expected key) that no function answers -> the test of the behaviour that proves it.

A truncated distribution is refused, so nothing is kept of one and nothing is renormalised.
"""

WAITING: dict[str, tuple[str, ...]] = {
    "rewards for mathematics": ("math_reward", "boxed_extract", "gsm8k_extract"),
    "starting under Slurm on several nodes": (
        "slurm_nodelist",
        "slurm_tasks_per_node",
        "slurm_rank_env",
        "port_plan",
    ),
    "more algorithms: leave-one-out, length penalty": ("rloo_advantage", "overlong_penalty"),
    "context parallelism": ("cp_invariance", "cp_zigzag"),
    "mixture-of-experts families and the layouts of large models": (
        "biased_topk",
        "replayed_expert_weights",
        "route_padding",
        "expert_global_id",
        "fused_expert_layout",
        "fp8_scale_shape",
        "mtp_name",
        "bucket_plan",
        "qkv_unfuse",
        "gate_up_unfuse",
        "gate_up_reshard",
        "kv_head_by_rollout_rank",
        "pp_layer_ids",
        "vocab_pad",
        "hf_index_check",
        "hf_export_keys",
        "hf_export_coverage",
        "optimizer_reshard",
    ),
    "time-slicing of device memory": (
        "phase_peak_memory",
        "kv_cache_validity",
        "engine_state_machine",
        "ipc_refcount",
        "host_pinned_peak",
    ),
}
"""What has to be built -> the operations that it will map."""
