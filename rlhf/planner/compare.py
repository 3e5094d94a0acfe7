"""A plan against what was measured: the largest gap, and the change that would close it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLOSE = 0.25
"""A prediction this near to what was measured holds."""
WORTH = 0.05
"""A gap below this share of a step is not worth a change."""


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a phase, per step or, of what is not in every step, once."""

    phase: str
    predicted: float
    measured: float
    with_load: float | None
    """Predicted again, of the answers that there were; None: the model is not there any more."""
    in_step: bool = True

    @property
    def gap(self) -> float:
        return self.measured - self.predicted

    @property
    def holds(self) -> bool:
        return abs(self.gap) <= CLOSE * self.measured

    @property
    def holds_with_load(self) -> bool:
        return self.with_load is not None and (
            abs(self.measured - self.with_load) <= CLOSE * self.measured
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """What the advice rests on beside seconds."""

    calibrated: bool
    answer_tokens: tuple[float, float]  # (assumed, measured), means
    prompt_tokens: tuple[float, float]
    trained_share: float
    shares: Mapping[str, float]  # cause -> of all ranks' time


def rows_of(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    with_load: Mapping[str, float] | None,
    outside: Sequence[str] = (),
) -> list[Row]:
    """Phases that both know, largest gap first; ``outside``: those that are not in every step."""
    rows = [
        Row(
            phase,
            seconds,
            measured[phase],
            None if with_load is None else with_load[phase],
            in_step=phase not in outside,
        )
        for phase, seconds in predicted.items()
        if phase in measured
    ]
    return sorted(rows, key=lambda row: (not row.in_step, -abs(row.gap)))


def advice(rows: Sequence[Row], facts: Facts, config: str) -> tuple[str, str]:
    """(the largest gap of a step, the one change that would close it), in words.

    Args:
        config: how the person calls the run's configuration.
    """
    steps = [row for row in rows if row.in_step]
    if not steps:
        return "no step was measured", f"rlhf train {config}"
    whole = sum(row.measured for row in steps)
    row = steps[0]
    over = "more" if row.gap > 0 else "less"
    gap = (
        f"{row.phase}: {row.measured:.3g} s measured, {row.predicted:.3g} predicted: "
        f"{abs(row.gap):.3g} s {over}, {abs(row.gap) / whole:.0%} of a step"
    )
    if row.holds or abs(row.gap) < WORTH * whole:
        return gap, "nothing: the plan holds"
    if row.holds_with_load:
        return gap, _load_words(facts)
    if not facts.calibrated:
        return gap, f"calibrate: rlhf tune {config}, then train with track.calibration=FILE"
    return gap, _setting_words(row, facts, config)


def _load_words(facts: Facts) -> str:
    assumed, found = facts.answer_tokens
    words = (
        f"plan with the answers that there are: --prompt-tokens {facts.prompt_tokens[1]:.4g} "
        f"--answer-tokens {found:.4g} (assumed were {facts.prompt_tokens[0]:.4g} and {assumed:.4g})"
    )
    if facts.trained_share < 1 - CLOSE:
        words += (
            f"; {facts.trained_share:.0%} of the answers were trained, "
            "algorithm.skip_zero_signal leaves out the others"
        )
    return words


SETTINGS: Mapping[str, Sequence[tuple[str, str]]] = {
    "rollout": (
        ("tail_idle", "lower rollout.sampling.max_new_tokens: engines wait for the longest answer"),
        ("reward_wait", "make the reward faster: engines have finished and answers are unscored"),
        ("reshard_verify", "reshard.probe_tokens=0: the probe takes more than the difference"),
    ),
    "update": (("pipeline", "a smaller train.tokens_per_microbatch: stages wait for one another"),),
    "score": (("pipeline", "a smaller train.tokens_per_microbatch: stages wait for one another"),),
    "reshard": (
        ("reshard_verify", "reshard.verify_every and reshard.probe_tokens: verification is most"),
        ("reshard_wire", "a larger reshard.window_mib: ranks wait for messages"),
    ),
    "switch": (("switch", "memory.time_slice=engine and rollout.free_host_weights=false"),),
}
"""Phase -> what a cause of its time says, the first that has a share worth it."""


def _setting_words(row: Row, facts: Facts, config: str) -> str:
    if row.gap > 0:
        for beginning, causes in SETTINGS.items():
            found = [c for c in causes if facts.shares.get(c[0], 0.0) >= WORTH]
            if row.phase.startswith(beginning) and found:
                return max(found, key=lambda cause: facts.shares[cause[0]])[1]
    return f"calibrate again, the machine has changed: rlhf tune {config}"
