"""One folder for the temporary files of a run's engines, removed with everything in it.

SGLang leaves a socket or an empty file per channel in TMPDIR, and files in /dev/shm, even after an
orderly end. Those carry this folder's name, or the number of a process that is noted in it, so
whoever ends last can remove them.
A run that was killed leaves its folder; the next one on the machine removes it. Standard library
only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from types import TracebackType

PREFIX = "rlhf-run-"
SHARED_MEMORY = Path("/dev/shm")


class Scratch:
    """A folder that lives as long as the process that made it."""

    def __init__(self, parent: Path | None = None) -> None:
        """Remove what dead processes left in ``parent`` (None: TMPDIR); make a folder there."""
        parent = parent or Path(tempfile.gettempdir())
        for old in parent.glob(f"{PREFIX}*"):
            _remove_if_dead(old)
        self.folder, self._lock = _make_locked(parent)
        self._undo: list[Callable[[], object]] = []

    def lend(self, environ: MutableMapping[str, str]) -> None:
        """Processes started with ``environ`` put their temporary files here.

        What torch compiles is worth keeping and stays where it would have been.
        """
        kept = self.folder.parent / f"torchinductor_{os.getuid()}"
        environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
        before = environ.get("TMPDIR")
        environ["TMPDIR"] = str(self.folder)
        self._undo.append(
            partial(environ.pop, "TMPDIR", None)
            if before is None
            else partial(environ.__setitem__, "TMPDIR", before)
        )

    def close(self) -> None:
        """Remove it, take it back from whom it was lent to."""
        while self._undo:
            self._undo.pop()()
        _remove(self.folder)
        os.close(self._lock)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def lent_name() -> str:
    """The name of the folder that this process was lent; empty if it was not."""
    name = os.path.basename(os.environ.get("TMPDIR", ""))
    return name if name.startswith(PREFIX) else ""


def note_process() -> None:
    """What this process leaves in /dev/shm under its number goes with the folder."""
    if lent_name():
        Path(os.environ["TMPDIR"], f"process-{os.getpid()}").touch()


def _make_locked(parent: Path) -> tuple[Path, int]:
    """A new folder and the descriptor of its lock.

    Until it is locked, another run that starts takes it for a dead one's and removes it.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_if_dead(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, or another user's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Only when its processes are gone."""
    numbers = [mark.name.removeprefix("process-") for mark in folder.glob("process-*")]
    for pattern in (f"sglang_loads_{folder.name}-*", *(f"sgl_shm_*_{n}_*" for n in numbers)):
        for file in SHARED_MEMORY.glob(pattern):
            file.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
