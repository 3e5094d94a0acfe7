"""The plan of a run: what is predicted of its steps before the first one."""

from __future__ import annotations

import os
import platform

from rlhf.config.schema import Config
from rlhf.dist.device import has_gpu
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.explain import DTYPE_BYTES, Request
from rlhf.planner.contract import Promise
from rlhf.planner.job import job_of, load_of
from rlhf.planner.load import Load
from rlhf.planner.memory import Machine, ledger
from rlhf.planner.speeds import CPU, H100, Speeds, read_speeds
from rlhf.weights.model_shape import ModelShape


def speeds_of(calibration: str | None) -> Speeds:
    """A calibration file's, or those that stand for a machine of this kind.

    Raises:
        ConfigError: the file is not there or wrong.
    """
    if calibration is not None:
        return read_speeds(calibration)
    return H100 if has_gpu() else CPU


def promise_of(
    config: Config,
    shape: ModelShape,
    layouts: tuple[TrainLayout, RolloutLayout],
    machine: Machine,
    speeds: Speeds,
) -> tuple[Promise, Load]:
    """Of a configuration that has been checked; plans its reshard."""
    from rlhf.plan import moved_seconds

    train, rollout = layouts
    request = request_of(config, shape, layouts, machine.gpus_per_node)
    job = job_of(config, shape, train, rollout, request.window_bytes)
    moved = moved_seconds(request, job, speeds)
    kv_tokens = ledger(job, machine).kv_tokens
    return Promise(job, machine, kv_tokens, moved, speeds), load_of(config)


def request_of(
    config: Config,
    shape: ModelShape,
    layouts: tuple[TrainLayout, RolloutLayout],
    ranks_per_node: int,
) -> Request:
    """What ``rlhf explain`` would be asked."""
    return Request(
        config.model.path,
        shape,
        *layouts,
        ranks_per_node,
        config.reshard.window_mib << 20,
        config.reshard.max_peers,
        DTYPE_BYTES[config.model.dtype],
    )


def this_machine(ranks: int) -> Machine:
    """A GPU of it; without one, a rank's part of the host's memory.

    Args:
        ranks: on this machine.
    """
    import torch

    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0).total_memory
        return Machine(gpu, host, torch.cuda.device_count(), other_bytes=gpu // 10)
    return Machine(host // ranks, host, ranks, other_bytes=host // ranks // 10)


def device_name() -> str:
    """Of the first GPU, or of the processor."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
