"""``make bench-600b``: all recipes, does each fit, how long is each phase, and what bounds it.

Nothing runs but `rlhf plan` and `rlhf explain`, on machines of 8 GPUs of 80 GB and hosts of
2,000 GB, with the constants of an H100. The seconds of a reshard are held against those that
`rlhf explain` gives for the recipe. CPU seconds are of this process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rlhf import explain, plan
from rlhf.bench.result import Gate, finish

CONFIGS = Path("configs")
LIMIT_CPU_S = 120.0
PARTS_SHOWN = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", type=Path, default=known_recipes())
    args = parser.parse_args()
    begun = time.process_time()
    rows = {path.stem: figures_of(path) for path in args.configs}
    seconds = time.process_time() - begun
    return finish("recipes", {"recipes": rows}, gates_of([*rows.values()], seconds))


def known_recipes() -> list[Path]:
    """The first is the one that the others follow."""
    return [CONFIGS / "grpo_600b.yaml", *sorted((CONFIGS / "recipes").glob("*.yaml"))]


def figures_of(path: Path) -> dict[str, object]:
    """What plan and explain say of a configuration."""
    made = plan.make_plan(_arguments(plan, path))[0]
    told = json.loads(explain.run(_arguments(explain, path, "--json")))
    timing = made.timing
    reshard = next(took for span, took in timing.times.items() if span.phase == "RESHARD")
    return {
        "gpus": timing.gpus,
        "fits": made.fits,
        "peak_gb": made.peak[2] / 1e9,
        "step_s": timing.step_s,
        "tokens_per_gpu_s": timing.tokens_per_gpu_s,
        "bound": timing.bound,
        "phases": {
            str(span): {
                "seconds": took.seconds,
                "parts": dict(sorted(took.parts.items(), key=lambda item: -item[1])[:PARTS_SHOWN]),
            }
            for span, took in timing.times.items()
        },
        "reshard_s": reshard.parts["wire"],
        "explained_reshard_s": told["predicted_s"],
    }


def _arguments(command: ModuleType, path: Path, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(path), *options])


def gates_of(rows: Sequence[dict[str, object]], seconds: float) -> list[Gate]:
    """All fit, all reshards are as explained, and it does not take long."""
    gaps = [abs(float(str(r["reshard_s"])) - float(str(r["explained_reshard_s"]))) for r in rows]
    return [
        Gate("recipes that do not fit", float(sum(not r["fits"] for r in rows)), "<=", 0),
        Gate("seconds of a reshard, plan and explain apart", max(gaps), "<=", 0),
        Gate("CPU seconds", seconds, "<=", LIMIT_CPU_S),
    ]


if __name__ == "__main__":
    sys.exit(main())
