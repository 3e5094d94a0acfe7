"""``accounting.jsonl``: every second of every rank, by cause; a line for each step.

    {"step": 3, "wall_s": [2.31, 2.31], "decode": [0.92, 0.9], "train": [0.8, 0.81], ...}

Lists are by rank. ``wall_s`` is the time since the line before, so a checkpoint or an evaluation
after a step is in the line of the next one, and what came after the last step is in a last line
``{"steps_done": N, ...}``. The causes of a rank sum to its wall; ``docs/metrics.md`` explains each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from rlhf.track.journal import STEP, STEPS_DONE, read_lines

ACCOUNTS = "accounting.jsonl"
WALL = "wall_s"
DIGITS = 5
"""Of a second, in the file."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """Seconds by rank."""

    wall_s: tuple[float, ...]
    causes: Mapping[str, tuple[float, ...]]
    num_steps: int = 1

    def shares(self) -> dict[str, float]:
        """``share/<cause>`` of the seconds of all ranks together."""
        whole = sum(self.wall_s) or 1.0
        return {f"share/{cause}": sum(seconds) / whole for cause, seconds in self.causes.items()}

    def as_columns(self) -> dict[str, list[float]]:
        """What the file holds."""
        columns = {WALL: self.wall_s, **self.causes}
        return {name: [round(s, DIGITS) for s in seconds] for name, seconds in columns.items()}


def read_accounts(path: Path) -> list[Accounts]:
    """All lines in order.

    Raises:
        ValueError: there is no such file: no run has been there, or one of an older version; a
            line is not what a run writes.
    """
    if not path.is_file() or not (records := read_lines(path)):
        raise ValueError(f"{path}: no such file; give the folder of a run that has done a step")
    out = []
    for number, record in enumerate(records, 1):
        if WALL not in record:
            raise ValueError(f"{path}:{number}: has no {WALL}; a run did not write this line")
        causes = {k: tuple(v) for k, v in record.items() if k not in (STEP, STEPS_DONE, WALL)}
        out.append(Accounts(tuple(record[WALL]), causes, num_steps=int(STEP in record)))
    return out


def added(lines: Iterable[Accounts]) -> Accounts:
    """Over all lines. Ranks may have become more or fewer when a run was resumed: the lines of
    the last number count."""
    lines = list(lines)
    num_ranks = len(lines[-1].wall_s)
    same = [line for line in lines if len(line.wall_s) == num_ranks]
    names = dict.fromkeys(name for line in same for name in line.causes)
    zeros = (0.0,) * num_ranks
    return Accounts(
        wall_s=_sums([line.wall_s for line in same]),
        causes={name: _sums([line.causes.get(name, zeros) for line in same]) for name in names},
        num_steps=sum(line.num_steps for line in same),
    )


def account_table(whole: Accounts) -> Table:
    """Mean over ranks and the rank with most, per cause; seconds per step and share of the wall."""
    table = Table(title="where the ranks' time goes", title_justify="left", title_style="bold")
    for name in ("cause", "s / step", "share", "worst rank", "s / step", "share"):
        table.add_column(name, justify="left" if name == "cause" else "right")
    num_ranks, wall_s = len(whole.wall_s), sum(whole.wall_s) or 1.0
    num_steps = max(1, whole.num_steps)
    for cause, seconds in sorted(whole.causes.items(), key=lambda pair: -sum(pair[1])):
        worst = max(range(num_ranks), key=lambda rank: seconds[rank])
        table.add_row(
            cause,
            f"{sum(seconds) / num_ranks / num_steps:.3f}",
            f"{sum(seconds) / wall_s:.1%}",
            str(worst),
            f"{seconds[worst] / num_steps:.3f}",
            f"{seconds[worst] / (whole.wall_s[worst] or 1.0):.1%}",
        )
    table.add_section()
    table.add_row(
        "all",
        f"{wall_s / num_ranks / num_steps:.3f}",
        f"{sum(map(sum, whole.causes.values())) / wall_s:.1%}",
    )
    return table


def _sums(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*columns, strict=True)))
