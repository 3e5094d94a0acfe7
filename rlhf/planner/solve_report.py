"""A search for layouts as text and as a record: the best, why, and what the others lose."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.config.schema import RolloutSection, TrainSection
from rlhf.planner.candidates import Fixed
from rlhf.planner.memory import Job, Machine
from rlhf.planner.report import not_built
from rlhf.planner.solve import Search, Solution

WIDTH = 88
GIGA = 1e9
TRAIN_KEYS = ("tp", "pp", "vpp", "first", "last", "cp", "ep", "etp")
MORE_TRAIN_KEYS = ("sequence_parallel", "tokens_per_microbatch")
ROLLOUT_KEYS = ("tp", "dp", "ep", "a2a", "mem_fraction")
SHOWN_S = 0.001
"""Differences below this share of a step are left out."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``own``: the layouts that were asked about, None if there are none or they cannot be."""

    name: str
    machine: Machine
    search: Search
    own: Solution | None
    own_fits: bool

    @property
    def best(self) -> Solution | None:
        return self.search.solutions[0] if self.search.solutions else None

    def as_dict(self) -> dict[str, object]:
        return {
            "model": self.name,
            "fits": self.best is not None,
            "whole": self.search.whole,
            "train_layouts": self.search.num_train,
            "rollout_layouts": self.search.num_rollout,
            "counted": self.search.num_ledgers,
            "solutions": [
                {
                    "settings": settings(solution.job),
                    "why": None if i == 0 else loses(solution, self.search.solutions[0]),
                    "not_built": not_built(solution.job),
                    **solution.timing.as_dict(),
                }
                for i, solution in enumerate(self.search.solutions)
            ],
            "own": None
            if self.own is None
            else {"fits": self.own_fits, **self.own.timing.as_dict()},
        }


def settings(job: Job) -> dict[str, dict[str, object]]:
    """What differs from the defaults of a configuration, by section."""
    out: dict[str, dict[str, object]] = {}
    usual_train, usual_rollout = TrainSection(), RolloutSection()
    out["train"] = {
        key: value
        for key in (*TRAIN_KEYS, *MORE_TRAIN_KEYS)
        if (value := getattr(job.train, key)) != getattr(usual_train, key)
    }
    out["rollout"] = {
        key: value
        for key in ROLLOUT_KEYS
        if (value := getattr(job.rollout, key)) != getattr(usual_rollout, key)
    }
    return out


def setting_words(job: Job) -> str:
    """As overrides of a configuration."""
    return " ".join(
        f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for section, keys in settings(job).items()
        for key, value in keys.items()
    )


def loses(other: Solution, best: Solution) -> str:
    """``12.3 s more: ROLLOUT +15.0, UPDATE(actor) -2.7``."""
    spans = [*best.timing.times, *(s for s in other.timing.times if s not in best.timing.times)]
    changes = {
        span: (took.seconds if (took := other.timing.times.get(span)) else 0.0)
        - (took.seconds if (took := best.timing.times.get(span)) else 0.0)
        for span in spans
        if span.phase != "SAVE"
    }
    large = {s: v for s, v in changes.items() if abs(v) >= SHOWN_S * best.step_s}
    words = ", ".join(
        f"{span} {value:+,.1f}"
        for span, value in sorted(large.items(), key=lambda item: -abs(item[1]))
    )
    more = other.step_s - best.step_s
    head = f"{abs(more):,.1f} s {'more' if more >= 0 else 'less'}"
    return f"{head}: {words}" if words else head


def answer_text(answer: Answer, gpus: int) -> str:
    """About 20 lines."""
    search, best, machine = answer.search, answer.best, answer.machine
    looked = (
        f"{search.num_train:,} training layouts and {search.num_rollout} of engines, "
        f"{search.num_ledgers} pairs counted in full"
    )
    head = f"{answer.name}: {gpus} GPUs of {machine.gpu_bytes / GIGA:g} GB; {looked}"
    if best is None:
        return "\n".join(
            [
                *textwrap.wrap(head, WIDTH),
                "nothing fits: give more GPUs, memory.time_slice=all, memory.optimizer=host, or "
                "shorter sequences",
            ]
        )
    return "\n".join(
        [
            *textwrap.wrap(head, WIDTH),
            "",
            *_listed(search.solutions),
            "",
            *_reasons(answer, best),
        ]
    )


def _listed(solutions: Sequence[Solution]) -> list[str]:
    out = [f"{'s per step':>10}  settings", "-" * WIDTH]
    for solution in solutions:
        out += textwrap.wrap(
            setting_words(solution.job) or "the defaults",
            WIDTH,
            initial_indent=f"{solution.step_s:>10,.1f}  ",
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
    return out


def _reasons(answer: Answer, best: Solution) -> list[str]:
    timing = best.timing
    took = timing.times[timing.longest]
    peak = max(max(best.ledger.phase_bytes(span)) for span in best.ledger.phases)
    lines = _folded(
        f"best       bound by {timing.longest}, {took.seconds:,.1f} of {timing.step_s:,.1f} s, of "
        f"which {took.parts[took.bound]:,.1f} {took.bound}; {peak / GIGA:.1f} GB at most; "
        f"{timing.tokens_per_gpu_s:,.0f} tokens per second and GPU"
    )
    for solution in answer.search.solutions[1:2]:
        lines += _folded(f"next best  {loses(solution, best)}")
    if answer.own is not None:
        fits = "" if answer.own_fits else ", which do not fit"
        lines += _folded(
            f"given      the configuration's own layouts{fits}: {loses(answer.own, best)}"
        )
    if not answer.search.whole:
        lines += _folded("searched   not to the end: pairs that are left might be shorter")
    names = not_built(best.job)
    if names:
        words = ", ".join(names)
        lines += _folded(f"not built  {words}: `rlhf train` refuses these for now")
    return lines


def chosen_line(job: Job, step_s: float, fixed: Fixed) -> str:
    """What a run prints of layouts that it has chosen."""
    kept = [f"train.{k}" for k in sorted(fixed.train & set(TRAIN_KEYS))]
    kept += [f"rollout.{k}" for k in sorted(fixed.rollout & set(ROLLOUT_KEYS))]
    given = f"; given: {', '.join(kept)}" if kept else ""
    words = setting_words(job) or "the defaults"
    return f"layouts chosen, {step_s:.1f} s per step predicted: {words}{given}"


def _folded(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
