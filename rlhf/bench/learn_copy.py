"""``make bench-copy``: GRPO and PPO learn the copy task through the whole loop.

Builds the task into ``models/copy``, runs ``configs/grpo_copy.yaml`` and ``configs/ppo_copy.yaml``
in folders of their own, and asks for the mean share of exact answers over the last 25 of 250 steps,
and that the critic comes to explain the returns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf.bench.copy_task import build
from rlhf.bench.result import Gate, finish
from rlhf.track.journal import read_journal

WINDOW = 25
LEAST_SOLVED = 0.85
LEAST_EXPLAINED = 0.3
MODEL = Path("models/copy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("grpo", "ppo"))
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    args = parser.parse_args()
    build(MODEL)
    figures: dict[str, object] = {"steps": args.steps}
    gates: list[Gate] = []
    for name in (args.only,) if args.only else ("grpo", "ppo"):
        steps = _run(f"configs/{name}_copy.yaml", args.steps, args.overrides)
        solved = windows(steps, "reward/solved")
        figures[name] = {
            "solved_by_window": [round(v, 3) for v in solved],
            "step_s": statistics.median(s["seconds/step"] for s in steps),
        }
        gates.append(Gate(f"{name}: exact answers, last {WINDOW}", solved[-1], ">=", LEAST_SOLVED))
        if name == "ppo":
            explained = windows(steps, "critic/explained_variance")
            figures["explained_variance_by_window"] = [round(v, 3) for v in explained]
            gate = "ppo: explained variance, best window"
            gates.append(Gate(gate, max(explained), ">=", LEAST_EXPLAINED))
    return finish("copy", figures, gates)


def windows(steps: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """The mean of every WINDOW steps, of those that have the metric."""
    out = []
    for first in range(0, len(steps), WINDOW):
        values = [s[name] for s in steps[first : first + WINDOW] if s.get(name) is not None]
        if values:
            out.append(statistics.mean(values))
    return out


def _run(config: str, num_steps: int, overrides: Sequence[str]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run_dir={folder}/run", f"num_steps={num_steps}", *overrides]
        command = [sys.executable, "-m", "rlhf.cli", "train", config, *settings]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return read_journal(Path(folder) / "run" / "metrics.jsonl").steps


if __name__ == "__main__":
    sys.exit(main())
