"""A folder that appears complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target`` to write into; it becomes ``target`` when all went well.

    One process writes. What an attempt that failed or was killed left is removed.
    """
    writing = target.with_name(target.name + ".writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    try:
        yield writing
        writing.rename(target)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
