"""Constants of the time model out of measured phases. Pure.

Each constant is moved by itself, on a scale of factors, to where predicted and measured seconds
differ least (coordinate descent with a golden section), again and again. Phases cannot tell apart
constants that stand side by side in both; a small pull towards the value before keeps those where
they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf.planner.speeds import Speeds, changed_speeds

GOLDEN = (math.sqrt(5) - 1) / 2
FACTOR = 100.0
"""A constant ends within this factor of where it began."""
SWEEPS = 4
SECTIONS = 12
PULL = 1e-4
"""Of the squared logarithm of a constant's change, against those of the phases' errors."""
SMALLEST_S = 1e-6
FITTED = (
    *("train_matmul", "layer_s", "microbatch_s", "update_s", "score_s", "attention"),
    *("decode_step_s", "decode_layer_s", "decode_bandwidth", "prefill_matmul", "rollout_s"),
    *("nvlink_gbs", "reshard_s", "switch_s", "answer_pack_s", "save_s", "disk_gbs"),
)
UNKNOWN = ("peak_tflops", "hbm_gbs")
"""Of a machine without a data sheet."""
MOST = dict.fromkeys(("train_matmul", "attention", "decode_bandwidth", "prefill_matmul"), 1.0)
"""Shares of what the device can do."""
BEGINNINGS = {"score_s": 1e-2, "rollout_s": 1e-2}
"""Of constants that are zero before anything is measured."""


@dataclass(frozen=True, slots=True)
class Point:
    """A phase that was measured."""

    name: str
    seconds: float
    weight: float = 1.0


Predict = Callable[[Speeds], Mapping[str, float]]
"""Constants -> seconds of every point, by its name."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants, and how far their predictions are from what was measured."""

    speeds: Speeds
    predicted: Mapping[str, float]
    measured: Mapping[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """predicted / measured - 1."""
        return {name: self.predicted[name] / s - 1 for name, s in self.measured.items() if s > 0}


def fit(
    before: Speeds, points: Sequence[Point], predict: Predict, names: Sequence[str] = FITTED
) -> Fitted:
    """The constants that predict the points best, starting from ``before``.

    Args:
        names: of the constants that may change.

    Raises:
        ValueError: there is nothing to fit to.
    """
    points = [p for p in points if p.seconds > SMALLEST_S]
    if not points:
        raise ValueError("no phase was measured that the time model knows")
    values = {name: getattr(before, name) or BEGINNINGS.get(name, 0.0) for name in names}
    values = {name: value for name, value in values.items() if value > 0}
    start = dict(values)

    def loss(tried: Mapping[str, float]) -> float:
        seconds = predict(before.model_copy(update=dict(tried)))
        total = sum(p.weight for p in points)
        errors = sum(
            p.weight * math.log(max(seconds[p.name], SMALLEST_S) / p.seconds) ** 2 for p in points
        )
        return errors / total + PULL * sum(math.log(tried[n] / start[n]) ** 2 for n in tried)

    for sweep in range(SWEEPS):
        reach = FACTOR ** (1 / (1 + sweep))
        for name in values:
            values[name] = _least(
                lambda value, name=name: loss({**values, name: value}),  # type: ignore[misc]
                max(values[name] / reach, start[name] / FACTOR),
                min(values[name] * reach, start[name] * FACTOR, MOST.get(name, math.inf)),
                values[name],
            )
    speeds = changed_speeds(before, {name: _rounded(value) for name, value in values.items()})
    predicted = predict(speeds)
    return Fitted(speeds, predicted, {p.name: p.seconds for p in points})


def _least(cost: Callable[[float], float], low: float, high: float, now: float) -> float:
    """The factor between two values that costs least, by golden section; ``now`` if none is better
    (of several valleys the section may find another)."""
    a, b = math.log(low), math.log(high)
    c, d = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
    at_c, at_d = cost(math.exp(c)), cost(math.exp(d))
    for _ in range(SECTIONS):
        if at_c <= at_d:
            b, d, at_d = d, c, at_c
            c = b - GOLDEN * (b - a)
            at_c = cost(math.exp(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + GOLDEN * (b - a)
            at_d = cost(math.exp(d))
    found = math.exp((a + b) / 2)
    return found if cost(found) < cost(now) else now


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
