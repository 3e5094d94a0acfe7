"""``rlhf tune``: which values are tried, how they are measured, what is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlhf.tune.records import Round, SliceJob
from rlhf.tune.search import Compared, best, compare, round_order
from rlhf.tune.settings import MICROBATCH, Setting, seconds_of

RunSlice = Callable[[str, SliceJob, Sequence[str]], tuple[list[Round], float]]
"""(name, job, changed settings) -> (rounds, seconds of everything)."""
LIVE_SHARE = 0.6
"""Of the time, for what is tried without starting the engines again."""
MOST_ROUNDS = 40
RESTART_ROUNDS = 3
REPEATS = 4
"""Of each value that needs a start of its own, at most."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that is not tried, and why."""

    setting: str
    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting and what came out."""

    setting: Setting
    times: dict[float, list[float]]
    kept: Compared

    @property
    def changed(self) -> bool:
        return self.kept.value != self.setting.current

    @property
    def table(self) -> list[Compared]:
        return compare(self.times, self.setting.current)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a person gets."""

    tried: list[Tried]
    untried: list[Setting]
    refused: list[Refused]
    rounds: list[Round]
    """Of the slice with passes."""
    step_s: float  # median, with the settings of the configuration
    tuned_step_s: float  # median; equal without a change
    out_of_time: list[str]

    @property
    def microbatch_tokens(self) -> int:
        """That are used from now on."""
        return int(self.tried[0].kept.value)

    @property
    def overrides(self) -> list[str]:
        return [t.setting.override(t.kept.value) for t in self.tried if t.changed]


def admit(setting: Setting, fault: Callable[[str], str | None]) -> tuple[Setting, list[Refused]]:
    """The setting with those values that the planner admits; its first is always kept.

    Args:
        fault: of an override, why it cannot be; None if it can.
    """
    values, refused = [setting.current], []
    for value in setting.values[1:]:
        why = fault(setting.override(value))
        if why is None:
            values.append(value)
        else:
            refused.append(Refused(setting.key, value, why))
    none = setting.why_none
    if len(values) == 1 and refused:
        none = "all others are refused"
    return replace(setting, values=tuple(values), why_none=none), refused


def tune(
    settings: Sequence[Setting], run_slice: RunSlice, seconds: float, refused: Sequence[Refused]
) -> Tuning:
    """Coordinate search: micro-batches first, then one setting after the other, each with what was
    found before.

    Args:
        seconds: for everything; a slice that has begun is finished.

    Raises:
        SliceError: a slice failed.
    """
    began = time.monotonic()
    tried: list[Tried] = []
    (live,) = [s for s in settings if s.key == MICROBATCH]
    job = SliceJob(tuple(int(v) for v in live.values), MOST_ROUNDS, LIVE_SHARE * seconds, save=True)
    rounds, whole_s = run_slice("passes", job, ())
    tried.append(_tried(live, pass_times(rounds)))
    rounds_s = sum(sum(r.seconds.values()) + sum(pass_s(r).values()) for r in rounds)
    start_s = max(0.0, whole_s - rounds_s)
    out_of_time = []
    for setting in (s for s in settings if s.key != MICROBATCH and len(s.values) > 1):
        left_s = seconds - (time.monotonic() - began)
        if left_s < start_s * len(setting.values):
            out_of_time.append(setting.key)
            continue
        base = [t.setting.override(t.kept.value) for t in tried if t.changed]
        tried.append(_restarted(setting, run_slice, base, left_s / 2))
    step_s, tuned_s = _step_seconds(rounds, tried)
    untried = [s for s in settings if len(s.values) == 1]
    return Tuning(tried, untried, list(refused), rounds, step_s, tuned_s, out_of_time)


def _restarted(setting: Setting, run_slice: RunSlice, base: Sequence[str], seconds: float) -> Tried:
    """Every value in turn, forwards and backwards, with engines started for each."""
    began = time.monotonic()
    times: dict[float, list[float]] = {value: [] for value in setting.values}
    job = SliceJob((), RESTART_ROUNDS, 0.0)
    for repeat in range(REPEATS):
        for value in round_order(setting.values, repeat):
            name = f"{setting.key}-{value:g}-{repeat}"
            rounds, _ = run_slice(name, job, [*base, setting.override(value)])
            times[value] += [seconds_of(setting.phases, r.seconds) for r in rounds]
        done = repeat + 1
        if (time.monotonic() - began) * (done + 1) / done > seconds:
            break
    return _tried(setting, times)


def _tried(setting: Setting, times: dict[float, list[float]]) -> Tried:
    return Tried(setting, times, best(times, setting.current))


def pass_times(rounds: Sequence[Round]) -> dict[float, list[float]]:
    """Size of micro-batches -> seconds of a round's passes."""
    out: dict[float, list[float]] = {}
    for r in rounds:
        for size, seconds in pass_s(r).items():
            out.setdefault(size, []).append(seconds)
    return out


def pass_s(r: Round) -> dict[int, float]:
    """Size of micro-batches -> seconds of this round's passes, without what others waited."""
    return {p.microbatch_tokens: sum(p.seconds.values()) for p in r.passes}


def _step_seconds(rounds: Sequence[Round], tried: Sequence[Tried]) -> tuple[float, float]:
    """Medians of whole steps: as configured, and with each phase faster by what was found."""
    live = tried[0]
    steps, tuned = [], []
    for r in rounds:
        passes = pass_s(r)
        around = sum(r.seconds.values())
        steps.append(around + passes[int(live.setting.current)])
        if (chosen := int(live.kept.value)) in passes:
            saved = sum(
                seconds_of(t.setting.phases, r.seconds) * (1 - t.kept.ratio) for t in tried[1:]
            )
            tuned.append(around + passes[chosen] - saved)
    return _median(steps), _median(tuned)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
