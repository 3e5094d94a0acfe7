"""The plan of a run: what is predicted of its steps before the first one, kept in its folder."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.config.schema import Config
from rlhf.dist.device import has_gpu
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.explain import DTYPE_BYTES, Request, explained
from rlhf.memory.table import Region
from rlhf.planner.contract import Promise, metric_name
from rlhf.planner.job import job_of, load_of
from rlhf.planner.load import Load
from rlhf.planner.memory import Machine, ledger
from rlhf.planner.speeds import CPU, H100, Speeds, read_speeds
from rlhf.reshard.explain import LinkSpeeds
from rlhf.solved import moved_seconds
from rlhf.weights.model_shape import ModelShape

PLAN = "plan.json"
ELSEWHERE = frozenset({Region.ENGINE, Region.DERIVED, Region.KV_CACHE, Region.OTHER})
"""Memory of the engine's processes, and what is assumed."""


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


@dataclass(frozen=True, slots=True)
class Kept:
    """``plan.json``: the plan of a run as it was at its start."""

    speeds: dict[str, Any]
    calibration: str | None  # the file that they are from
    load: dict[str, Any]
    machine: dict[str, int]
    seconds: dict[str, float]  # of a step's phases, by name of the metric
    sent_bytes: int  # by all ranks together, in a reshard
    local_bytes: int
    memory_gib: dict[str, float]
    """Of a phase, of the fullest rank's trainer: without the engine's regions."""
    process_gib: float
    """Of the first rank's process before there was a model; it is in what a run measures."""

    def write(self, run_dir: Path) -> None:
        (run_dir / PLAN).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(run_dir: Path) -> Kept:
        """Raises:
        ValueError: there is none, or it is of another version.
        """
        path = run_dir / PLAN
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file; --compare needs the folder of a run that has started"
            )
        try:
            kept = Kept(**json.loads(path.read_text(encoding="utf-8")))
            Load(**kept.load), Machine(**kept.machine), Speeds(**kept.speeds)
            dict(kept.seconds), dict(kept.memory_gib)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: is not a plan that this version reads: {error}") from None
        return kept


def keep_promise(
    config: Config,
    shape: ModelShape,
    layouts: tuple[TrainLayout, RolloutLayout],
    ranks_per_node: int,
    process_gib: float,
) -> Kept:
    """The plan of a run that starts; plans its reshard.

    Raises:
        ConfigError: ``track.calibration`` names no calibration file.
    """
    machine = replace(this_machine(ranks_per_node), gpus_per_node=ranks_per_node)
    speeds = speeds_of(config.track.calibration)
    promise, load = promise_of(config, shape, layouts, machine, speeds)
    links = LinkSpeeds(speeds.nic_gbs, speeds.nvlink_gbs)
    moved = explained(request_of(config, shape, layouts, ranks_per_node), links)[0]
    held = ledger(promise.job, machine)
    memory: dict[str, float] = {}
    for span, regions in held.phases.items():
        mine = [held.regions[region] for region in regions - ELSEWHERE]
        most = max(map(sum, zip(*mine, strict=True)), default=0)
        memory[metric_name(span)] = most / 2**30
    return Kept(
        speeds=speeds.model_dump(),
        calibration=config.track.calibration,
        load=asdict(load),
        machine=asdict(machine),
        seconds=promise.seconds(speeds, load),
        sent_bytes=moved.moved_bytes_total,
        local_bytes=moved.local_bytes_total,
        memory_gib=memory,
        process_gib=process_gib,
    )
