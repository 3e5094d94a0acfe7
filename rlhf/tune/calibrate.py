"""A calibration file out of what slices have measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf.planner.contract import Promise
from rlhf.planner.load import Load
from rlhf.planner.speeds import CPU, Speeds
from rlhf.tune.fit import FITTED, UNKNOWN, Fitted, Point, fit
from rlhf.tune.records import Round

AROUND = ("rollout", "reshard")
PER_SIZE = ("score", "update")
EDGES = "switch"
PACK = "pack"
SMALL_WEIGHT = 0.05
"""Of phases that take next to nothing."""
OTHERS_WEIGHT = 0.5
"""Of passes with micro-batches of other sizes than the one that is kept, all together."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """New constants and what they rest on."""

    fitted: Fitted
    num_rounds: int

    def head(self, config: str) -> str:
        """What the file says of itself."""
        worst = max((abs(e) for e in self.fitted.errors.values()), default=0.0)
        return (
            f"Constants of the time model, measured by `rlhf tune {config}` in {self.num_rounds} "
            f"rounds.\nLargest error of a phase that was measured: {worst:.0%}."
        )


@dataclass(frozen=True, slots=True)
class Size:
    """Passes with micro-batches of one size."""

    tokens: int
    load: Load
    trained_share: float
    seconds: Mapping[str, float]


def calibrate(
    promise: Promise,
    load: Load,
    before: Speeds,
    rounds: Sequence[Round],
    *,
    size: int,
    device: str,
) -> Calibration:
    """Fit to the medians over rounds.

    Args:
        load: of the configuration.
        size: of the micro-batches that will be used.
        device: what it is, for the file.
    """
    sizes = [_size(load, rounds, tokens) for tokens in _sizes(rounds, size)]
    around = {
        name: _median(r.seconds[name] for r in rounds if name in r.seconds)
        for name in AROUND
        if any(name in r.seconds for r in rounds)
    }
    if saves := [r.save_s for r in rounds if r.save_s is not None]:
        around["save"] = _median(saves)
    around[EDGES] = _median(_edges_s(r) for r in rounds)
    around[PACK] = _median(p.seconds.get(PACK, 0.0) for r in rounds for p in r.passes)
    points = [
        Point(name, seconds, SMALL_WEIGHT if name in (EDGES, PACK) else 1.0)
        for name, seconds in around.items()
    ]
    for one in sizes:
        weight = 1.0 if one is sizes[0] else OTHERS_WEIGHT / (len(sizes) - 1)
        points += [Point(f"{n}, {one.tokens}", s, weight) for n, s in one.seconds.items()]
    names = FITTED if before.device != CPU.device else (*UNKNOWN, *FITTED)
    start = before.model_copy(update={"device": device})
    fitted = fit(start, points, _predictor(promise, sizes), names)
    return Calibration(fitted, len(rounds))


def _predictor(promise: Promise, sizes: Sequence[Size]) -> Callable[[Speeds], dict[str, float]]:
    def predict(speeds: Speeds) -> dict[str, float]:
        out = promise.seconds(speeds, sizes[0].load)
        for size in sizes:
            seconds = promise.pass_seconds(speeds, size.load, size.trained_share)
            out |= {f"{name}, {size.tokens}": s for name, s in seconds.items()}
        return out

    return predict


def _sizes(rounds: Sequence[Round], first: int) -> list[int]:
    """Those that were measured."""
    every = dict.fromkeys(p.microbatch_tokens for r in rounds for p in r.passes)
    return sorted(every, key=lambda size: size != first)


def _size(load: Load, rounds: Sequence[Round], tokens: int) -> Size:
    """What was asked of the passes in the mean over their rounds, and their median seconds."""
    mine = [(r, p) for r in rounds for p in r.passes if p.microbatch_tokens == tokens]
    seconds = {
        name: _median(p.seconds.get(name, 0.0) for _, p in mine)
        for name in dict.fromkeys(name for _, p in mine for name in p.seconds)
        if name.startswith(PER_SIZE)
    }
    of = [r for r, _ in mine]
    return Size(
        tokens,
        replace(
            load,
            prompt_tokens=_mean(r.prompt_tokens for r in of),
            answer_tokens=_mean(r.answer_tokens for r in of),
            longest_answer_tokens=max(r.longest_answer_tokens for r in of),
            microbatch_tokens=tokens,
        ),
        _mean(r.trained_answers / r.answers for r in of),
        seconds,
    )


def _edges_s(r: Round) -> float:
    """The engine sleeps before the first pass of a round and wakes after the last."""
    return r.seconds.get(EDGES, 0.0) + max((p.seconds.get(EDGES, 0.0) for p in r.passes), default=0)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
