"""``rlhf plan --solve``, and the layouts of ``train: auto`` and ``rollout: auto`` before a run."""

from __future__ import annotations

import json
import os
import subprocess
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.faults import ConfigError
from rlhf.config.schema import (
    BatchSection,
    Config,
    DataSection,
    JsonlSource,
    MemorySection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    TrainSection,
)
from rlhf.dist.device import has_gpu
from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.explain import DTYPE_BYTES, MOST_RANKS, Request, explained
from rlhf.weights.find_model import find_model

if TYPE_CHECKING:
    from rlhf.planner.candidates import Fixed
    from rlhf.planner.load import Load
    from rlhf.planner.memory import Job, Machine
    from rlhf.planner.solve import Solution
    from rlhf.planner.speeds import Speeds
    from rlhf.planner.step_time import Moved

MEMORY_OPTIONS = ("time_slice", "optimizer")
CPU_SHARE = 0.8
"""Of a machine's memory, for all ranks without a GPU together."""
CPU_OTHER_BYTES = 10**9
"""Of a rank and its engine without a GPU: programs and their libraries."""
GPU_OTHER_BYTES = 8 * 10**9


def is_auto(config: Config) -> bool:
    """Layouts are to be chosen."""
    return config.train.auto or config.rollout.auto


def fixed_keys(config: Config, *, built_only: bool) -> Fixed:
    """What the configuration gives: all keys of a section without auto, else those written."""
    from rlhf.planner.candidates import Fixed

    def given(section: TrainSection | RolloutSection) -> frozenset[str]:
        keys = type(section).model_fields
        return frozenset(section.model_fields_set if section.auto else keys) - {"auto"}

    return Fixed(given(config.train), given(config.rollout), built_only)


def resolved(config: Config, world: int, local: int, source: str) -> tuple[Config, str]:
    """The configuration with layouts in place of ``auto``, and a line that says which.

    Only what a run can do today is considered, on this machine's memory. Every rank finds the same.

    Args:
        local: ranks on a node.

    Raises:
        ConfigError: no layout fits.
    """
    if not is_auto(config):
        return config, ""
    from rlhf.planner.job import load_of
    from rlhf.planner.solve import solve
    from rlhf.planner.solve_report import chosen_line
    from rlhf.planner.speeds import CPU, H100

    try:
        job = whole_job(config, world)
    except ValueError as error:
        raise ConfigError([f"{source}:model.path: {error}"]) from None
    fixed = fixed_keys(config, built_only=True)
    machine, speeds = machine_here(local), H100 if has_gpu() else CPU
    found = solve(job, speeds, load_of(config), machine, fixed)
    if not found.solutions:
        keys = " and ".join(k for k in ("train", "rollout") if getattr(config, k).auto)
        raise ConfigError(
            [
                f"{source}:{keys}: auto: no layout fits {world} ranks of "
                f"{machine.gpu_bytes / 1e9:.0f} GB, of {found.num_train} of training and "
                f"{found.num_rollout} of engines that the model allows; give more ranks, a "
                "smaller batch.prompts_per_step, or layouts of your own"
            ]
        )
    best = found.solutions[0]
    off: dict[str, Any] = {"auto": False}
    changed = config.model_copy(
        update={
            "train": best.job.train.model_copy(update=off),
            "rollout": best.job.rollout.model_copy(update=off),
        }
    )
    return changed, chosen_line(best.job, best.step_s, fixed)


def whole_job(config: Config, world: int) -> Job:
    """The job with nothing cut: where a search begins.

    Raises:
        ValueError: there is no such model.
    """
    from rlhf.planner.job import job_of

    shape = find_model(config.model.path)
    window = config.reshard.window_mib << 20
    return job_of(config, shape, TrainLayout(world), RolloutLayout(world), window)


def machine_here(local: int) -> Machine:
    """Memory of this machine's devices; without a GPU, the host's, shared by its ranks.

    Raises:
        ValueError: the devices do not tell.
    """
    from rlhf.planner.memory import Machine

    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not has_gpu():
        each = int(CPU_SHARE * host) // local
        return Machine(each, host, local, CPU_OTHER_BYTES)
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        smallest = min(int(line) for line in said.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ValueError(
            f"train: auto, rollout: auto: {' '.join(command)} does not tell the memory of GPUs "
            f"({error}); write the layouts that `rlhf plan CONFIG --solve` finds"
        ) from None
    return Machine(smallest * 2**20, host, local, GPU_OTHER_BYTES)


def solve_text(args: Namespace, machine: Machine, speeds: Speeds) -> tuple[str, bool]:
    """What ``rlhf plan --solve`` prints, and whether something fits.

    Raises:
        ValueError: the arguments contradict each other, or name what cannot be.
    """
    from rlhf.planner.candidates import Fixed
    from rlhf.planner.job import load_of
    from rlhf.planner.solve import solve
    from rlhf.planner.solve_report import Answer, answer_text

    config, ranks = _asked(args)
    name = Path(config.model.path).name
    job = whole_job(config, ranks)
    load = load_of(config, args.prompt_tokens, args.answer_tokens)
    fixed = fixed_keys(config, built_only=False) if is_auto(config) else Fixed()

    def moved(pair: Job) -> Moved:
        peers = config.reshard.max_peers
        return moved_seconds(_request(name, pair, machine, peers), pair, speeds)

    search = solve(job, speeds, load, machine, fixed, moved)
    own, fits = None, False
    if args.config is not None and not is_auto(config):
        own, fits = _own(config, job, speeds, load, machine)
    answer = Answer(name, machine, search, own, fits)
    if args.json:
        return json.dumps(answer.as_dict(), indent=2), answer.best is not None
    return answer_text(answer, ranks), answer.best is not None


def _asked(args: Namespace) -> tuple[Config, int]:
    from rlhf.config.load import load_config
    from rlhf.launch import default_ranks

    given = [f"--{name}" for name in ("train", "rollout") if getattr(args, name)]
    if given:
        raise ValueError(f"--solve: finds {' and '.join(given)}; leave them out")
    if args.window_mib is not None:
        raise ValueError(
            "--solve: say the window in CONFIG, reshard.window_mib; leave out --window-mib"
        )
    if args.config is not None and args.model is not None:
        raise ValueError(f"{args.config} says the model; leave out --model")
    if args.config is not None:
        config = load_config(args.config, args.overrides)
    elif args.model is not None and args.ranks is not None:
        config = default_config(args.model, args, sequence_parallel=False)
    else:
        raise ValueError("--solve: give CONFIG, or --model NAME --gpus N")
    for unit, value in (("gpus", args.ranks), ("gpus-per-node", args.ranks_per_node)):
        if value is not None and value < 1:
            raise ValueError(f"--{unit}: must be at least 1, is {value}")
    ranks = args.ranks or config.dist.ranks or default_ranks()
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"--gpus: must be at least 1 and at most {MOST_RANKS}, is {ranks}")
    return config, ranks


def default_config(model: str, args: Namespace, *, sequence_parallel: bool) -> Config:
    """GRPO without a reference, with a configuration's defaults; 64 prompts of 8 answers."""
    chosen = {key: value for key in MEMORY_OPTIONS if (value := getattr(args, key))}
    return Config(
        run_dir="runs",
        num_steps=1,
        model=ModelSection(path=model),
        train=TrainSection(sequence_parallel=sequence_parallel, recompute="full"),
        rollout=RolloutSection(deterministic=False, max_running_requests=512),
        memory=MemorySection(**chosen),
        data=DataSection(train=(JsonlSource(type="jsonl", name="any", path="any"),)),
        batch=BatchSection(prompts_per_step=64, samples_per_prompt=8),
        optimizer=OptimizerSection(lr=1e-6),
    )


def moved_seconds(request: Request, job: Job, speeds: Speeds) -> Moved:
    """Of a reshard, and of the way back where roles give their memory away: from their real plans.

    Engines that keep block fp8 cannot give back what was trained; then it comes from the host.
    """
    from rlhf.planner.step_time import Moved, train_shard_bytes
    from rlhf.reshard.explain import LinkSpeeds

    links = LinkSpeeds(speeds.nic_gbs, speeds.nvlink_gbs)
    reshard_s = explained(request, links)[0].predicted_s
    if job.memory.time_slice != "all":
        return Moved(reshard_s, 0.0)
    if request.rollout.quantization != "none":
        shard = train_shard_bytes(job.shape, job.train_layout, job.itemsize)
        return Moved(reshard_s, shard / (speeds.pcie_gbs * 1e9))
    return Moved(reshard_s, explained(request, links, back=True)[0].predicted_s)


def _request(name: str, job: Job, machine: Machine, max_peers: int) -> Request:
    return Request(
        name=name,
        shape=job.shape,
        train=job.train_layout,
        rollout=job.rollout_layout,
        ranks_per_node=machine.gpus_per_node,
        window_bytes=job.window_bytes,
        max_peers=max_peers,
        itemsize=DTYPE_BYTES[job.model.dtype],
    )


def _own(
    config: Config, whole: Job, speeds: Speeds, load: Load, machine: Machine
) -> tuple[Solution | None, bool]:
    """The configuration's own layouts on so many ranks, if they can be."""
    from rlhf.config.check import rollout_layout, train_layout
    from rlhf.planner.fit import misfits
    from rlhf.planner.memory import ledger
    from rlhf.planner.solve import solution_of
    from rlhf.weights.families import rollout_faults, train_faults

    world = whole.train_layout.world
    try:
        train, rollout = train_layout(config.train, world), rollout_layout(config.rollout, world)
        faults = [*train_faults(whole.shape, train), *rollout_faults(whole.shape, rollout)]
        job = replace(whole, train_layout=train, rollout_layout=rollout)
        held = None if faults else ledger(job, machine)
    except LayoutError:
        held = None
    if held is None:
        return None, False
    moved = moved_seconds(_request("", job, machine, config.reshard.max_peers), job, speeds)
    solution = solution_of(job, held, speeds, load, machine, moved)
    return solution, not misfits(job, held, machine)
