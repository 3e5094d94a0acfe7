"""``rlhf tune CONFIG``: settings and constants measured on the machine at hand."""

from __future__ import annotations

import json
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Config
from rlhf.dist.layout import RolloutLayout, TrainLayout

if TYPE_CHECKING:
    from rlhf.planner.memory import Machine
    from rlhf.tune.calibrate import Calibration
    from rlhf.tune.settings import Setting
    from rlhf.tune.tuner import Refused, Tuning
    from rlhf.weights.model_shape import ModelShape

MINUTES = 10.0
FEWEST_MINUTES = 0.1


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tuned, checked."""

    path: str
    overrides: tuple[str, ...]
    config: Config
    shape: ModelShape
    ranks: int
    train: TrainLayout
    rollout: RolloutLayout


def add_arguments(parser: ArgumentParser) -> None:
    """Of the command."""
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="changed settings")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"time for all of it ({MINUTES:g})"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="tuned configuration to write")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="constants to write, for rlhf plan"
    )
    parser.add_argument("--json", action="store_true")


def run(args: Namespace) -> str:
    """What the command prints; writes both files.

    Raises:
        ValueError: the configuration or the arguments are wrong.
        SliceError: a slice failed.
    """
    from rlhf.promise import device_name, promise_of, speeds_of, this_machine
    from rlhf.tune.calibrate import calibrate
    from rlhf.tune.slices import Slices
    from rlhf.tune.text import tuning_text
    from rlhf.tune.tuner import tune

    if not args.minutes >= FEWEST_MINUTES:
        raise ValueError(f"--minutes: must be at least {FEWEST_MINUTES:g}, is {args.minutes:g}")
    stem = Path(args.config).stem
    out = args.out or Path(f"{stem}.tuned.yaml")
    file = args.calibration or Path(f"{stem}.speeds.yaml")
    check_targets(args.config, out, file)
    subject = read_subject(args.config, tuple(args.overrides))
    settings, refused = choose_settings(subject)
    with tempfile.TemporaryDirectory(prefix="rlhf-tune-") as folder:
        slices = Slices(subject.path, subject.overrides, subject.config, Path(folder))
        found = tune(settings, slices.run, 60 * args.minutes, refused)
    machine = this_machine(subject.ranks)
    before = speeds_of(subject.config.track.calibration)
    layouts = subject.train, subject.rollout
    promise, load = promise_of(subject.config, subject.shape, layouts, machine, before)
    calibration = calibrate(
        promise, load, before, found.rounds, size=found.microbatch_tokens, device=device_name()
    )
    write_files(subject, found, calibration, out, file)
    if args.json:
        return json.dumps(as_dict(found, calibration, out, file), indent=1)
    return tuning_text(found, calibration, out, file)


def check_targets(config: str, out: Path, file: Path) -> None:
    """Before anything is measured.

    Raises:
        ValueError: a file would overwrite another one, or its folder is not there.
    """
    if out.resolve() in (Path(config).resolve(), file.resolve()):
        raise ValueError(f"--out {out}: would overwrite another file of this command; name another")
    for option, path in (("--out", out), ("--calibration", file)):
        if not path.resolve().parent.is_dir():
            raise ValueError(f"{option} {path}: no folder {path.resolve().parent}; make it first")
        if path.is_dir():
            raise ValueError(f"{option} {path}: is a folder; name a file")


def read_subject(path: str, overrides: tuple[str, ...]) -> Subject:
    """The configuration, checked as ``rlhf train`` checks it.

    Raises:
        ValueError: all faults at once.
    """
    from rlhf.config.check import rollout_layout, train_layout
    from rlhf.config.load import load_config
    from rlhf.launch import default_ranks
    from rlhf.preflight import check, check_data
    from rlhf.solved import resolved

    config = load_config(path, overrides)
    ranks = config.dist.ranks or default_ranks()
    config, _ = resolved(config, ranks, ranks, path)
    shape = check(config, ranks, path)
    check_data(config)
    train, rollout = train_layout(config.train, ranks), rollout_layout(config.rollout, ranks)
    return Subject(path, overrides, config, shape, ranks, train, rollout)


def choose_settings(subject: Subject) -> tuple[list[Setting], list[Refused]]:
    """What is tried of each setting; what the configuration or the planner refuses is left out."""
    from rlhf.planner.train_memory import disk_bytes
    from rlhf.promise import this_machine
    from rlhf.tune.settings import (
        cache_setting,
        concurrency_setting,
        microbatch_setting,
        window_setting,
    )
    from rlhf.tune.tuner import admit

    config, batch = subject.config, subject.config.batch
    sequence = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    itemsize = 4 if config.model.dtype == "float32" else 2
    moved = disk_bytes(subject.shape, itemsize).export / min(
        subject.rollout.engine_size, subject.train.world
    )
    asked = [
        microbatch_setting(
            config, subject.train, batch.prompts_per_step * batch.samples_per_prompt * sequence
        ),
        window_setting(config, moved),
        concurrency_setting(config, subject.rollout),
        cache_setting(config, subject.rollout, sequence),
    ]
    fault = fault_finder(subject, this_machine(subject.ranks))
    settings, refused = [], []
    for setting in asked:
        admitted, without = admit(setting, fault)
        settings.append(admitted)
        refused += without
    return settings, refused


def fault_finder(subject: Subject, machine: Machine) -> Callable[[str], str | None]:
    """Of an override: why it is refused, by the configuration's checks or for want of memory."""
    from rlhf.config.check import rollout_layout, train_layout
    from rlhf.config.load import load_config
    from rlhf.planner.fit import misfits
    from rlhf.planner.job import job_of
    from rlhf.planner.memory import ledger
    from rlhf.preflight import check
    from rlhf.solved import resolved
    from rlhf.tune.slices import without_keys

    def fault(override: str) -> str | None:
        words = [*without_keys(subject.overrides, [override]), override]
        try:
            config = load_config(subject.path, words)
            config, _ = resolved(config, subject.ranks, subject.ranks, subject.path)
            shape = check(config, subject.ranks, subject.path)
        except ValueError as error:
            return str(error).splitlines()[0]
        job = job_of(
            config,
            shape,
            train_layout(config.train, subject.ranks),
            rollout_layout(config.rollout, subject.ranks),
            config.reshard.window_mib << 20,
        )
        found = misfits(job, ledger(job, machine), machine)
        return str(found[0]) if found else None

    return fault


def write_files(
    subject: Subject, found: Tuning, calibration: Calibration, out: Path, file: Path
) -> None:
    """The complete configuration with what was found, and the calibration file."""
    from rlhf.config.load import dump_config, load_config
    from rlhf.planner.speeds import write_speeds
    from rlhf.tune.slices import without_keys

    ours = [*found.overrides, f"track.calibration={file}"]
    words = [*without_keys(subject.overrides, ours), *ours]
    config = load_config(subject.path, words)
    changed = ", ".join(found.overrides) or "nothing: no tried value is clearly faster"
    head = f"# {subject.path}, tuned by `rlhf tune`; changed: {changed}\n"
    out.write_text(head + dump_config(config), encoding="utf-8")
    write_speeds(calibration.fitted.speeds, file, calibration.head(subject.path))


def as_dict(found: Tuning, calibration: Calibration, out: Path, file: Path) -> dict[str, Any]:
    """All of it as a record."""
    return {
        "overrides": found.overrides,
        "step_s": found.step_s,
        "tuned_step_s": found.tuned_step_s,
        "settings": {
            t.setting.key: {
                "current": t.setting.current,
                "kept": t.kept.value,
                "tried": [asdict(c) for c in t.table],
            }
            for t in found.tried
        },
        "untried": {s.key: s.why_none for s in found.untried},
        "out_of_time": found.out_of_time,
        "refused": [asdict(r) for r in found.refused],
        "predicted_s": dict(calibration.fitted.predicted),
        "measured_s": dict(calibration.fitted.measured),
        "errors": calibration.fitted.errors,
        "out": str(out),
        "calibration": str(file),
    }
