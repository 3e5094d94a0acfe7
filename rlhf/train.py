"""One rank of a run: ``torchrun --nproc-per-node N -m rlhf.train CONFIG [a.b=c ...]``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.load import load_config
from rlhf.config.schema import Config
from rlhf.dist.stop import EXIT_STOPPED, Stopper, StopRequested, say
from rlhf.dist.world import World, join_world
from rlhf.ending import end_failed, outlive_stdout
from rlhf.launch import EXIT_USAGE, LAUNCHER_PID
from rlhf.preflight import check, check_loop, check_nodes, notes
from rlhf.rollout.lifeline import die_with_parent
from rlhf.solved import resolved
from rlhf.types import Phase

if TYPE_CHECKING:
    from rlhf.run import Run

Loop = Callable[["Run"], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, run; returns the exit status."""
    outlive_stdout()
    args = parser().parse_args(argv)
    if LAUNCHER_PID in os.environ:
        die_with_parent(int(os.environ[LAUNCHER_PID]))
    try:
        world = join_world()
        config = load_config(args.config, args.overrides)
        config, chosen = resolved(config, world.size, world.local_size, args.config)
        shape = check(config, world.size, args.config)
        check_nodes(config, world, args.config)
        check_loop(args.loop)
    except (RuntimeError, ValueError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        return EXIT_USAGE
    if world.rank == 0:
        if chosen:
            print(chosen, file=sys.stderr)
        for note in notes(shape):
            print(f"{config.model.path}: {note}", file=sys.stderr)
    return run_rank(config, world, args.loop, record=not args.no_record, log_phases=args.log_phases)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m rlhf.train", description=__doc__)
    out.add_argument("config", help="YAML file")
    out.add_argument("overrides", nargs="*", metavar="a.b=c", help="changed settings")
    out.add_argument(
        "--loop",
        metavar="FILE.py:FUNCTION",
        default="rlhf.loop:train",
        help="a loop of your own over the parts",
    )
    out.add_argument("--no-record", action="store_true", help="read the run folder, write nothing")
    out.add_argument(
        "--log-phases", action="store_true", help="print a line when a phase begins, to stderr"
    )
    return out


def find_loop(spec: str) -> Loop:
    """The function that ``spec`` names, which :func:`rlhf.preflight.check_loop` has looked up.

    Runs the file or module: only after the stand-ins of a CPU machine are in place, as it may
    import megatron.

    Raises:
        ValueError: the name is not that of a function.
    """
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        found = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    loop = getattr(module, name, None)
    if not callable(loop):
        raise ValueError(f"--loop {spec}: {place} defines no function {name!r}")
    return loop


def run_rank(
    config: Config, world: World, loop: str, *, record: bool = True, log_phases: bool = False
) -> int:
    """Build the run, hand it to the loop, end it the same way on all ranks."""
    stopper = Stopper(world.rank, config.dist.stop_grace_s)
    stopper.install()
    run: Run | None = None
    try:
        from rlhf.builder import build_on  # heavy imports start here

        run = build_on(config, world, stopper, record=record)
        if log_phases:
            run.ground.gate.on_enter(partial(tell_phase, stopper))
        try:
            find_loop(loop)(run)
        except StopRequested as why:
            run.save_asked(why)
            return EXIT_STOPPED
        run.close()
    except StopRequested:
        return EXIT_STOPPED  # before there was anything to save
    except BaseException as error:  # noqa: BLE001  (named to all ranks, then the process ends)
        end_failed(config.run_dir, stopper, error)
    return 0


def tell_phase(stopper: Stopper, phase: Phase) -> None:
    """A line in the rank's log: what follows belongs to this phase."""
    say(
        f"{time.strftime('%H:%M:%S')} rank {stopper.rank}, phase {phase}, "
        f"step {stopper.position.step}"
    )


if __name__ == "__main__":
    sys.exit(main())
