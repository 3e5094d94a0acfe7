"""``make bench``: every bench of the Makefile's list in turn, its JSON kept, one table at the end.

A bench is the module ``rlhf.bench.NAME`` (_ for -) that ends with ``result.finish``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 1200.0
"""Longest that one bench may take."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: one gate of one bench, or why the bench has none."""

    bench: str
    figure: str
    value: str
    gate: str
    holds: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benches", nargs="+", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="of NAME.json")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.benches:
        print(f"bench {name} ...", file=sys.stderr, flush=True)
        rows += run(name, args.folder / f"{name}.json")
    print(table(rows))
    return 0 if all(row.holds for row in rows) else 1


def module_of(name: str) -> str:
    """Where the bench of this name is."""
    return f"rlhf.bench.{name.replace('-', '_')}"


def run(name: str, path: Path, limit_s: float = LIMIT_S) -> list[Row]:
    """Run the bench in a process of its own and write its JSON to ``path``."""
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", module_of(name)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return [Row(name, f"no result after {limit_s:g} s", "", "", holds=False)]
    try:
        record = json.loads(done.stdout)
    except ValueError:
        return [Row(name, f"no result, exit status {done.returncode}", "", "", holds=False)]
    path.write_text(done.stdout, encoding="utf-8")
    return rows_of(name, record["gates"], done.returncode)


def rows_of(name: str, gates: Sequence[dict[str, object]], status: int) -> list[Row]:
    """A row per gate, and one more if the exit status is not what the gates say."""
    rows = [
        Row(name, str(g["name"]), f"{g['value']:.4g}", str(g["gate"]), holds=bool(g["holds"]))
        for g in gates
    ]
    if status != (0 if all(row.holds for row in rows) else 1):
        rows.append(Row(name, f"exit status {status}", "", "", holds=False))
    return rows


def table(rows: Sequence[Row]) -> str:
    """One line per row under a head, columns aligned."""
    cells = [("bench", "figure", "value", "gate", "holds")]
    cells += [(r.bench, r.figure, r.value, r.gate, "yes" if r.holds else "NO") for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
