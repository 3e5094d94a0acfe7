"""One rank of a run: ``torchrun --nproc-per-node N -m rlhf.train CONFIG [a.b=c ...]``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.faults import ConfigError
from rlhf.config.load import load_config
from rlhf.config.schema import Config
from rlhf.dist.stop import EXIT_FAILED, EXIT_STOPPED, Stopper, StopRequested
from rlhf.dist.world import World, read_world

if TYPE_CHECKING:
    from rlhf.run import Run

EXIT_USAGE = 2
Loop = Callable[["Run"], Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, run; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        world = read_world()
        config = load_config(args.config, args.overrides)
        loop = find_loop(args.loop)
    except (ConfigError, RuntimeError, ValueError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        return EXIT_USAGE
    return run_rank(config, world, loop)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m rlhf.train", description=__doc__)
    out.add_argument("config", help="YAML file")
    out.add_argument("overrides", nargs="*", metavar="a.b=c", help="changed settings")
    out.add_argument("--loop", metavar="FILE.py:FUNCTION", help="a loop of your own over the parts")
    return out


def find_loop(spec: str | None) -> Loop:
    """The function that ``file.py:function`` or ``package.module:function`` names.

    Raises:
        ValueError: there is no such file or function.
    """
    place, name = split_loop(spec or "rlhf.loop:train")
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


def split_loop(spec: str) -> tuple[str, str]:
    """(file or module, function) of a loop's name; the file is looked for, not run.

    Raises:
        ValueError: the name is not of that form, or there is no such file.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError(f"--loop {spec}: write FILE.py:FUNCTION")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"--loop {spec}: no file {Path(place).resolve()}")
    return place, name


def run_rank(config: Config, world: World, loop: Loop) -> int:
    """Build the run, hand it to the loop, end it the same way on all ranks."""
    stopper = Stopper(world.rank, config.dist.stop_grace_s)
    stopper.install()
    run: Run | None = None
    try:
        from rlhf.builder import build_on  # heavy imports start here

        run = build_on(config, world, stopper)
        loop(run)
        run.close()
    except StopRequested as why:
        return _stopped(run, why)
    except BaseException as error:  # noqa: BLE001  (named to all ranks, then the process ends)
        return _failed(config, world, stopper, error)
    return 0


def _stopped(run: Run | None, why: StopRequested) -> int:
    """All ranks agreed to stop: save what is done, say how to go on."""
    if run is None:
        return EXIT_STOPPED
    run.checkpoints.save()
    if run.ground.plan.world.is_first:
        print(
            f"stopped: {why}; {run.checkpoints.steps_done} steps are saved in "
            f"{run.checkpoints.folder}; the same command goes on from there",
            file=sys.stderr,
            flush=True,
        )
    run.close()
    return EXIT_STOPPED


def _failed(config: Config, world: World, stopper: Stopper, error: BaseException) -> int:
    """Name the failure once, keep its traceback in a file, end this process and what it started."""
    failure = stopper.fail(error)
    text = "".join(traceback.format_exception(error))
    folder = Path(config.run_dir) / "errors"
    place = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{world.rank}.txt"
        path.write_text(text, encoding="utf-8")
        place = f" (traceback: {path})"
    except OSError:  # no folder to write to: the traceback goes where the line goes
        print(text, file=sys.stderr)
    if failure.rank == world.rank:
        print(f"{failure}{place}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others; we end ourselves
    stopper.cleanup()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
