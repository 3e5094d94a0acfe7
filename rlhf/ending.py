"""How a rank leaves a run early: saved when it was asked to stop, named when it failed."""

from __future__ import annotations

import io
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf.dist.stop import EXIT_FAILED, Stopper, StopRequested, say

if TYPE_CHECKING:
    from rlhf.checkpoint import Checkpoints


def outlive_stdout() -> None:
    """Go on when whoever reads standard output has gone (``rlhf doctor | head -1``)."""
    old = sys.stdout
    is_own = old is sys.__stdout__
    if old is None or not is_own:  # closed, or captured by a test
        return
    raw = _UntilClosed(old.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=bool(old.line_buffering),
    )


class _UntilClosed(io.FileIO):
    """Writes into nothing once the reader of a pipe has gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def save_asked(checkpoints: Checkpoints, why: StopRequested, *, is_first: bool) -> None:
    """All ranks agreed to stop: save what is done, say how to go on. Collective, all ranks."""
    checkpoints.save()
    if is_first:
        say(
            f"stopped: {why}; {checkpoints.steps_done} steps are saved in "
            f"{checkpoints.folder}; the same command goes on from there"
        )


def end_failed(run_dir: str, stopper: Stopper, error: BaseException) -> NoReturn:
    """Name the failure once, keep its traceback in a file, end this process and what it started."""
    failure = stopper.fail(error)
    stopper.claim_end()
    text = "".join(traceback.format_exception(error))
    place = ""
    try:
        path = Path(run_dir) / "errors" / f"rank{stopper.rank}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        place = f" (traceback: {path})"
    except OSError:  # no folder to write to: the traceback goes where the line goes
        say(text)
    if failure.told_by == stopper.rank:
        say(f"{failure}{place}")
        for note in getattr(error, "__notes__", ()):  # of memory, who had how much
            say(note)
    stopper.leave(EXIT_FAILED)
