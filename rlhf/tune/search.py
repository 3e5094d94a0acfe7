"""Which of several values of a setting is fastest, out of noisy times. Pure.

Values are measured in rounds, every value that is left in each round, so that what disturbs a round
(other work on the machine, hot or cold caches) disturbs all of them. Only ratios within a round are
compared, by their median over rounds. After some rounds the worse half is given up (successive
halving, arXiv:1502.07943); the value that the configuration has is never given up, since all
others are compared with it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_GAIN = 0.03
"""A value that is not faster by so much is not worth a change."""
NUM_SIGMAS = 3.0
"""Several values are tried, and none of them may win by luck."""
MAD_TO_SIGMA = 1.4826
"""Of a normal distribution, standard deviation over median absolute deviation."""
ROUNDS_PER_RUNG = 2
FEWEST_ROUNDS = 3
"""Before a value may win."""

Times = Mapping[float, Sequence[float]]
"""Value -> seconds in each round; a value that was given up has fewer."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A value against the one that the configuration has; 0.9 is 10 % less time."""

    value: float
    ratio: float  # median over the rounds that both have
    error: float  # of the median, one standard deviation
    num_rounds: int

    @property
    def is_faster(self) -> bool:
        """Clearly, and by enough."""
        surely = self.ratio + NUM_SIGMAS * self.error < 1
        return self.num_rounds >= FEWEST_ROUNDS and surely and self.ratio < 1 - MIN_GAIN


def compare(times: Times, current: float) -> list[Compared]:
    """All values, fastest first.

    The error of a median of n rounds is ``1.25 sigma / sqrt(n)``, sigma from the median distance to
    the median.

    Raises:
        ValueError: ``current`` was not measured.
    """
    if not times.get(current):
        raise ValueError(f"the current value {current:g} must be measured, there is {list(times)}")
    out = []
    for value, seconds in times.items():
        both = zip(seconds, times[current], strict=False)
        ratios = [mine / base for mine, base in both]
        ratio = statistics.median(ratios)
        spread = MAD_TO_SIGMA * statistics.median(abs(r - ratio) for r in ratios)
        out.append(Compared(value, ratio, 1.25 * spread / math.sqrt(len(ratios)), len(ratios)))
    return sorted(out, key=lambda c: c.ratio)


def survivors(times: Times, current: float) -> list[float]:
    """Half of the values, rounded up: ``current`` and the fastest others; in the order of
    ``times``."""
    others = [c.value for c in compare(times, current) if c.value != current]
    kept = {current, *others[: math.ceil(len(times) / 2) - 1]}
    return [value for value in times if value in kept]


def best(times: Times, current: float) -> Compared:
    """The fastest that is clearly faster than ``current``, else ``current`` itself."""
    ranked = compare(times, current)
    faster = [c for c in ranked if c.is_faster]
    return faster[0] if faster else next(c for c in ranked if c.value == current)


def round_order(values: Sequence[float], number: int) -> list[float]:
    """In which a round measures: another value first each time, and every second time backwards."""
    start = number // 2 % len(values)
    order = [*values[start:], *values[:start]]
    return order if number % 2 == 0 else order[::-1]


def next_values(times: Times, current: float, num_rounds: int) -> list[float]:
    """What the next round measures, after ``num_rounds``: fewer after every rung."""
    alive = [value for value, seconds in times.items() if len(seconds) == num_rounds]
    if num_rounds and num_rounds % ROUNDS_PER_RUNG == 0 and len(alive) > 2:
        return survivors({value: times[value] for value in alive}, current)
    return alive
