"""Seconds of every phase of a step, by what bounds it. Pure: job, constants and load in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.dist.layout import TrainLayout
from rlhf.memory.table import Span
from rlhf.planner.arithmetic import layer_counts, num_params
from rlhf.planner.links import GIGA
from rlhf.planner.load import Load, PhaseTime
from rlhf.planner.memory import Job, Machine
from rlhf.planner.rollout_time import Served, rollout_time
from rlhf.planner.speeds import Speeds
from rlhf.planner.train_time import STATE_BYTES, Trained, scoring_time, update_time
from rlhf.weights.model_shape import ModelShape

SAVE = Span("SAVE")


@dataclass(frozen=True, slots=True)
class Moved:
    """Seconds in which weights travel, as ``rlhf explain`` predicts them from the plan."""

    reshard_s: float
    restore_s: float


def step_times(
    job: Job,
    speeds: Speeds,
    load: Load,
    machine: Machine,
    kv_tokens: int,
    moved: Moved | None = None,
) -> Mapping[Span, PhaseTime]:
    """Every phase that a step has, in its order; SAVE is that of one checkpoint.

    Args:
        kv_tokens: of an attention group's cache, as the ledger has it.
        moved: None: estimated from bytes, ``engine shard / link``, for comparing many layouts.
    """
    out = {
        Span("ROLLOUT"): rollout_time(served(job, machine, kv_tokens), load, speeds),
        Span("PACK"): PhaseTime({"packing": load.answers * speeds.answer_pack_s}),
    }
    sliced = job.memory.time_slice == "all"
    for role, shape in _scored(job).items():
        held = trained(job, machine, shape, head=role in ("actor", "reference"))
        parts = dict(scoring_time(held, load, speeds).parts)
        if sliced and role != "actor":
            shard = train_shard_bytes(shape, job.train_layout, job.itemsize)
            parts["from host"] = shard / (speeds.pcie_gbs * GIGA)
        out[Span("SCORE", role)] = PhaseTime(parts)
    if job.critic is not None:
        critic = trained(job, machine, job.critic, head=False)
        out[Span("UPDATE", "critic")] = update_time(critic, load, speeds)
    actor = trained(job, machine, job.shape, head=True)
    out[Span("UPDATE", "actor")] = update_time(actor, load, speeds)
    out[SAVE] = _save_time(job, speeds, machine)
    travel = _estimated(job, speeds, machine) if moved is None else moved
    out[Span("RESHARD")] = PhaseTime({"wire": travel.reshard_s, "overhead": speeds.reshard_s})
    if sliced:
        out[Span("RESTORE")] = PhaseTime({"wire": travel.restore_s, "overhead": speeds.reshard_s})
    out[Span("SWITCH")] = PhaseTime({"edges": speeds.switch_s})
    return out


def step_seconds(times: Mapping[Span, PhaseTime], load: Load) -> float:
    """Of a step; a checkpoint counts with its share."""
    total = sum(took.seconds for span, took in times.items() if span != SAVE)
    return total + (times[SAVE].seconds / load.save_every if load.save_every else 0.0)


def tokens_per_gpu_s(times: Mapping[Span, PhaseTime], load: Load, gpus: int) -> float:
    """Prompt and answer tokens that a step trains, per second and GPU."""
    return load.tokens / step_seconds(times, load) / gpus


def served(job: Job, machine: Machine, kv_tokens: int) -> Served:
    """The actor in its engines."""
    return Served(
        shape=job.shape,
        layout=job.rollout_layout,
        itemsize=job.itemsize,
        prefix_cache=job.rollout.prefix_cache,
        kv_tokens=kv_tokens,
        gpus_per_node=machine.gpus_per_node,
    )


def trained(job: Job, machine: Machine, shape: ModelShape, *, head: bool) -> Trained:
    """A model on the training grid."""
    return Trained(
        shape=shape,
        layout=job.train_layout,
        train=job.train,
        itemsize=job.itemsize,
        fp32_head=job.model.fp32_head,
        head=head,
        on_host=job.memory.optimizer == "host",
        gpus_per_node=machine.gpus_per_node,
    )


def _scored(job: Job) -> dict[str, ModelShape]:
    """The models that score, in the order of a step."""
    found: dict[str, ModelShape | None] = {
        "reward_model": job.reward_model,
        "actor": job.shape,
        "reference": job.shape if job.reference else None,
        "critic": job.critic,
    }
    return {role: shape for role, shape in found.items() if shape is not None}


def train_shard_bytes(shape: ModelShape, layout: TrainLayout, itemsize: int) -> float:
    """Of a rank's weights in training, in the mean."""
    counts = layer_counts(shape, [range(shape.num_layers)])
    experts = sum(count * work.num_experts * work.expert_params for work, count in counts)
    dense = num_params(shape) - experts
    shard = dense / layout.tp + experts / (layout.expert_tp * layout.ep)
    return shard * itemsize / layout.pp


def _save_time(job: Job, speeds: Speeds, machine: Machine) -> PhaseTime:
    """Weights, masters and moments of what is trained, written by all nodes at once."""
    elements = sum(num_params(s) for s in (job.shape, job.critic) if s is not None)
    nodes = -(-job.train_layout.world // machine.gpus_per_node)
    num_bytes = elements * (job.itemsize + STATE_BYTES)
    return PhaseTime({"disk": num_bytes / nodes / (speeds.disk_gbs * GIGA), "start": speeds.save_s})


def _estimated(job: Job, speeds: Speeds, machine: Machine) -> Moved:
    """Without a plan: all of a shard comes from other ranks, over the NIC what a node lacks, once.

    A node needs the shards of its engines' ranks, copies of the same rectangle once.
    """
    params, world = num_params(job.shape) * job.itemsize, job.train_layout.world
    engines = job.rollout_layout
    nodes = -(-world // machine.gpus_per_node)
    spread = min(engines.engine_size, machine.gpus_per_node)
    per_node = params * min(1.0, spread / engines.engine_size)
    inside = params / engines.engine_size / (speeds.nvlink_gbs * GIGA)
    per_gpu = per_node / machine.gpus_per_node if nodes > 1 else 0.0
    reshard = max(inside, per_gpu * (1 - 1 / nodes) / (speeds.nic_gbs * GIGA))
    shard = train_shard_bytes(job.shape, job.train_layout, job.itemsize)
    speed = speeds.nic_gbs if nodes > 1 else speeds.nvlink_gbs
    return Moved(reshard, shard / (speed * GIGA))
