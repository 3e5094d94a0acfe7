"""How a rank leaves a run early: saved when it was asked to stop, named when it failed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rlhf.dist.stop import EXIT_FAILED, Stopper, StopRequested

if TYPE_CHECKING:
    from rlhf.checkpoint import Checkpoints


def save_asked(checkpoints: Checkpoints, why: StopRequested, *, is_first: bool) -> None:
    """All ranks agreed to stop: save what is done, say how to go on. Collective, all ranks."""
    checkpoints.save()
    if is_first:
        print(
            f"stopped: {why}; {checkpoints.steps_done} steps are saved in "
            f"{checkpoints.folder}; the same command goes on from there",
            file=sys.stderr,
            flush=True,
        )


def end_failed(run_dir: str, stopper: Stopper, error: BaseException) -> NoReturn:
    """Name the failure once, keep its traceback in a file, end this process and what it started."""
    failure = stopper.fail(error)
    text = "".join(traceback.format_exception(error))
    place = ""
    try:
        path = Path(run_dir) / "errors" / f"rank{stopper.rank}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        place = f" (traceback: {path})"
    except OSError:  # no folder to write to: the traceback goes where the line goes
        print(text, file=sys.stderr)
    if failure.rank == stopper.rank:
        print(f"{failure}{place}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others; we end ourselves
    stopper.cleanup()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)
