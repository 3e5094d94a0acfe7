"""How long ranks wait for one another, counted by the time in which the waiting one really ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rlhf.dist.board import Beat
from rlhf.types import Phase

LONG_PHASES = frozenset({Phase.SETUP, Phase.ROLLOUT, Phase.EVAL, Phase.SAVE})
"""Inside these, ranks have unequal work, and those without wait for the others."""
LONG_EDGES = frozenset({Phase.SETUP, Phase.ROLLOUT, Phase.EVAL})
"""An edge after one of these ends a rank's unequal work."""
LONGEST_TICK_S = 2.0
"""One round of a watcher counts as no more: it may have been stopped, or starved, with the rest."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds; see ``config.schema.DistSection``."""

    silence_s: float
    edge_s: float
    rollout_s: float


class Patience:
    """Time, in the watcher's rounds, for which something has not changed."""

    def __init__(self) -> None:
        self._seen: object = None
        self._at = 0.0
        self.waited_s = 0.0

    def see(self, value: object, now: float) -> float:
        """Note a value; returns the seconds since it was first seen, zero when it is new."""
        if value != self._seen:
            self._seen, self.waited_s = value, 0.0
        else:
            self.waited_s += min(now - self._at, LONGEST_TICK_S)
        self._at = now
        return self.waited_s


class Position:
    """Where this rank is. Written by its main thread, read by its watcher."""

    def __init__(self) -> None:
        self.phase, self.step = Phase.SETUP, -1
        self._left = Phase.SETUP
        self._at_edge = False
        self._meetings = 0
        self._waiting = False

    def reach(self, phase: Phase, step: int) -> None:
        """At the edge of a phase."""
        self._left, self.phase, self.step, self._at_edge = self.phase, phase, step, True

    def enter(self) -> None:
        """All ranks are here: the phase begins."""
        self._at_edge = False

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """All ranks meet, in the same order on each."""
        self._meetings += 1
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def waits_for(self) -> int | None:
        """Number of the meeting in which this rank waits for others, if it does."""
        number = self._meetings
        return number if self._waiting else None

    def in_setup(self) -> bool:
        """Nothing has been done that could be lost."""
        return Phase.SETUP in (self.phase, self._left if self._at_edge else self.phase)

    def is_patient(self) -> bool:
        """Whether others may take as long as a rollout to come."""
        return self._left in LONG_EDGES if self._at_edge else self.phase in LONG_PHASES

    def beat(self, last: Beat) -> Beat:
        """The next sign of life."""
        return replace(
            last,
            number=last.number + 1,
            phase=str(self.phase),
            step=self.step,
            meetings=self._meetings,
            at_edge=self._at_edge,
        )
