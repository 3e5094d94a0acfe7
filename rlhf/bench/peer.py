"""``make bench-peer ARGS=--python=PATH``: the demo's job here and on TRL, in turn, on one machine.

PATH is the interpreter of an environment with ``trl``. Same model, dtype, items in the same order,
group size, answer length and learning rate; ours with and without leaving out groups that have no
signal, and with engines that give their memory back while they sleep. By hand, on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rlhf.bench.result import Gate, finish
from rlhf.config.load import load_config
from rlhf.config.schema import Config
from rlhf.data.mix import build_prompt_source
from rlhf.data.tokenizer import load_tokenizer
from rlhf.track.journal import read_journal

POLL_S = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter of TRL's environment")
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    overrides = [f"model.dtype={args.dtype}", f"num_steps={args.steps}"]
    config = load_config(args.config, overrides)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_rows(config, work / "rows.jsonl")
        results = {
            "trl": run_trl(args.python, config, work),
            "all_groups": run_ours(args.config, overrides, work / "all", args.steps, skip=False),
            "signal_only": run_ours(args.config, overrides, work / "some", args.steps, skip=True),
        }
    sequences = config.batch.prompts_per_step * config.batch.samples_per_prompt
    for result in results.values():
        result["samples_per_s"] = sequences / result["step_s"]
    speed = results["all_groups"]["samples_per_s"] / results["trl"]["samples_per_s"]
    memory = results["all_groups"]["peak_gib"] / results["trl"]["peak_gib"]
    return finish(
        "peer",
        {"dtype": args.dtype, "steps": args.steps, **results},
        [
            Gate("samples/s without skipping, ours / TRL", speed, ">=", 1.5),
            Gate("peak memory, ours / TRL", memory, "<=", 0.6),
        ],
    )


def write_rows(config: Config, path: Path) -> None:
    """The prompts of all steps in our order."""
    source = build_prompt_source(config.data, load_tokenizer(config.model.path), config.seed)
    with path.open("w", encoding="utf-8") as file:
        for step in range(config.num_steps):
            for p in source.take(step, config.batch.prompts_per_step):
                file.write(json.dumps({"prompt": p.text, "answer": p.answer}) + "\n")


def run_trl(python: str, config: Config, work: Path) -> dict[str, Any]:
    command = [
        *(python, str(Path(__file__).with_name("peer_trl.py"))),
        *("--model", config.model.path, "--rows", str(work / "rows.jsonl")),
        *("--output", str(work / "trl"), "--dtype", config.model.dtype),
        *("--steps", str(config.num_steps), "--lr", str(config.optimizer.lr)),
        *("--prompts", str(config.batch.prompts_per_step)),
        *("--samples", str(config.batch.samples_per_prompt)),
        *("--new-tokens", str(config.rollout.sampling.max_new_tokens)),
    ]
    out, peak_gib = run_watched(command, lambda: False)
    record = json.loads(out.split("RESULT ", 1)[1].splitlines()[0])
    return _summary(
        [s["seconds"] for s in record["steps"]], [s["reward"] for s in record["steps"]], peak_gib
    )


def run_ours(
    config: str, overrides: list[str], run_dir: Path, num_steps: int, *, skip: bool
) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "rlhf.cli", "train", config, *overrides),
        *(f"run_dir={run_dir}", f"algorithm.skip_zero_signal={str(skip).lower()}"),
        *("checkpoint.export_hf=false", "eval.every=0", "data.eval=[]"),
        *("track.swanlab=off", "track.tensorboard=false", "rollout.free_host_weights=true"),
    ]
    journal = run_dir / "metrics.jsonl"

    def trained() -> bool:
        """The last step is logged: what follows is the checkpoint, which TRL does not write."""
        return journal.exists() and len(read_journal(journal).steps) == num_steps

    _, peak_gib = run_watched(command, trained)
    steps = read_journal(journal).steps
    return _summary([s["seconds/step"] for s in steps], [s["reward/mean"] for s in steps], peak_gib)


def _summary(seconds: list[float], rewards: list[float], peak_gib: float) -> dict[str, Any]:
    return {
        "step_s": statistics.mean(seconds[1:]),  # the first pays for warm-up
        "steps_s": [round(s, 2) for s in seconds],
        "reward": [round(r, 3) for r in rewards],
        "peak_gib": peak_gib,
    }


def run_watched(command: list[str], over: Callable[[], bool]) -> tuple[str, float]:
    """(stdout, largest sum of the proportional memory of the command and its children, GiB).

    Memory counts until ``over`` is true for the first time.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = [0.0]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(POLL_S) and not over():
                peak[0] = max(peak[0], _family_gib(process.pid))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        out, _ = process.communicate()
        done.set()
        watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with {process.returncode}")
    return out, peak[0]


def _family_gib(pid: int) -> float:
    """Proportional set size: shared pages are counted once."""
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_full_info().pss
    except psutil.NoSuchProcess:
        return 0.0
    return total / 2**30


if __name__ == "__main__":
    sys.exit(main())
