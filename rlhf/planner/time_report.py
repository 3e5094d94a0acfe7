"""Seconds of a step as text and as a record, with what was assumed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rlhf.memory.table import Span
from rlhf.planner.load import Load, PhaseTime
from rlhf.planner.speeds import Speeds
from rlhf.planner.step_time import SAVE, step_seconds, tokens_per_gpu_s

WIDTH = 88
SHOWN = 0.05
"""Parts below this share of a phase are left out of the text."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A step's seconds by phase, and what they rest on."""

    times: Mapping[Span, PhaseTime]
    load: Load
    speeds: Speeds
    gpus: int

    @property
    def step_s(self) -> float:
        return step_seconds(self.times, self.load)

    @property
    def tokens_per_gpu_s(self) -> float:
        return tokens_per_gpu_s(self.times, self.load, self.gpus)

    @property
    def longest(self) -> Span:
        """The phase that takes most of a step."""
        steps = {span: took for span, took in self.times.items() if span != SAVE}
        return max(steps, key=lambda span: steps[span].seconds)

    @property
    def bound(self) -> str:
        """``ROLLOUT, by tail``."""
        return f"{self.longest}, by {self.times[self.longest].bound}"

    def as_dict(self) -> dict[str, object]:
        return {
            "step_seconds": self.step_s,
            "tokens_per_gpu_s": self.tokens_per_gpu_s,
            "bound": self.bound,
            "seconds": {
                str(span): {"seconds": took.seconds, "bound": took.bound, "parts": took.parts}
                for span, took in self.times.items()
            },
            "load": asdict(self.load),
            "speeds": self.speeds.model_dump(),
        }


def timing_text(timing: Timing) -> list[str]:
    """A table of phases, the step, and what was assumed."""
    head = f"{'seconds':<24}{'of a step':>10}  what takes them"
    out = [head, "-" * WIDTH]
    for span, took in timing.times.items():
        out += _row(str(span), took)
    every = timing.load.save_every
    saves = f", a checkpoint in {every} steps" if every else ", without checkpoints"
    out.append(
        f"{'step':<24}{timing.step_s:>10.1f}  {timing.tokens_per_gpu_s:,.0f} tokens per second and "
        f"GPU{saves}"
    )
    return out


def _row(name: str, took: PhaseTime) -> list[str]:
    parts = sorted(took.parts.items(), key=lambda item: -item[1])
    words = [
        f"{part} {seconds / took.seconds:.0%}"
        for part, seconds in parts
        if took.seconds and seconds / took.seconds >= SHOWN
    ]
    head = f"{name:<24}{took.seconds:>10.1f}  "
    return textwrap.wrap(
        ", ".join(words), WIDTH, initial_indent=head, subsequent_indent=" " * 36
    ) or [head.rstrip()]


def assumptions(timing: Timing) -> list[str]:
    """What the seconds rest on, folded."""
    load, speeds = timing.load, timing.speeds
    return _folded(
        f"load       {load.prompts} prompts of {load.prompt_tokens:,.0f} tokens, {load.samples} "
        f"answers to each of {load.answer_tokens:,.0f} in the mean and "
        f"{load.longest_answer_tokens:,.0f} at most (--prompt-tokens, --answer-tokens): lengths "
        "spread as (1 - t / longest) ** k"
    ) + _folded(
        f"assumed    {speeds.device}: {speeds.peak_tflops:g} TFLOP/s, of which training reaches "
        f"{speeds.train_matmul:.0%} in dense products, {speeds.expert_matmul:.0%} in experts and "
        f"{speeds.attention:.0%} in attention; {speeds.hbm_gbs:g} GB/s of memory, of which "
        f"decoding reaches {speeds.decode_bandwidth:.0%}; links of {speeds.nvlink_gbs:g} GB/s in a "
        f"node, {speeds.nic_gbs:g} to others ({speeds.collective:.0%} in collectives), "
        f"{speeds.pcie_gbs:g} to the host, {speeds.disk_gbs:g} from a node to storage. The busiest "
        f"rank has {speeds.expert_imbalance:g} times the mean of routed tokens. Communication of "
        "layers is not hidden; gradients travel beside a backward pass. Seconds of a reshard are "
        "those of `rlhf explain`, from its plan."
    )


def _folded(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * 11)
