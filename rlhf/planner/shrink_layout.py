"""Layouts of a job on fewer ranks: an axis that spreads something still does, where it can. Pure.

Every size of the smaller layout divides the configured one, so an axis of one stays one and nothing
that a job does not have comes in. Among such layouts the first axes of ``TRAIN_AXES`` and
``ROLLOUT_AXES`` count most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout

LayoutT = TypeVar("LayoutT", TrainLayout, RolloutLayout)

TRAIN_AXES: Mapping[str, Callable[[TrainLayout], int]] = {
    "train.pp": lambda t: t.pp,
    "train.tp": lambda t: t.tp,
    "train.ep": lambda t: t.ep,
    "train.cp": lambda t: t.cp,
    "train.dp": lambda t: t.dp,
    "train.etp": lambda t: t.expert_tp if t.ep > 1 or t.etp is not None else 1,
    "expert dp": lambda t: t.edp if t.ep > 1 else 1,
}
"""Most important first: name -> over how many ranks."""
ROLLOUT_AXES: Mapping[str, Callable[[RolloutLayout], int]] = {
    "rollout.pp": lambda r: r.pp,
    "rollout.tp": lambda r: r.tp,
    "rollout.ep": lambda r: r.ep,
    "rollout.dp": lambda r: r.dp,
    "engines": lambda r: r.num_engines,
    "attention tp": lambda r: r.attention_tp if r.dp > 1 else 1,
    "experts' tp": lambda r: r.expert_tp if r.ep > 1 else 1,
}


@dataclass(frozen=True, slots=True)
class Axis:
    """Over how many ranks something is spread, in the job and in its rehearsal."""

    name: str
    configured: int
    rehearsed: int

    @property
    def kept(self) -> bool:
        return (self.configured > 1) == (self.rehearsed > 1)


@dataclass(frozen=True, slots=True)
class Layouts:
    """Of training and engines, on as many ranks."""

    train: TrainLayout
    rollout: RolloutLayout

    def axes(self, smaller: Layouts) -> list[Axis]:
        """Each axis here beside that of ``smaller``; those of one rank in both are left out."""
        train = [Axis(n, f(self.train), f(smaller.train)) for n, f in TRAIN_AXES.items()]
        rollout = [Axis(n, f(self.rollout), f(smaller.rollout)) for n, f in ROLLOUT_AXES.items()]
        return [a for a in (*train, *rollout) if max(a.configured, a.rehearsed) > 1]


def shrink_layouts(full: Layouts, ranks: int) -> Layouts:
    """The layouts on ``ranks`` ranks that keep most of the axes.

    The numbers of layers per stage and virtual chunks are not decided here.

    Raises:
        ValueError: no such layouts; names the numbers of ranks that have some.
    """
    found = _layouts(full, ranks)
    if found is None:
        world = full.train.world
        possible = [n for n in _divisors(world) if _layouts(full, n) is not None]
        raise ValueError(
            f"--ranks: {ranks} ranks cannot form layouts whose sizes divide those of the "
            f"configuration's {world} ranks; give one of {', '.join(map(str, possible))}"
        )
    if ranks == 1 < full.train.world:
        raise ValueError(
            "--ranks: must be at least 2, is 1: one rank spreads nothing and moves nothing; "
            + words_of_needs(full)
        )
    return found


def words_of_needs(full: Layouts) -> str:
    """``2 ranks keep train.pp, rollout.tp; ...; 8 keep all``: who needs how many."""
    told: list[str] = []
    before: set[str] = set()
    for ranks in _divisors(full.train.world):
        found = _layouts(full, ranks)
        if found is None:
            continue
        axes = full.axes(found)
        kept = {a.name for a in axes if a.kept}
        if all(a.kept for a in axes):
            return "; ".join([*told, f"{ranks} keep all"])
        if new := [a.name for a in axes if a.kept and a.name not in before]:
            told.append(f"{ranks} ranks keep {', '.join(new)}")
        before |= kept
    return "; ".join(told)


def ranks_for_all(full: Layouts) -> int:
    """The smallest number of ranks that keeps every axis."""
    for ranks in _divisors(full.train.world):
        found = _layouts(full, ranks)
        if found is not None and all(axis.kept for axis in full.axes(found)):
            return ranks
    return full.train.world


def _layouts(full: Layouts, ranks: int) -> Layouts | None:
    train = _best(full.train, _train_layouts(full.train, ranks), TRAIN_AXES)
    rollout = _best(full.rollout, _rollout_layouts(full.rollout, ranks), ROLLOUT_AXES)
    return Layouts(train, rollout) if train is not None and rollout is not None else None


def _best(
    full: LayoutT, found: Iterator[LayoutT], axes: Mapping[str, Callable[[LayoutT], int]]
) -> LayoutT | None:
    """Most axes kept, the first ones first; then the one that is smaller by like factors."""

    def merit(layout: LayoutT) -> tuple[list[bool], float]:
        sizes = [(axis(full), axis(layout)) for axis in axes.values()]
        kept = [(a > 1) == (b > 1) for a, b in sizes]
        return kept, -sum(math.log(a / b) ** 2 for a, b in sizes)

    return max(found, key=merit, default=None)


def _train_layouts(full: TrainLayout, ranks: int) -> Iterator[TrainLayout]:
    sizes = (_divisors(n) for n in (full.tp, full.pp, full.cp, full.ep, full.expert_tp))
    for tp, pp, cp, ep, etp in product(*sizes):
        if full.etp is None and etp != tp:
            continue
        if tp > 1 and ep == 1 < full.ep and etp != tp:
            continue  # Megatron would not sum the experts' gradients
        try:
            layout = TrainLayout(ranks, tp, pp, cp=cp, ep=ep, etp=None if full.etp is None else etp)
        except LayoutError:
            continue
        if layout.dp and full.dp % layout.dp == 0:
            yield layout


def _rollout_layouts(full: RolloutLayout, ranks: int) -> Iterator[RolloutLayout]:
    sizes = (_divisors(n) for n in (full.tp, full.dp, full.ep, full.pp))
    for tp, dp, ep, pp in product(*sizes):
        try:
            layout = RolloutLayout(ranks, tp, dp, ep, pp)
        except LayoutError:
            continue
        if layout.num_engines and full.num_engines % layout.num_engines == 0:
            yield layout


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
