"""Where a rank's seconds go: at any moment they have one cause, so all of them sum to the wall.

Causes that only a phase itself knows (what a schedule waited for, what a movement of weights was
busy with) are moved from the phase's own cause afterwards; the sum stays what it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from rlhf.types import Phase


class Cause(StrEnum):
    """What a second of a rank was spent on."""

    DECODE = "decode"
    """The rank's engine generates, prompts included."""
    TAIL_IDLE = "tail_idle"
    """It has finished, others generate."""
    REWARD_WAIT = "reward_wait"
    """It has finished, the rank still scores its answers."""
    PACK = "pack"
    SCORE = "score"
    TRAIN = "train"
    """Updates, collectives of tensor, context, expert and data parallel ranks included."""
    PIPELINE = "pipeline"
    """In a pass, neither forward nor backward: others compute, or tensors are on their way."""
    RESHARD = "reshard"
    """The rest of it."""
    RESHARD_PACK = "reshard_pack"
    RESHARD_WIRE = "reshard_wire"
    RESHARD_WRITE = "reshard_write"
    RESHARD_VERIFY = "reshard_verify"
    """Checksums, a look for NaN, and the probe by trainer and engine."""
    RESTORE = "restore"
    SAVE = "save"
    EVAL = "eval"
    SWITCH = "switch"
    """Memory changes hands."""
    PEERS = "peers"
    """Waiting for other ranks where phases meet."""
    OTHER = "other"


_OF_PHASE = {
    "setup": Cause.OTHER,
    "rollout": Cause.OTHER,  # the collector says what it waits for
    "pack": Cause.PACK,
    "score": Cause.SCORE,
    "update": Cause.TRAIN,
    "reshard": Cause.RESHARD,
    "restore": Cause.RESTORE,
    "save": Cause.SAVE,
    "eval": Cause.EVAL,
}


def cause_of(phase: Phase) -> Cause:
    """Of the seconds of a phase that have no cause of their own."""
    return _OF_PHASE[str(phase)]


@dataclass(frozen=True, slots=True)
class Account:
    """Seconds of one rank between two calls of :meth:`Clock.take`."""

    wall_s: float
    seconds: Mapping[Cause, float]  # sums to wall_s


class Clock:
    """Counts the running cause; of nested ones the innermost."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[Cause, float] = {}
        self._running = Cause.OTHER
        self._since = self._began = now()

    @contextmanager
    def spend(self, cause: Cause) -> Iterator[None]:
        """The seconds of the body."""
        before = self._turn_to(cause)
        try:
            yield
        finally:
            self._turn_to(before)

    def move(self, source: Cause, target: Cause, seconds: float) -> None:
        """``seconds`` that have been counted, or are, as those of ``source`` are ``target``'s."""
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def take(self) -> Account:
        """Everything since the last call."""
        self._turn_to(self._running)
        wall_s, self._began = self._since - self._began, self._since
        taken, self._seconds = self._seconds, {}
        return Account(wall_s, taken)

    def _turn_to(self, cause: Cause) -> Cause:
        """Returns what ran before."""
        now = self._now()
        before = self._running
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._running, self._since = cause, now
        return before
