"""``rlhf plan``: does a job fit on its machines and how long is a step, before any is asked for."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.explain import Request, read_request
from rlhf.solved import MEMORY_OPTIONS, default_config, moved_seconds, solve_text

if TYPE_CHECKING:
    from rlhf.planner.load import Load
    from rlhf.planner.memory import Job, Machine
    from rlhf.planner.report import Plan
    from rlhf.planner.speeds import Speeds

GPU_GB, HOST_GB, OTHER_GB = 80.0, 2000.0, 8.0
MOST_GB = 1e9
"""More than any machine has: an exabyte."""
SPEED_OPTIONS = {
    "nic_gbs": "nic_gbs",
    "nvlink_gbs": "nvlink_gbs",
    "gpu_tflops": "peak_tflops",
    "gpu_hbm_gbs": "hbm_gbs",
}
GIGA = 1e9


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
    parser.add_argument("--calibration", metavar="FILE", help="constants of the time model (H100)")
    parser.add_argument("--nic-gbs", type=float, help="GB/s per GPU between nodes, each way")
    parser.add_argument("--nvlink-gbs", type=float, help="GB/s per GPU in a node, each way")
    parser.add_argument("--gpu-tflops", type=float, help="dense bf16 TFLOP/s of a GPU")
    parser.add_argument("--gpu-hbm-gbs", type=float, help="GB/s of a GPU's memory")
    parser.add_argument("--prompt-tokens", type=float, help="in the mean (half of the longest)")
    parser.add_argument("--answer-tokens", type=float, help="in the mean (half of the longest)")
    parser.add_argument("--solve", action="store_true", help="find the layouts")
    parser.add_argument("--check", action="store_true", help="one line for each of some CONFIGs")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="CONFIG is the folder of a run: its plan against what it measured",
    )
    parser.add_argument("--json", action="store_true")


def run(args: Namespace) -> tuple[str, bool]:
    """What the command prints, and whether all that was asked for fits.

    Raises:
        ValueError: the arguments contradict each other, or name what cannot be.
    """
    from rlhf.planner.report import check_line, plan_text
    from rlhf.reshard.explain_text import rollout_words, train_words

    if args.solve:
        if args.check:
            raise ValueError("--solve, --check: give one of them")
        return solve_text(args, read_machine(args), read_speeds_of(args))
    if args.check:
        plans = {one.config: make_plan(one)[0] for one in _each_config(args)}
        fits = all(plan.fits for plan in plans.values())
        if args.json:
            return json.dumps({c: plan.as_dict() for c, plan in plans.items()}, indent=2), fits
        return "\n".join(check_line(plan, config) for config, plan in plans.items()), fits
    plan, request = make_plan(args)
    if args.json:
        return json.dumps(plan.as_dict(), indent=2), plan.fits
    layouts = (train_words(request.train), rollout_words(request.rollout))
    return plan_text(plan, layouts), plan.fits


def make_plan(args: Namespace) -> tuple[Plan, Request]:
    """Memory, seconds and verdict of one job.

    Raises:
        ValueError: as :func:`run`.
    """
    from rlhf.dist.layout import node_faults
    from rlhf.planner.fit import misfits, smallest_change
    from rlhf.planner.memory import ledger
    from rlhf.planner.report import Plan
    from rlhf.planner.step_time import step_times
    from rlhf.planner.time_report import Timing
    from rlhf.planner.train_memory import disk_bytes

    machine, speeds = read_machine(args), read_speeds_of(args)
    request = read_request(args, "plan")
    job, load = _job_of_config(args, request) if args.config is not None else _job(args, request)
    on_nodes = min(machine.gpus_per_node, job.train_layout.world)
    if wrong := list(node_faults(job.rollout_layout, on_nodes)):
        raise ValueError("; ".join(wrong))
    found = ledger(job, machine)
    faults = misfits(job, found, machine)
    disk = disk_bytes(job.shape, job.itemsize)
    if job.critic is not None:  # saved too, not exported
        disk = replace(disk, state=disk.state + disk_bytes(job.critic, job.itemsize).state)
    change = smallest_change(job, machine) if faults else None
    moved = moved_seconds(request, job, speeds)
    times = step_times(job, speeds, load, machine, found.kv_tokens, moved)
    timing = Timing(times, load, speeds, job.train_layout.world)
    return Plan(request.name, job, machine, found, disk, faults, change, timing), request


def read_machine(args: Namespace) -> Machine:
    """Where the job would run.

    Raises:
        ValueError: an impossible size.
    """
    from rlhf.planner.memory import Machine

    for key in ("gpu_mem_gb", "host_mem_gb", "other_gb"):
        if not 0 < (value := getattr(args, key)) < MOST_GB:
            words = key.replace("_", "-")
            raise ValueError(f"--{words}: must be above 0 and below {MOST_GB:g} GB, is {value:g}")
    if args.ranks_per_node < 1:
        raise ValueError(f"--gpus-per-node: must be at least 1, is {args.ranks_per_node}")
    return Machine(
        gpu_bytes=int(args.gpu_mem_gb * GIGA),
        host_bytes=int(args.host_mem_gb * GIGA),
        gpus_per_node=args.ranks_per_node,
        other_bytes=int(args.other_gb * GIGA),
    )


def read_speeds_of(args: Namespace) -> Speeds:
    """The calibration file's constants, or an H100's, with what single options say.

    Raises:
        ValueError: no such file, an unknown key, an impossible value.
    """
    from rlhf.planner.speeds import H100, changed_speeds, read_speeds

    speeds = H100 if args.calibration is None else read_speeds(args.calibration)
    changes = {key: getattr(args, option) for option, key in SPEED_OPTIONS.items()}
    if not any(value is not None for value in changes.values()):
        return speeds
    for option, value in ((o, getattr(args, o)) for o in SPEED_OPTIONS):
        if value is not None and not 0 < value < MOST_GB:
            words = option.replace("_", "-")
            raise ValueError(f"--{words}: must be above 0 and below {MOST_GB:g}, is {value:g}")
    return changed_speeds(speeds, changes)


def _each_config(args: Namespace) -> list[Namespace]:
    """One set of arguments for every configuration of ``--check``; overrides are for all."""
    if args.config is None:
        raise ValueError("--check: needs CONFIG, one or more")
    words = [args.config, *args.overrides]
    overrides = [word for word in words if "=" in word]
    configs = [word for word in words if "=" not in word]
    return [Namespace(**{**vars(args), "config": c, "overrides": overrides}) for c in configs]


def _job_of_config(args: Namespace, request: Request) -> tuple[Job, Load]:
    from rlhf.config.load import load_config
    from rlhf.planner.job import job_of, load_of

    given = [f"memory.{k}={getattr(args, k)}" for k in MEMORY_OPTIONS if getattr(args, k)]
    if given:
        raise ValueError(f"{args.config}: write {' '.join(given)} behind it, without dashes")
    config = load_config(args.config, args.overrides)
    job = job_of(config, request.shape, request.train, request.rollout, request.window_bytes)
    return job, load_of(config, args.prompt_tokens, args.answer_tokens)


def _job(args: Namespace, request: Request) -> tuple[Job, Load]:
    from rlhf.planner.job import job_of, load_of

    config = default_config(request.name, args, sequence_parallel=request.train.tp > 1)
    job = job_of(config, request.shape, request.train, request.rollout, request.window_bytes)
    return job, load_of(config, args.prompt_tokens, args.answer_tokens)
