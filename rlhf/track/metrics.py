"""Numbers that cannot be merged wrongly: each says how two of its kind become one.

A mean of means is wrong when the parts differ in size: 4 tokens of mean 4 and 1 token of mean 1
have mean 3.4, not 2.5. So a mean carries its weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """``value`` over ``weight`` items."""

    value: float
    weight: float = 1.0

    def merge(self, other: Mean) -> Mean:
        weight = self.weight + other.weight
        if not weight:
            return Mean(0.0, 0.0)
        total = sum(m.value * m.weight for m in (self, other) if m.weight)
        return Mean(total / weight, weight)


@dataclass(frozen=True, slots=True)
class Max:
    value: float

    def merge(self, other: Max) -> Max:
        if math.isnan(self.value) or math.isnan(other.value):
            return Max(math.nan)
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Sum:
    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


Metric = Mean | Max | Sum


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One mapping from those of several ranks or micro-batches; names may differ between them.

    Raises:
        TypeError: a name is of two kinds.
    """
    out: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name not in out:
                out[name] = metric
            elif type(out[name]) is type(metric):
                out[name] = out[name].merge(metric)  # type: ignore[arg-type]
            else:
                raise TypeError(f"{name} is a {type(out[name]).__name__} and a {metric}")
    return out


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The plain numbers, sorted by name; means over nothing are left out."""
    return {
        name: metric.value
        for name, metric in sorted(metrics.items())
        if not isinstance(metric, Mean) or metric.weight
    }
