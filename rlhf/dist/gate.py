"""The edge between two phases: ranks meet on the CPU, agree whether to stop, time what follows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from rlhf.dist.clock import Cause, Clock, cause_of
from rlhf.dist.groups import PhaseGroup
from rlhf.dist.stop import Stopper, StopRequested, consensus
from rlhf.types import Phase

STOPPABLE = frozenset({Phase.SETUP, Phase.ROLLOUT, Phase.PACK, Phase.SCORE, Phase.EVAL})
"""Phases before which a run may stop: its weights then are those of a whole number of steps."""
PASSES = frozenset({Phase.SCORE, Phase.UPDATE})
"""Phases that consist of passes of a model."""


class Edges(Protocol):
    """What hears of phases, on all ranks alike."""

    def enter(self, phase: Phase, role: str) -> None:
        """All ranks have agreed to go on; collective over all ranks."""
        ...

    def leave(self, phase: Phase, role: str, error: BaseException | None) -> None:
        """The body has ended, with ``error`` or well."""
        ...


class PhaseGate:
    """Every phase of the loop is entered through one gate.

    Seconds are summed per phase until :meth:`take_seconds`; the wait at the edge counts as
    ``wait``, so that a slow peer shows as such, and what memory changes hands as ``switch``.
    ``clock`` knows the cause of every second, inside phases and between them.
    """

    def __init__(self, group: PhaseGroup, stopper: Stopper) -> None:
        self._group = group
        self._stopper = stopper
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, float] = {}
        self._on_enter: list[Callable[[Phase], None]] = []
        self._edges: list[Edges] = []
        self._waits: list[Callable[[], float]] = []
        self.clock = Clock()

    def on_enter(self, switch: Callable[[Phase], None]) -> None:
        """Call ``switch`` at every edge, when all ranks have agreed to go on."""
        self._on_enter.append(switch)

    def tell(self, edges: Edges) -> None:
        """Call ``edges`` whenever a phase is entered, after all ``on_enter``, or left."""
        self._edges.append(edges)

    def on_leave(self, pipeline_wait_s: Callable[[], float]) -> None:
        """Ask at the end of every phase for the seconds, since the last such question, in which
        passes of a model waited for other stages; they are taken from those of the pass.
        """
        self._waits.append(pipeline_wait_s)

    @contextmanager
    def phase(self, phase: Phase, step: int, role: str = "") -> Iterator[None]:
        """Meet, agree, run the body. Collective over all ranks at the edge.

        Raises:
            StopRequested: on every rank alike, when any rank was signalled and the phase is
                one of STOPPABLE.
        """
        with self.clock.spend(Cause.PEERS), self._timed("wait"):
            self._stopper.reach(phase, step)
            asked = consensus(self._group.max([self._stopper.signal]))
            self._stopper.position.enter()
            if asked and phase in STOPPABLE:
                raise StopRequested(
                    f"{signal.Signals(asked).name} at the edge of phase {phase}, step {step}"
                )
        with self.clock.spend(Cause.SWITCH), self._timed("switch"):
            for switch in self._on_enter:
                switch(phase)
            for edges in self._edges:
                edges.enter(phase, role)
        name = f"{phase}_{role}" if role else str(phase)
        with self.clock.spend(cause_of(phase)), self._timed(name):
            try:
                yield
            except BaseException as error:
                self._leave(phase, role, error)
                raise
            finally:
                finish_device_work()
        self._leave(phase, role, None)
        self._take_waits(phase)
        self._memory[name] = max(self._memory.get(name, 0.0), used_memory_gib())

    def _leave(self, phase: Phase, role: str, error: BaseException | None) -> None:
        for edges in self._edges:
            edges.leave(phase, role, error)

    def take_seconds(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    def take_memory(self) -> dict[str, float]:
        """Largest GiB in use at the end of each phase since the last call."""
        taken, self._memory = self._memory, {}
        return taken

    def _take_waits(self, phase: Phase) -> None:
        waited_s = sum(ask() for ask in self._waits)
        if phase in PASSES:
            self.clock.move(cause_of(phase), Cause.PIPELINE, waited_s)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began


def finish_device_work() -> None:
    """Kernels that a phase has started belong to its time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_memory_gib() -> float:
    """Memory of this process: the most allocated on its GPU since the last call, or what is
    resident on the host without one.
    """
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 2**30
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**30
