"""``make gpu-check``: what only a GPU can show, in at most eight minutes on one of them.

Tier 1 needs torch, megatron-core and this package; tier 2 also SGLang and, where it is installed,
transformer-engine. Each check runs in a process of its own with its own limit, so one that fails or
hangs stops no other. Prints one JSON; exit status 1: a check failed, 2: there is no GPU.

``--device cpu`` runs the same lines on a CPU over gloo, small: it shows that the checks are sound,
and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rlhf.dist.device import has_gpu
from rlhf.rollout.lifeline import die_with_parent

TOTAL_S = 480.0
ERROR_CHARS = 3000


@dataclass(frozen=True, slots=True)
class Entry:
    """A check: ``function`` of module ``rlhf.bench.gpu.module``, and the longest it may take."""

    name: str
    module: str
    tier: int
    limit_s: float

    @property
    def function(self) -> str:
        return f"check_{self.name}"


CHECKS = (
    Entry("group", "group", 1, 60.0),
    Entry("window", "window", 1, 90.0),
    Entry("storages", "tensors", 1, 40.0),
    Entry("copies", "tensors", 1, 40.0),
    Entry("logprobs", "tensors", 1, 40.0),
    Entry("model", "model", 1, 120.0),
    Entry("host_state", "host_state", 1, 90.0),
    Entry("engine", "engine", 2, 300.0),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a check; ``error`` is empty where all held."""

    name: str
    ok: bool
    figures: Mapping[str, object]
    seconds: float
    error: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", type=int, choices=(1, 2), default=1)
    parser.add_argument("--json", action="store_true", help="no table on stderr")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=[c.name for c in CHECKS], help="this check alone, here")
    args = parser.parse_args()
    if args.device == "cuda" and not _torch_sees_a_gpu():
        print("gpu-check: no CUDA device here; nothing was checked", file=sys.stderr)
        return 2
    if args.only:
        die_with_parent(os.getppid())
        print(json.dumps(run_here(args.only, args.device)))
        return 0
    chosen = [c for c in CHECKS if c.tier <= args.tier]
    outcomes = run_all(chosen, args.device, TOTAL_S)
    print(json.dumps(record(outcomes, args.device, args.tier), indent=1))
    if not args.json:
        print(table(outcomes), file=sys.stderr)
    return 0 if all(o.ok for o in outcomes) else 1


def _torch_sees_a_gpu() -> bool:
    if not has_gpu():
        return False
    import torch

    return torch.cuda.is_available()


def run_here(name: str, device: str) -> Mapping[str, object]:
    """The figures of one check in this process; what does not hold raises."""
    import torch

    from rlhf.bench.gpu.check import FULL, SMALL

    (entry,) = (c for c in CHECKS if c.name == name)
    module = importlib.import_module(f"rlhf.bench.gpu.{entry.module}")
    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
        torch.zeros(1, device=place)  # its context is not part of any figure
    return getattr(module, entry.function)(place, FULL if device == "cuda" else SMALL)


def run_all(entries: Sequence[Entry], device: str, total_s: float) -> list[Outcome]:
    """One after another; together no longer than ``total_s``."""
    deadline = time.monotonic() + total_s
    outcomes = []
    for entry in entries:
        limit_s = min(entry.limit_s, deadline - time.monotonic())
        command = [sys.executable, "-m", "rlhf.bench.gpu_check", "--only", entry.name]
        outcomes.append(run_apart(entry.name, [*command, "--device", device], limit_s))
    return outcomes


def run_apart(name: str, command: Sequence[str], limit_s: float) -> Outcome:
    """Run a check's command; at the limit it ends with all processes that it started.

    The last line of its stdout is its figures in JSON; otherwise its stderr says what is wrong.
    """
    begun = time.monotonic()
    if limit_s <= 0:
        return Outcome(name, ok=False, figures={}, seconds=0.0, error="no time was left for it")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
            problem = "" if process.returncode == 0 else f"exit status {process.returncode}: "
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            problem = f"not done after {limit_s:.0f} s: "
        except BaseException:  # Ctrl-C does not reach its session
            os.killpg(process.pid, signal.SIGKILL)
            raise
    seconds = time.monotonic() - begun
    if problem:
        return Outcome(name, False, {}, seconds, problem + err.strip()[-ERROR_CHARS:])
    try:
        figures = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return Outcome(name, False, {}, seconds, f"its figures are no JSON: {out[-ERROR_CHARS:]!r}")
    return Outcome(name, True, figures, seconds, "")


def record(outcomes: Sequence[Outcome], device: str, tier: int) -> dict[str, object]:
    """Everything that is printed as JSON."""
    import torch

    name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    return {
        "bench": "gpu-check",
        "device": name,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "tier": tier,
        "checks": [asdict(outcome) for outcome in outcomes],
        "holds": all(outcome.ok for outcome in outcomes),
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """A line per check; of an error its last line."""
    return "\n".join(
        f"{o.name:10}{'ok' if o.ok else 'FAILED':8}{o.seconds:6.1f} s"
        f"  {o.error.strip().splitlines()[-1] if o.error else ''}".rstrip()
        for o in outcomes
    )


if __name__ == "__main__":
    sys.exit(main())
