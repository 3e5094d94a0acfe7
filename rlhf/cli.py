"""``rlhf COMMAND``: thin; the work is done elsewhere."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.dist.slurm import LauncherError
from rlhf.ending import outlive_stdout
from rlhf.explain import add_arguments as add_explain_arguments
from rlhf.plan import add_arguments as add_plan_arguments
from rlhf.rehearse import add_arguments as add_rehearse_arguments
from rlhf.tune.command import add_arguments as add_tune_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2: the request itself is wrong)."""
    outlive_stdout()
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (ValueError, LauncherError) as error:  # of the user's or the launcher's making
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="rlhf", description="RL post-training, one SPMD program")
    commands = out.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands.add_parser("train", help="train from a configuration"), _train)
    _add_train(commands.add_parser("eval", help="held-out accuracy of the newest state"), _eval)
    convert = commands.add_parser("convert", help="Hugging Face <-> Megatron checkpoint")
    convert.add_argument("--gguf", metavar="PACKAGE", help="import the GGUF file of a package")
    convert.add_argument("source", nargs="?", help="HF folder, a run, or a checkpoint of a run")
    convert.add_argument("target", help="folder to write")
    convert.set_defaults(run=_convert)
    plan = commands.add_parser("plan", help="does it fit, and how long is a step")
    add_plan_arguments(plan)
    plan.set_defaults(run=_plan)
    explain = commands.add_parser("explain", help="what moving the weights to the engines costs")
    add_explain_arguments(explain)
    explain.set_defaults(run=_explain)
    tune = commands.add_parser("tune", help="measure settings and the machine's constants")
    add_tune_arguments(tune)
    tune.set_defaults(run=_tune)
    report = commands.add_parser("report", help="where the time of a run went, and what it gave")
    report.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    report.add_argument("--json", action="store_true")
    report.set_defaults(run=_report)
    rehearse = commands.add_parser("rehearse", help="does it run: the same job, small, on N ranks")
    add_rehearse_arguments(rehearse)
    rehearse.set_defaults(run=_rehearse)
    preflight = commands.add_parser(
        "preflight", help="is every node fit for this job; run by srun, once per node"
    )
    preflight.add_argument("config", help="YAML file")
    preflight.add_argument("overrides", nargs="*", metavar="a.b=c", help="changed settings")
    preflight.add_argument(
        "--unfit", metavar="FILE", type=Path, help="write the names of unfit nodes there"
    )
    preflight.set_defaults(run=_preflight)
    doctor = commands.add_parser("doctor", help="what is installed, what is missing, what it costs")
    doctor.add_argument("--json", action="store_true")
    doctor.add_argument(
        "--probe",
        metavar="MODEL",
        help="weight tables against the installed SGLang, layer by layer",
    )
    doctor.add_argument("--rollout", metavar="tp=8,ep=8", help="the layout to probe")
    doctor.set_defaults(run=_doctor)
    return out


def _add_train(parser: argparse.ArgumentParser, run: object) -> None:
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="changed settings")
    parser.add_argument("--loop", metavar="FILE.py:FUNCTION", help="a loop of your own")
    parser.add_argument(
        "--logs", metavar="FOLDER", type=Path, help="what each rank prints goes to a file there"
    )
    parser.add_argument("--show-flow", action="store_true", help="print roles, phases and columns")
    parser.set_defaults(run=run)


def _train(args: argparse.Namespace) -> int:
    return _run_loop(args, args.loop)


def _eval(args: argparse.Namespace) -> int:
    from rlhf.config.load import load_config

    if not load_config(args.config, args.overrides).data.eval:
        raise ValueError(f"{args.config}:data.eval: is empty; `rlhf eval` needs a source there")
    return _run_loop(args, args.loop or "rlhf.loop:evaluate", "--no-record")


def _run_loop(args: argparse.Namespace, loop: str | None, *flags: str) -> int:
    from rlhf.config.load import load_config
    from rlhf.dist.world import is_launched
    from rlhf.planner.speeds import read_speeds
    from rlhf.preflight import check_loop
    from rlhf.start import start
    from rlhf.train import main as run_rank

    config = load_config(args.config, args.overrides)
    if config.track.calibration is not None:
        read_speeds(config.track.calibration)
    if args.show_flow:
        from rlhf.flow import flow_text

        print(flow_text(config))
        return 0
    arguments = [args.config, *args.overrides, *flags]
    if loop is not None:
        check_loop(loop)
        arguments += ["--loop", loop]
    if is_launched():
        return run_rank(arguments)
    if args.logs is not None:
        arguments.append("--log-phases")
    return start(config, args.config, arguments, args.logs)


def _convert(args: argparse.Namespace) -> int:
    if args.gguf:
        from rlhf.weights.gguf_import import find_packaged_gguf, import_gguf

        import_gguf(find_packaged_gguf(args.gguf), Path(args.target))
        return 0
    if args.source is None:
        raise ValueError("rlhf convert SOURCE TARGET: give a source folder, or --gguf PACKAGE")
    from rlhf.convert import convert

    print(convert(Path(args.source), Path(args.target)))
    return 0


def _plan(args: argparse.Namespace) -> int:
    if args.compare:
        from rlhf.compare import run as compare

        print(compare(args))
        return 0
    from rlhf.plan import run

    text, fits = run(args)
    print(text)
    return 0 if fits else 1


def _explain(args: argparse.Namespace) -> int:
    from rlhf.explain import run

    print(run(args))
    return 0


def _tune(args: argparse.Namespace) -> int:
    from rlhf.tune.command import run
    from rlhf.tune.slices import SliceError

    try:
        print(run(args))
    except SliceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _report(args: argparse.Namespace) -> int:
    from rich.console import Console

    from rlhf.track import report

    if args.json:
        print(json.dumps(report.as_dict(args.folder), indent=1))
    else:
        report.show(args.folder, Console())
    return 0


def _rehearse(args: argparse.Namespace) -> int:
    from rlhf.rehearse import run

    return run(args)


def _preflight(args: argparse.Namespace) -> int:
    from rlhf.cluster.preflight import run

    return run(args)


def _doctor(args: argparse.Namespace) -> int:
    if args.probe is not None:
        from rlhf.doctor_probe import doctor_probe

        return doctor_probe(args.probe, args.rollout, as_json=args.json)
    if args.rollout is not None:
        raise ValueError("rlhf doctor --rollout: goes with --probe MODEL")
    from rlhf.doctor import diagnose

    report = diagnose()
    print(report.as_json() if args.json else report.as_text())
    return 0 if report.can_train else 1


if __name__ == "__main__":
    sys.exit(main())
