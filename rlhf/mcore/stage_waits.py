"""How long a rank waits for other pipeline stages, measured where megatron's schedules say it.

Megatron calls ``config.timers`` at the beginning and end of every forward and backward computation,
of the schedule around them and of the reduction of tied embeddings. What lies between computations
is waiting for other stages, and the transfer itself; that holds for receives that a schedule waits
for at once and for those that it overlaps alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

COMPUTATIONS = frozenset({"forward-compute", "backward-compute"})
SCHEDULE = "forward-backward"
REDUCTIONS = "all-grads-sync"
"""Begins when the schedule has done its last computation; not reached without gradients."""
TIED = "embedding-grads-all-reduce"
"""First and last stage add up what they have of a matrix that both use."""


class StageWaits:
    """What megatron takes for its timers. Times are those of the device, between two events."""

    def __init__(self, num_stages: int, now: Callable[[], Any] | None = None) -> None:
        """With one stage nothing is waited for.

        Args:
            now: a recorded event that tells ``elapsed_time`` to a later one in milliseconds;
                empty: of torch.
        """
        self._num_stages = num_stages
        self._now = now or _recorded_event
        self._begun: Any = None
        self._waits: list[tuple[Any, Any]] = []

    def __call__(self, name: str, log_level: int | None = None) -> _Watch:
        """megatron's ``timers(name, log_level)``."""
        return _Watch(self, name)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Of our own exchanges between stages."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        if self._begun is None and self._num_stages > 1:
            self._begun = self._now()

    def end(self) -> None:
        if self._begun is not None:
            self._waits.append((self._begun, self._now()))
            self._begun = None

    def take_s(self) -> float:
        """Seconds since the last call; the device must have done its work."""
        self._begun = None  # of a pass that has failed
        waits, self._waits = self._waits, []
        return sum(float(begun.elapsed_time(ended)) for begun, ended in waits) / 1e3


class _Watch:
    """One timer of megatron."""

    def __init__(self, waits: StageWaits, name: str) -> None:
        self._waits = waits
        self._name = name

    def start(self, barrier: bool = False) -> None:
        if self._name in (SCHEDULE, TIED):
            self._waits.begin()
        elif self._name in COMPUTATIONS or self._name == REDUCTIONS:
            self._waits.end()

    def stop(self, barrier: bool = False) -> None:
        if self._name in COMPUTATIONS:
            self._waits.begin()
        elif self._name in (SCHEDULE, TIED):
            self._waits.end()


def _recorded_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
