"""``rlhf plan RUN --compare``: the plan that a run started with against what it measured."""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.check import rollout_layout, train_layout
from rlhf.config.load import load_config
from rlhf.plan import GPU_GB, HOST_GB, OTHER_GB, SPEED_OPTIONS
from rlhf.planner.compare import Facts, Row, advice, rows_of
from rlhf.planner.contract import measured_load
from rlhf.planner.load import Load
from rlhf.planner.memory import Machine
from rlhf.planner.speeds import Speeds
from rlhf.promise import Kept, promise_of
from rlhf.track.accounts import ACCOUNTS, added, read_accounts
from rlhf.track.journal import History, read_journal
from rlhf.weights.find_model import find_model

OUTSIDE = ("save",)
"""Not in every step; compared once."""
MEMORY, SECONDS = "memory_gib/", "seconds/"
_NOT_GIVEN = (None, False)
OF_PLANS = {
    **dict.fromkeys(
        (
            *("model", "ranks", "train", "rollout", "time_slice", "optimizer", "window_mib"),
            *("calibration", *SPEED_OPTIONS, "prompt_tokens", "answer_tokens", "solve", "check"),
        ),
        _NOT_GIVEN,
    ),
    "ranks_per_node": (8,),
    "gpu_mem_gb": (GPU_GB,),
    "host_mem_gb": (HOST_GB,),
    "other_gb": (OTHER_GB,),
}
"""Options that say what to plan, and what they are when nobody gave them: a run's plan is made."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one run."""

    rows: list[Row]
    bytes: dict[str, tuple[int, float]]  # metric -> (predicted, measured)
    memory_gib: dict[str, tuple[float, float]]  # phase -> (predicted, measured)
    process_gib: float
    num_steps: int
    gap: str
    change: str

    def as_dict(self) -> dict[str, object]:
        return {
            "steps": self.num_steps,
            "seconds": {
                row.phase: {
                    "predicted": row.predicted,
                    "measured": row.measured,
                    "predicted_with_measured_load": row.with_load,
                    "holds": row.holds,
                }
                for row in self.rows
            },
            "bytes": {k: {"predicted": p, "measured": m} for k, (p, m) in self.bytes.items()},
            "memory_gib": {
                k: {"predicted": p, "measured": m} for k, (p, m) in self.memory_gib.items()
            },
            "process_gib": self.process_gib,
            "largest_gap": self.gap,
            "change": self.change,
        }


def run(args: Namespace) -> str:
    """What the command prints.

    Raises:
        ValueError: the folder is not that of a run with a plan that has done a step; or more was
            given than the folder.
    """
    given = [key for key, unset in OF_PLANS.items() if getattr(args, key) not in unset]
    if args.config is None or args.overrides or given:
        words = (f"--{key.replace('ranks', 'gpus').replace('_', '-')}" for key in given)
        more = f"; leave out {', '.join(words)}" if given else ""
        raise ValueError(
            f"--compare: give the folder of one run and nothing else, but --json{more}"
        )
    found = compare(Path(args.config))
    return json.dumps(found.as_dict(), indent=1) if args.json else comparison_text(found)


def compare(run_dir: Path) -> Comparison:
    """Medians over steps, without the first, which pays for warming up.

    Raises:
        ValueError: as :func:`run`.
    """
    kept = Kept.read(run_dir)
    whole = added(read_accounts(run_dir / ACCOUNTS))
    history = read_journal(run_dir / "metrics.jsonl")
    if not history.steps:
        raise ValueError(f"{run_dir / 'metrics.jsonl'}: has no step; --compare needs one at least")
    medians = step_medians(history)
    measured = {k.removeprefix(SECONDS): v for k, v in medians.items() if k.startswith(SECONDS)}
    saves = [r["seconds/save"] for r in history.between if "seconds/save" in r]
    if saves:
        measured["save"] = statistics.median(saves)
    load = Load(**kept.load)
    share = medians.get("rollout/groups_with_signal", 1.0)
    rows = rows_of(kept.seconds, measured, _again(run_dir, kept, load, medians), OUTSIDE)
    shares = {name.removeprefix("share/"): s for name, s in whole.shares().items()}
    seen = measured_load(load, medians)
    facts = Facts(
        calibrated=kept.calibration is not None,
        answer_tokens=(load.answer_tokens, seen.answer_tokens),
        prompt_tokens=(load.prompt_tokens, seen.prompt_tokens),
        trained_share=share,
        shares=shares,
    )
    gap, change = advice(rows, facts, f"{run_dir / 'config.yaml'}")
    return Comparison(
        rows=rows,
        bytes={
            f"reshard/{name}": (predicted, medians[f"reshard/{name}"])
            for name, predicted in (
                ("sent_bytes", kept.sent_bytes),
                ("local_bytes", kept.local_bytes),
            )
        },
        memory_gib={
            phase: (gib + kept.process_gib, medians[MEMORY + phase])
            for phase, gib in kept.memory_gib.items()
            if MEMORY + phase in medians
        },
        process_gib=kept.process_gib,
        num_steps=len(history.steps),
        gap=gap,
        change=change,
    )


def step_medians(history: History) -> dict[str, float]:
    """Of every metric over the steps that have it, the first step left out if there are more."""
    steps = history.steps[1:] or history.steps
    names = dict.fromkeys(name for step in steps for name in step)
    columns = {name: [s[name] for s in steps if s.get(name) is not None] for name in names}
    return {name: statistics.median(values) for name, values in columns.items() if values}


def _again(
    run_dir: Path, kept: Kept, load: Load, medians: Mapping[str, float]
) -> dict[str, float] | None:
    """The plan's seconds with the answers that there were, by the same constants."""
    config = load_config(run_dir / "config.yaml")
    try:
        shape = find_model(config.model.path)
    except ValueError:  # the model has been moved or deleted since
        return None
    machine, speeds = Machine(**kept.machine), Speeds(**kept.speeds)
    ranks = len(read_accounts(run_dir / ACCOUNTS)[-1].wall_s)
    layouts = train_layout(config.train, ranks), rollout_layout(config.rollout, ranks)
    promise, _ = promise_of(config, shape, layouts, machine, speeds)
    share = 1.0
    if config.algorithm.skip_zero_signal:
        share = medians.get("rollout/groups_with_signal", 1.0)
    return promise.seconds(speeds, measured_load(load, medians), share)


def comparison_text(found: Comparison) -> str:
    """Tables, the largest gap and the change."""
    again = "with its load"
    head = f"{'seconds per step':<24}{'predicted':>11}{again:>15}{'measured':>11}"
    lines = [head, "-" * len(head)]
    for row in found.rows:
        name = row.phase if row.in_step else f"{row.phase} (once)"
        with_load = "" if row.with_load is None else f"{row.with_load:.3f}"
        mark = "" if row.holds or row.holds_with_load else "  *"
        lines.append(f"{name:<24}{row.predicted:>11.3f}{with_load:>15}{row.measured:>11.3f}{mark}")
    lines += ["", *_pairs("bytes of a reshard, all ranks", found.bytes, ",.0f"), ""]
    title = f"GiB of a trainer (process {found.process_gib:.2f})"
    lines += _pairs(title, found.memory_gib, ".2f")
    lines += [
        "",
        f"medians of {max(1, found.num_steps - 1)} steps; with its load: by the same constants, of "
        "the answers that there were;",
        "* neither prediction is within 25 % of what was measured",
        f"largest gap  {found.gap}",
        f"change       {found.change}",
    ]
    return "\n".join(lines)


def _pairs(title: str, pairs: Mapping[str, Sequence[float]], form: str) -> list[str]:
    head = f"{title:<35}{'predicted':>16}{'measured':>16}"
    rows = [f"{name:<35}{p:>16{form}}{m:>16{form}}" for name, (p, m) in pairs.items()]
    return [head, "-" * len(head), *rows]
