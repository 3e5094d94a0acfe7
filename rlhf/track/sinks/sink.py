"""What a sink is, and the thread that keeps it from ever killing or stalling a run."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)


class SampleRow(Protocol):
    """An answer to look at."""

    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def expected(self) -> str: ...
    @property
    def value(self) -> float: ...


class Sink(Protocol):
    """A place that metrics are shown at. May raise and may block: see :class:`Background`."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step, numbered from 0."""
        ...

    def between(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        """What was done after ``steps_done`` steps and before the next: evaluation, checkpoint."""
        ...

    def samples(self, title: str, rows: Sequence[SampleRow]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Job = Callable[[Sink], None] | _Stop


class Background:
    """Runs one sink in a thread of its own behind a bounded queue.

    A sink that raises, at creation or later, is reported once and left out from then on. While a
    sink blocks, what doesn't fit into the queue is dropped and counted. The thread is a daemon: a
    blocked one cannot keep the process.
    """

    def __init__(self, name: str, make: Callable[[], Sink], capacity: int = 256) -> None:
        self.name = name
        self.dropped = 0
        self._make = make
        self._queue: queue.Queue[_Job] = queue.Queue(capacity)
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def post(self, job: Callable[[Sink], None]) -> None:
        """Hand over one call; returns at once."""
        if self._failed.is_set():
            return
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self.dropped += 1

    def close(self, deadline: float) -> None:
        """Let the thread finish what is queued, until ``deadline`` (``time.monotonic()``)."""
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Full):
                self._queue.put(_Stop(), timeout=0.1)
                break
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("%s did not finish in time and is left behind", self.name)
        if self.dropped:
            logger.warning("%s was too slow: %d entries are missing there", self.name, self.dropped)

    def _run(self) -> None:
        try:
            sink = self._make()
            while not isinstance(job := self._queue.get(), _Stop):
                job(sink)
            sink.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001  a sink may not kill a run
            self._failed.set()
            logger.warning(
                "%s is off for the rest of the run (%s: %s); metrics.jsonl has everything",
                self.name,
                type(error).__name__,
                error,
            )
