"""``rlhf rehearse``: does a job run, before any machine is asked for.

The user's configuration is checked at full size. Then the same layouts, roles, phases and engines
run for two steps on a few ranks of this machine, with a small random model of the same kind.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.dist.stop import EXIT_STOPPED
from rlhf.launch import EXIT_USAGE, default_ranks

if TYPE_CHECKING:
    from rlhf.config.schema import Config
    from rlhf.planner.memory import Machine
    from rlhf.planner.shrink_layout import Layouts
    from rlhf.planner.shrink_model import Layers
    from rlhf.rehearsal.folders import Model
    from rlhf.weights.model_shape import ModelShape

USUAL_RANKS = 4
CONFIG_NAME = "rehearsal.yaml"


def add_arguments(parser: ArgumentParser) -> None:
    """Of the command."""
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="changed settings")
    parser.add_argument(
        "--ranks",
        type=int,
        help=f"that run here; {USUAL_RANKS}, or as many as divide the job's, unless given",
    )
    parser.add_argument("--gpus", type=int, help="of the job, instead of dist.ranks")
    parser.add_argument("--gpu-mem-gb", type=float, default=80.0, help="of a GPU of the job (80)")
    parser.add_argument("--host-mem-gb", type=float, default=2000.0, help="of a node (2000)")
    parser.add_argument("--gpus-per-node", dest="ranks_per_node", type=int, default=8)
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, help="where the rehearsal runs and stays"
    )
    parser.add_argument("--loop", metavar="FILE.py:FUNCTION", help="a loop of your own")
    parser.add_argument("--resume", action="store_true", help="then also go on from the checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and end")


@dataclass(frozen=True, slots=True)
class _Job:
    """What the user has, read and checked."""

    source: str
    config: Config
    actor: Model
    critic: Model | None  # None: starts from the actor
    reward_model: Model | None
    layouts: Layouts

    @property
    def world(self) -> int:
        return self.layouts.train.world


def run(args: Namespace) -> int:
    """Print, rehearse, print; the exit status: 0 if it fits and runs, 1 if not.

    Raises:
        ValueError: the configuration is wrong, or the ranks cannot form smaller layouts.
    """
    from rlhf.preflight import check_loop

    machine = _machine(args)
    job = _read(args)
    ranks = _ranks(args, job.world)
    smaller, layers = _shrink(job, ranks)
    _check_keep(args.keep)
    if args.loop is not None:
        check_loop(args.loop)
    fits = _print_fit(args, job, machine)
    _print_axes(job, smaller)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="rlhf-rehearsal-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        config, path = _write(job, smaller, layers, folder)
    except ValueError:
        shutil.rmtree(folder)
        raise
    status = 0 if args.dry_run else _rehearse(config, path, args.loop, resume=args.resume)
    if args.keep is None and status == 0:
        shutil.rmtree(folder)
    else:
        print(f"kept       {folder}")
    if not fits:
        print("but it does not fit: see above, and `rlhf plan`")
    return 1 if status or not fits else 0


def _machine(args: Namespace) -> Machine:
    """That of the job, not this one."""
    from rlhf.plan import OTHER_GB, read_machine

    if args.gpus is not None and args.gpus < 1:
        raise ValueError(f"--gpus: must be at least 1, is {args.gpus}")
    return read_machine(Namespace(**vars(args), other_gb=OTHER_GB))


def _read(args: Namespace) -> _Job:
    """
    Raises:
        ConfigError: all faults of the job at full size.
    """
    from rlhf.config.check import job_faults, rollout_layout, train_layout
    from rlhf.config.faults import ConfigError
    from rlhf.config.load import load_config
    from rlhf.planner.shrink_layout import Layouts
    from rlhf.rehearsal.folders import actor_model, value_model

    config = load_config(args.config, args.overrides)
    if faults := [f"{args.config}:{fault}" for fault in _auto_faults(config)]:
        raise ConfigError(faults)
    key = "model.path"
    try:
        actor = actor_model(config)
        key, name = "critic.path", config.critic and config.critic.path
        critic = value_model(name) if name else None
        key, scorer = "reward_model.path", config.reward_model
        reward_model = value_model(scorer.path) if scorer else None
    except ValueError as error:
        raise ConfigError([f"{args.config}:{key}: {error}"]) from None
    world = args.gpus or config.dist.ranks or default_ranks()
    if faults := job_faults(config, actor.shape, world, args.config):
        raise ConfigError(faults)
    layouts = Layouts(train_layout(config.train, world), rollout_layout(config.rollout, world))
    job = _Job(args.config, config, actor, critic, reward_model, layouts)
    if faults := [f"{args.config}:{fault}" for fault in _model_faults(job)]:
        raise ConfigError(faults)
    return job


def _auto_faults(config: Config) -> Iterator[str]:
    """What a search would choose is of the machine where it is asked, which is not the job's."""
    for key, section in (("train", config.train), ("rollout", config.rollout)):
        if section.auto:
            yield (
                f"{key}: auto: a rehearsal needs the layout that is to be made small; write what "
                "`rlhf plan CONFIG --solve` finds for the job's machines"
            )


def _model_faults(job: _Job) -> Iterator[str]:
    """Of folders, where there are any, and of the models beside the actor."""
    from rlhf.preflight import check_engine_keys, value_shape_faults
    from rlhf.weights.families import full_shapes
    from rlhf.weights.hf_checkpoint import check_index
    from rlhf.weights.value_model import load_value_model

    if job.actor.folder is not None:
        check_engine_keys(job.actor.name, job.actor.shape, job.source)
        try:
            check_index(job.actor.folder, full_shapes(job.actor.shape))
        except ValueError as error:
            yield f"model.path: {error}"
    roles = (("critic.path", job.critic), ("reward_model.path", job.reward_model))
    for key, model in roles:
        if model is None:
            continue
        try:
            if model.folder is not None:
                load_value_model(model.folder, needs_head=key == "reward_model.path")
        except ValueError as error:
            yield f"{key}: {error}"
        layout = job.layouts.train
        faults = value_shape_faults(job.config, job.actor.shape, layout, model.name, model.shape)
        yield from (f"{key}: {fault}" for fault in faults)
        if key == "reward_model.path" and not model.has_head:
            yield f"{key}: {model.name} must be a sequence classifier with one label"


def _ranks(args: Namespace, world: int) -> int:
    from rlhf.dist.device import has_gpu

    gpus = default_ranks() if has_gpu() else None
    if args.ranks is None:
        most = min(gpus or USUAL_RANKS, USUAL_RANKS, world)
        return max(n for n in range(1, most + 1) if world % n == 0)
    if args.ranks < 1:
        raise ValueError(f"--ranks: must be at least 1, is {args.ranks}")
    if args.ranks > world:
        raise ValueError(
            f"--ranks: must be at most the {world} ranks of the job (dist.ranks, or --gpus), is "
            f"{args.ranks}"
        )
    if gpus and args.ranks > gpus:
        raise ValueError(f"--ranks: must be at most this machine's {gpus} GPUs, is {args.ranks}")
    return int(args.ranks)


def _check_keep(keep: Path | None) -> None:
    if keep is None:
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ValueError(f"--keep: {keep} must be a new or empty folder")
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--keep: {keep} cannot be made: {error}") from None


def _print_fit(args: Namespace, job: _Job, machine: Machine) -> bool:
    """At full size."""
    from rlhf.planner.fit import misfits
    from rlhf.planner.job import job_of
    from rlhf.planner.memory import ledger

    window_bytes = job.config.reshard.window_mib << 20
    layouts = job.layouts
    counted = job_of(job.config, job.actor.shape, layouts.train, layouts.rollout, window_bytes)
    found = misfits(counted, ledger(counted, machine), machine)
    print(f"{job.source} at full size, {job.world} ranks: layouts, batch and lengths hold")
    where = f"GPUs of {args.gpu_mem_gb:g} GB, hosts of {args.host_mem_gb:g} GB (`rlhf plan`)"
    print(f"  does not fit {where}:" if found else f"  fits {where}")
    for misfit in found:
        print(f"    {misfit}")
    return not found


def _shrink(job: _Job, ranks: int) -> tuple[Layouts, Layers]:
    from rlhf.planner.shrink_layout import shrink_layouts
    from rlhf.planner.shrink_model import shrink_layers

    smaller = shrink_layouts(job.layouts, ranks)
    return smaller, shrink_layers(job.actor.shape, job.layouts.train, smaller)


def _print_axes(job: _Job, smaller: Layouts) -> None:
    from rlhf.planner.shrink_layout import ranks_for_all, words_of_needs
    from rlhf.rehearsal.verdict import folded, table

    axes = job.layouts.axes(smaller)
    rows: list[tuple[str, Any, Any, str]] = [("ranks", job.world, smaller.train.world, "")]
    rows += [(a.name, a.configured, a.rehearsed, "" if a.kept else "not kept") for a in axes]
    print("\n".join(["", *table(rows)]))
    if lost := [axis.name for axis in axes if not axis.kept]:
        words = (
            f"{smaller.train.world} ranks cannot keep {', '.join(lost)}; "
            f"--ranks {ranks_for_all(job.layouts)} does ({words_of_needs(job.layouts)})"
        )
        print(folded("", words))


def _write(job: _Job, smaller: Layouts, layers: Layers, folder: Path) -> tuple[Config, Path]:
    """Models, tokenizer, rows and configuration."""
    from rlhf.config.load import dump_config
    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.dist.device import has_gpu
    from rlhf.planner.shrink import Place, dropped_keys, shrink_config
    from rlhf.rehearsal.few_rows import take_few
    from rlhf.rehearsal.folders import Folders
    from rlhf.rehearsal.verdict import folded

    config, gpu = job.config, has_gpu()
    folders = Folders(folder, layers, job.layouts, smaller)
    tokenizer, rows = folders.write_tokenizer(job.actor, config.rollout.sampling.stop)
    models = {"actor": job.actor, "critic": job.critic, "reward_model": job.reward_model}
    shapes: dict[str, ModelShape] = {
        role: folders.write(role, model, tokenizer, rows, config.model.dtype)
        for role, model in models.items()
        if model is not None
    }
    few = take_few(
        config.data, load_tokenizer(tokenizer), folder, own_tokens=job.actor.has_tokenizer
    )
    place = Place(
        run_dir=str(folder / "run"),
        model=str(folder / "actor"),
        critic=str(folder / "critic") if job.critic is not None else None,
        reward_model=str(folder / "reward_model") if job.reward_model is not None else None,
        data=few.data,
        gpu=gpu,
    )
    small = shrink_config(config, job.layouts, smaller, layers, place)
    path = folder / CONFIG_NAME
    path.write_text(dump_config(small), encoding="utf-8")
    _print_sizes(job, shapes["actor"], small)
    notes = [str(dropped) for dropped in dropped_keys(config, gpu)]
    if not job.actor.has_tokenizer:
        notes.append(f"tokenizer: {job.actor.name} comes with none: a token per byte stands in")
    if job.actor.folder is None:
        notes.append(f"model.path: {job.actor.name} has no weights here, which were not looked at")
    print("\n".join(["", *(folded("", note) for note in (*notes, *few.notes)), ""]), flush=True)
    return small, path


def _print_sizes(job: _Job, shape: ModelShape, small: Config) -> None:
    from rlhf.rehearsal.sizes import size_rows
    from rlhf.rehearsal.verdict import table

    rows = size_rows(job.config, small, job.actor.shape, shape)
    print("\n".join(["", *table(rows)]))


def _rehearse(config: Config, path: Path, loop: str | None, *, resume: bool) -> int:
    """Run, and say what has been shown; 0, or the status of the run that failed."""
    from rlhf.rehearsal.verdict import NOT_SHOWN, folded, read_verdict, resumed_words

    began = time.monotonic()
    lines: list[str] = []
    status = _start(path, loop)
    if not status:
        lines += read_verdict(Path(config.run_dir)).lines()
    if resume and not status:
        status = _start(path, loop, f"num_steps={config.num_steps + 1}")
        lines += [] if status else [resumed_words(Path(config.run_dir), config.num_steps)]
    seconds = time.monotonic() - began
    print("\n".join(["", *lines]))
    if status:
        ended = "was stopped" if status == EXIT_STOPPED else "failed"
        print(f"the rehearsal {ended} after {seconds:.0f} s, with exit status {status}: see above")
        return status
    print(folded("not shown", NOT_SHOWN))
    print(f"the rehearsal ran on {config.dist.ranks} ranks in {seconds:.0f} s")
    return 0


def _start(path: Path, loop: str | None, *overrides: str) -> int:
    """As ``rlhf train`` does."""
    from rlhf.config.load import load_config
    from rlhf.start import start

    try:
        config = load_config(path, overrides)
        own = ["--loop", loop] if loop is not None else []
        return start(config, str(path), [str(path), *overrides, *own])
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
