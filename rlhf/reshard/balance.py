"""How evenly sending can be spread at best, whatever a planner chooses. Pure numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

MAX_SWEEPS = 200
CLOSE = 1e-4
"""Stop when the spread that was found is within this part of the bound."""

Senders = tuple[int, ...]


def least_max_sent(num_bytes: Mapping[Senders, int], world: int) -> float:
    """A lower bound on what the busiest rank sends, in bytes; as a rule the best possible.

    What only ranks of a set S can send is on average ``bytes / |S|`` for each of them, so some rank
    sends at least that. Sets are read off a spread that may cut bytes between senders: whoever is
    above some load there.

    Args:
        num_bytes: ranks that can send some bytes, ascending -> how many.
    """
    jobs = [(np.array(ranks), float(size)) for ranks, size in num_bytes.items() if size]
    load = np.zeros(world)
    shares = [np.zeros(len(ranks)) for ranks, _ in jobs]
    best = 0.0
    for _ in range(MAX_SWEEPS):
        for (ranks, size), share in zip(jobs, shares, strict=True):
            load[ranks] -= share
            share[:] = _filled(load[ranks], size)
            load[ranks] += share
        best = max(best, _bound(jobs, load))
        if load.max(initial=0.0) <= best * (1 + CLOSE):
            break
    return best


def _filled(load: NDArray[np.float64], size: float) -> NDArray[np.float64]:
    """``size`` poured over ranks, the emptiest first, so that those that get some end equal."""
    if len(load) == 1:
        return np.array([size])
    ordered = np.sort(load)
    levels = (size + np.cumsum(ordered)) / np.arange(1, len(load) + 1)
    last = int(np.argmax(levels <= np.append(ordered[1:], np.inf)))
    return np.maximum(levels[last] - load, 0.0)


def _bound(jobs: list[tuple[NDArray[np.int64], float]], load: NDArray[np.float64]) -> float:
    """Over sets of the busiest ranks: bytes that only they can send, over their number."""
    order = np.argsort(-load, kind="stable")
    place = np.empty(len(load), np.int64)
    place[order] = np.arange(len(load))
    inside = np.zeros(len(load))
    for ranks, size in jobs:
        inside[place[ranks].max()] += size
    return float((np.cumsum(inside) / np.arange(1, len(load) + 1)).max())
