"""What a phase needs at least: a cheap bound, for leaving out what cannot fit. Pure.

Matrices only, without padding, of the fullest pipeline stage: never more than the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.memory.table import Region, Span, residency
from rlhf.planner.activations import pass_bytes
from rlhf.planner.arithmetic import layer_counts, outer_params
from rlhf.planner.engine_memory import kv_token_bytes
from rlhf.planner.memory import Job, Machine
from rlhf.planner.rollout_time import Served, engine_params
from rlhf.planner.train_time import GRADIENT_BYTES, STATE_BYTES
from rlhf.weights.model_shape import ModelShape

MASTER_BYTES = 4


def least_bytes(job: Job, machine: Machine, *, any_cache: bool = False) -> dict[Span, float]:
    """By phase, on the stage that needs most.

    Args:
        any_cache: the KV cache may be as small as one sequence; else it is what the engine's share
            of the device leaves.
    """
    spans = residency(job.memory, job.roles, num_updates=job.num_updates).held
    stages = [_regions(job, machine, pp, any_cache=any_cache) for pp in range(job.train_layout.pp)]
    return {
        span: max(sum(regions.get(region, 0.0) for region in held) for regions in stages)
        for span, held in spans.items()
    }


def cannot_fit(job: Job, machine: Machine, *, any_cache: bool = False) -> bool:
    """A phase needs more than a GPU has, whatever else holds."""
    found = least_bytes(job, machine, any_cache=any_cache)
    return any(size > machine.gpu_bytes for size in found.values())


def least_kv_bytes(job: Job) -> float:
    """Of one sequence, on the rank with fewest layers."""
    one = min(kv_token_bytes(job.shape, job.rollout_layout, job.itemsize))
    return one * (job.rollout.kv_tokens or job.longest_tokens)


def _regions(job: Job, machine: Machine, pp: int, *, any_cache: bool) -> Mapping[Region, float]:
    layout, itemsize = job.train_layout, job.itemsize
    passes = pass_bytes(job.shape, layout, job.model, job.train, itemsize)
    rank = layout.rank(pp=pp)
    out = {
        Region.WINDOWS: 2.0 * job.window_bytes,
        Region.SCORING: float(passes.scoring[rank]),
        Region.TRAINING: float(passes.training[rank]),
        Region.LOGITS: float(passes.head[rank]),
        Region.OTHER: float(machine.other_bytes),
    }
    out |= _trained(job, job.shape, pp, (Region.ACTOR, Region.GRADIENTS, Region.OPTIMIZER))
    if job.reference:
        out[Region.REFERENCE] = out[Region.ACTOR]
    if job.critic is not None:
        regions = (Region.CRITIC, Region.CRITIC_GRADIENTS, Region.CRITIC_OPTIMIZER)
        out |= _trained(job, job.critic, pp, regions)
    engine = Served(job.shape, job.rollout_layout, itemsize, True, 1, machine.gpus_per_node)
    stages = job.rollout_layout.pp
    out[Region.ENGINE] = engine_params(engine) * engine.weight_bytes / stages
    static = job.rollout.mem_fraction * machine.gpu_bytes
    if any_cache or job.rollout.kv_tokens is not None or stages > 1:
        out[Region.KV_CACHE] = least_kv_bytes(job)
    else:  # less than a token's bytes is left over; the rank with most has the whole share
        token = max(kv_token_bytes(job.shape, job.rollout_layout, itemsize))
        out[Region.KV_CACHE] = max(0.0, static - out[Region.ENGINE] - token)
    return out


def _trained(
    job: Job, shape: ModelShape, pp: int, regions: tuple[Region, Region, Region]
) -> dict[Region, float]:
    """Weights, gradients and optimizer state of a stage; embedding and head are left out."""
    layout = job.train_layout
    chunks = [layout.layers(shape.num_layers, pp, v) for v in range(layout.vpp)]
    counts = layer_counts(shape, chunks)
    dense = sum(work.dense_params * count for work, count in counts) / layout.tp
    if pp == 0:
        dense += outer_params(shape) / layout.tp
    routed = sum(work.num_experts * work.expert_params * count for work, count in counts)
    experts = routed / (layout.expert_tp * layout.ep)
    replicas = layout.dp * layout.cp
    owned = dense / replicas + experts / (layout.edp if layout.ep > 1 else replicas)
    state = owned * (STATE_BYTES if job.itemsize != 4 else STATE_BYTES - MASTER_BYTES)
    if job.memory.optimizer == "host":
        state = 0.0  # two buffers of a state's chunks are left out
    params = dense + experts
    return dict(zip(regions, (params * job.itemsize, params * GRADIENT_BYTES, state), strict=True))
