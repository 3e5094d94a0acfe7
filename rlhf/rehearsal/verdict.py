"""What a rehearsal has shown, read from its run folder."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.saved import complete_steps

MARGIN = 0.05
"""By which a phase may be over its prediction, as in a run."""
WIDTH, INDENT = 88, 11
NOT_SHOWN = (
    "GPU kernels and collectives, memory at full size (`rlhf plan`), speed "
    "(`rlhf explain` for the reshard), learning"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a run that has ended."""

    steps: int
    seconds: dict[str, float]  # phase -> of all steps
    verified: bool  # checksums of every reshard were compared, and are equal
    worst_gap: float  # mean |rollout_logprobs - old_logprobs| of the worst step
    grad_norms: dict[str, float]  # optimizer -> largest
    held_mib: dict[str, float]  # phase -> of the fullest rank; empty where a run does not measure
    over_plan: list[str]  # phases that held more than was predicted
    checkpoints: list[int]
    exported: bool

    def lines(self) -> list[str]:
        """What ran, as a person reads it."""
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        norms = ", ".join(f"{name} {value:.2g}" for name, value in self.grad_norms.items())
        saved = ", ".join(f"step {n}" for n in self.checkpoints)
        equal = ", what engines hold has the checksums of what was sent" if self.verified else ""
        none = ": all answers to a prompt earned the same, as a random model's do under a rule"
        signal = "" if any(self.grad_norms.values()) else none
        held = ", ".join(f"{name} {size:.1f}" for name, size in self.held_mib.items())
        above = f"above the plan: {', '.join(self.over_plan) or 'none'}"
        words = {
            "ran": f"{self.steps} steps; seconds of the phases: {phases}",
            "reshard": f"{self.steps + 1} times{equal}",
            "agree": f"rollout and trainer within {self.worst_gap:.2g} nats per token (mean of "
            "the worse step)",
            "learn": f"largest gradient norm: {norms}{signal}",
            "memory": f"MiB of the regions in a phase: {held}; {above}" if held else "",
            "saved": saved + ("; exported as a Hugging Face folder" if self.exported else ""),
        }
        return [folded(name, text) for name, text in words.items() if text]


def read_verdict(run_dir: Path) -> Verdict:
    """Of the folder of a run that ended well."""
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    seconds: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            name = key.removeprefix("seconds/")
            if name != key and name != "step":
                seconds[name] = seconds.get(name, 0.0) + value
    held: dict[str, float] = {}
    over = set()
    for name, measured, predicted in (item for row in rows for item in _phase_bytes(row)):
        held[name] = max(held.get(name, 0.0), measured * 1024)
        if measured > predicted * (1 + MARGIN):
            over.add(name)
    return Verdict(
        steps=len(steps),
        seconds=seconds,
        verified=all(row.get("reshard/verify_s", 0.0) > 0 for row in steps),
        worst_gap=max(row["gap/mean_abs"] for row in steps),
        grad_norms={
            name: max(row.get(f"{key}/grad_norm", 0.0) for row in steps)
            for name, key in (("actor", "optim"), ("critic", "critic"))
            if any(f"{key}/grad_norm" in row for row in steps)
        },
        held_mib=held,
        over_plan=sorted(over),
        checkpoints=complete_steps(run_dir / "checkpoints"),
        exported=(run_dir / "hf" / "config.json").is_file(),
    )


def _phase_bytes(row: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Phase, GiB that it held, GiB that the plan says."""
    for key, size in row.items():
        name = key.removeprefix("memory/").removesuffix("_gib")
        if (predicted := row.get(f"memory/{name}_predicted_gib")) is not None:
            yield name, size, predicted


def resumed_words(run_dir: Path, first_step: int) -> str:
    """Of a run that went on from the checkpoint of ``first_step``.

    Raises:
        RuntimeError: it began elsewhere.
    """
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    steps = [
        row["step"] for line in text.splitlines() if "reward/mean" in (row := json.loads(line))
    ]
    if steps != list(range(first_step + 1)):
        raise RuntimeError(
            f"{run_dir}: after a resume steps must be 0 to {first_step}, are {steps}"
        )
    return folded("resumed", f"from the checkpoint of step {first_step}: one more step")


def table(rows: list[tuple[str, Any, Any, str]]) -> list[str]:
    """``configured -> rehearsed``; the last column is a remark."""
    head = f"{'':<28}{'configured':>12}{'rehearsed':>12}"
    lines = [
        f"{name:<28}{configured!s:>12}{rehearsed!s:>12}  {remark}".rstrip()
        for name, configured, rehearsed, remark in rows
    ]
    return [head, "-" * len(head), *lines]


def folded(name: str, text: str) -> str:
    """A line, or several with the name in front of the first."""
    indent = INDENT if name else 2
    head = f"{name:<{INDENT}}" if name else ""
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * indent)
