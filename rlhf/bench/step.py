"""``make bench-step``: where the time of the demo's step goes.

Runs ``configs/demo.yaml`` for a few steps in a folder of its own and reads its metrics. The first
step, which pays for warm-up, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rlhf.bench.result import Gate, finish
from rlhf.track.journal import read_journal

SETTINGS = (
    *("checkpoint.export_hf=false", "checkpoint.resume=never", "eval.every=0", "data.eval=[]"),
    *("track.swanlab=off", "track.tensorboard=false"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run_dir={folder}/run", f"num_steps={args.steps}", *SETTINGS, *args.overrides]
        command = [sys.executable, "-m", "rlhf.cli", "train", args.config, *run]
        subprocess.run(command, check=True, stdout=sys.stderr)
        history = read_journal(Path(folder) / "run" / "metrics.jsonl")
    steps = history.steps[1:]
    names = sorted({name for step in steps for name in step if "seconds/" in name})
    seconds = {
        name.removeprefix("seconds/"): statistics.median(s.get(name, 0.0) for s in steps)
        for name in names
    }
    rates = {
        name.removeprefix("tokens_per_s/"): statistics.median(s.get(name, 0.0) for s in steps)
        for name in sorted({name for step in steps for name in step if "tokens_per_s/" in name})
    }
    whole = seconds.pop("step")
    named = sum(sum(v for k, v in s.items() if k.startswith("seconds/")) for s in steps)
    total = sum(s["seconds/step"] for s in steps)
    return finish(
        "step",
        {
            "steps": len(steps),
            "step_s": whole,
            "phases_s": seconds,
            "tokens_per_s": rates,
            "trained_share": statistics.mean(s["rollout/groups_with_signal"] for s in steps),
        },
        [
            Gate("reshard / step", seconds.get("reshard", 0.0) / whole, "<=", 0.15),
            Gate("wait at phase edges / step", seconds.get("wait", 0.0) / whole, "<=", 0.15),
            Gate("time in named phases / step", (named - total) / total, ">=", 0.95),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
