"""The process grid of training: megatron's parallel state, built once per process.

Actor and reference share it. The default process group must exist; ``rlhf.builder`` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

from rlhf.dist.layout import TrainLayout


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's process groups and where it stands in them."""

    pp: Any
    cp: Any  # ranks that share the rows of each sequence
    dp: Any  # ranks that train other sequences; gradients are summed over dp and cp
    last_stage: int  # global rank of this pipeline's last stage
    is_last_stage: bool


def initialize(layout: TrainLayout, timeout_s: float, seed: int) -> Groups:
    """Build the groups of ``layout`` and seed the random states of this rank.

    Collective over all ranks of the default group, once per process (again after
    :func:`shutdown`).

    Raises:
        RuntimeError: the default group is missing or has another size than the layout.
    """
    if not torch.distributed.is_initialized():
        raise RuntimeError("parallel.initialize needs torch.distributed's default process group")
    world = torch.distributed.get_world_size()
    if world != layout.world:
        raise RuntimeError(f"the layout is for {layout.world} ranks, the process group has {world}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        distributed_timeout_minutes=timedelta(seconds=timeout_s) / timedelta(minutes=1),
    )
    megatron_random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return current_groups()


def current_groups() -> Groups:
    """The groups that :func:`initialize` made."""
    pp = parallel_state.get_pipeline_model_parallel_group()
    return Groups(
        pp=pp,
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        last_stage=torch.distributed.get_global_rank(pp, pp.size() - 1),
        is_last_stage=pp.rank() == pp.size() - 1,
    )


def shutdown() -> None:
    """Destroy the groups; the default group stays."""
    parallel_state.destroy_model_parallel()
