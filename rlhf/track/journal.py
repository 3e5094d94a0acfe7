"""``metrics.jsonl``: the truth about a run, which every other record mirrors.

Two kinds of line: ``{"step": 3, ...}`` for a training step, numbered from 0, and
``{"steps_done": 4, ...}`` for what was done after so many of them and before the next: an
evaluation, a checkpoint, the export. A value that is not finite is null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

STEP, STEPS_DONE = "step", "steps_done"


@dataclass(frozen=True)
class History:
    """A run's lines in order."""

    steps: list[dict[str, float]] = field(default_factory=list)
    between: list[dict[str, float]] = field(default_factory=list)

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """(step numbers, values) of the steps that have this metric, gaps left out."""
        pairs = [(r[STEP], r[name]) for r in self.steps if r.get(name) is not None]
        return [x for x, _ in pairs], [y for _, y in pairs]


class Journal:
    """Appends to the file; each line is with the operating system when ``write`` returns."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Open the file; drop what this run repeats of an earlier one, and a torn line.

        The shorter file replaces the longer one at once: a crash leaves one or the other.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _rewrite(path, [line for line in _whole_lines(path) if _is_kept(line, first_step)])
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write_step(self, step: int, metrics: Mapping[str, float | Sequence[float]]) -> None:
        self._write({STEP: step, **metrics})

    def write_between(
        self, steps_done: int, metrics: Mapping[str, float | Sequence[float]]
    ) -> None:
        self._write({STEPS_DONE: steps_done, **metrics})

    def close(self) -> None:
        """Write through to the disk and close."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _write(self, record: Mapping[str, float | Sequence[float]]) -> None:
        plain = {
            k: v if isinstance(v, Sequence) or math.isfinite(v) else None for k, v in record.items()
        }
        try:
            self._file.write(json.dumps(plain) + "\n")
            self._file.flush()
        except OSError as error:  # of a full disk; it does not name the file
            raise OSError(error.errno, error.strerror, self._file.name) from error


def read_journal(path: Path) -> History:
    """All lines; a torn last line is left out.

    Raises:
        ValueError: there is no such file, or a line in the middle is no record.
    """
    history = History()
    for record in read_lines(path):
        (history.steps if STEP in record else history.between).append(record)
    return history


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file that a :class:`Journal` has written; raises as above."""
    try:
        lines = _whole_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}; give the folder of a run") from None
    return [_record(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: is no JSON: {error}; delete the line") from None
    if not isinstance(record, dict) or not (STEP in record or STEPS_DONE in record):
        keys = f"{STEP} or {STEPS_DONE}"
        raise ValueError(f"{place}: must be an object with {keys}, is {line[:40]}; delete the line")
    return record


def _whole_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _is_kept(line: str, first_step: int) -> bool:
    """Whether a run from ``first_step`` on does not repeat this: it evaluates, then goes on."""
    record = json.loads(line)
    if STEP in record:
        return bool(record[STEP] < first_step)
    evaluated = any(name.startswith("eval/") for name in record)
    return bool(record[STEPS_DONE] < first_step + (0 if evaluated else 1))


def _rewrite(path: Path, lines: list[str]) -> None:
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as f:
        f.write("".join(line + "\n" for line in lines))
        f.flush()
        os.fsync(f.fileno())
    new.replace(path)
