"""``rlhf plan``: does a job fit on its machines, before any of them is asked for."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.explain import Request, read_request

if TYPE_CHECKING:
    from rlhf.planner.memory import Job

GPU_GB, HOST_GB, OTHER_GB = 80.0, 2000.0, 8.0
MOST_GB = 1e9
"""More than any machine has: an exabyte."""
MEMORY_OPTIONS = ("time_slice", "optimizer")


def add_arguments(parser: ArgumentParser) -> None:
    """Of the command."""
    parser.add_argument("config", nargs="?", help="YAML file; or give --model")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="changed settings")
    parser.add_argument("--model", help="HF folder, config.json, or a name of configs/models/")
    parser.add_argument("--gpus", "--ranks", dest="ranks", type=int, help="of training and engines")
    parser.add_argument("--train", metavar="tp=8,pp=4,...", help="training layout")
    parser.add_argument("--rollout", metavar="tp=8,dp=8,...", help="engines' layout")
    parser.add_argument("--time-slice", choices=("engine", "all"), help="memory.time_slice")
    parser.add_argument("--optimizer", choices=("device", "host"), help="memory.optimizer")
    parser.add_argument("--gpus-per-node", dest="ranks_per_node", type=int, default=8)
    parser.add_argument("--gpu-mem-gb", type=float, default=GPU_GB, help=f"of a GPU ({GPU_GB:g})")
    parser.add_argument("--host-mem-gb", type=float, default=HOST_GB, help="of a node (2000)")
    parser.add_argument(
        "--other-gb",
        type=float,
        default=OTHER_GB,
        help=f"of a GPU, not counted here: context, communicators, graphs ({OTHER_GB:g})",
    )
    parser.add_argument("--window-mib", type=int, help="staging window")
    parser.add_argument("--json", action="store_true")


def run(args: Namespace) -> tuple[str, bool]:
    """What the command prints, and whether the job fits.

    Raises:
        ValueError: the arguments contradict each other, or name what cannot be.
    """
    from rlhf.planner.fit import misfits, smallest_change
    from rlhf.planner.memory import Machine, ledger
    from rlhf.planner.report import Plan, plan_text
    from rlhf.planner.train_memory import disk_bytes
    from rlhf.reshard.explain_text import rollout_words, train_words

    for key in ("gpu_mem_gb", "host_mem_gb", "other_gb"):
        if not 0 < (value := getattr(args, key)) < MOST_GB:
            words = key.replace("_", "-")
            raise ValueError(f"--{words}: must be above 0 and below {MOST_GB:g} GB, is {value:g}")
    request = read_request(args, "plan")
    machine = Machine(
        gpu_bytes=int(args.gpu_mem_gb * 1e9),
        host_bytes=int(args.host_mem_gb * 1e9),
        gpus_per_node=args.ranks_per_node,
        other_bytes=int(args.other_gb * 1e9),
    )
    job = _job_of_config(args, request) if args.config is not None else _job(args, request)
    found = ledger(job, machine)
    faults = misfits(job, found, machine)
    disk = disk_bytes(job.shape, job.itemsize)
    if job.critic is not None:  # saved too, not exported
        disk = replace(disk, state=disk.state + disk_bytes(job.critic, job.itemsize).state)
    change = smallest_change(job, machine) if faults else None
    plan = Plan(request.name, job, machine, found, disk, faults, change)
    if args.json:
        return json.dumps(plan.as_dict(), indent=2), plan.fits
    layouts = (train_words(request.train), rollout_words(request.rollout))
    return plan_text(plan, layouts), plan.fits


def _job_of_config(args: Namespace, request: Request) -> Job:
    from rlhf.config.load import load_config
    from rlhf.planner.job import job_of

    given = [f"memory.{k}={getattr(args, k)}" for k in MEMORY_OPTIONS if getattr(args, k)]
    if given:
        raise ValueError(f"{args.config}: write {' '.join(given)} behind it, without dashes")
    config = load_config(args.config, args.overrides)
    return job_of(config, request.shape, request.train, request.rollout, request.window_bytes)


def _job(args: Namespace, request: Request) -> Job:
    """GRPO without a reference, with the defaults of a configuration."""
    from rlhf.config.schema import (
        DataSection,
        MemorySection,
        ModelSection,
        RolloutSection,
        TrainSection,
    )
    from rlhf.planner.memory import Job

    chosen = {key: value for key in MEMORY_OPTIONS if (value := getattr(args, key))}
    rollout = RolloutSection()
    prompt = DataSection.model_fields["max_prompt_tokens"].default
    return Job(
        shape=request.shape,
        train_layout=request.train,
        rollout_layout=request.rollout,
        model=ModelSection(path=request.name),
        train=TrainSection(sequence_parallel=request.train.tp > 1, recompute="full"),
        rollout=rollout,
        memory=MemorySection(**chosen),
        window_bytes=request.window_bytes,
        longest_tokens=prompt + rollout.sampling.max_new_tokens,
    )
