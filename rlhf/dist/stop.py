"""One rank fails or is signalled: all ranks stop, together, and one line says why.

Two ways out:

* *Asked* (INT, TERM, USR1, on any rank): what can be cut short is (a rollout), the flag is agreed on
  at the next phase edge, so all ranks leave at the same place, and the run is saved. A rank that
  does not reach an edge within the grace time ends, unless it is saving; so does one that gets INT
  again a second later.
* *Failed*: the rank that raises, or whose engine is gone, posts its cause in the store; every other
  rank's watcher sees it within a second and ends its process, whatever collective it waits in.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rlhf.types import Phase

EXIT_FAILED = 1
EXIT_STOPPED = 75  # EX_TEMPFAIL: start again and the run goes on
POLL_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
MAX_CAUSE = 1000
LATE_S = 3.0
"""Time that the main thread has to name a death itself before the watcher does."""


class StopRequested(Exception):  # noqa: N818  (not an error: the run was asked to stop)
    """All ranks agreed to stop here."""


@dataclass(frozen=True, slots=True)
class Failure:
    rank: int
    phase: str
    step: int
    cause: str

    def __str__(self) -> str:
        return f"stopped: rank {self.rank}, phase {self.phase}, step {self.step}: {self.cause}"


def consensus(flags_by_rank: Sequence[int]) -> int:
    """The signal that all ranks act on: the largest that any rank has seen, 0 = go on."""
    return max(flags_by_rank, default=0)


class Stopper:
    """Signal flag, failure watcher and the current phase of this rank."""

    def __init__(self, rank: int, grace_s: float) -> None:
        self.rank = rank
        self.grace_s = grace_s
        self.phase, self.step = Phase.SETUP, -1
        self.signal = 0
        self._signalled_at = 0.0
        self._store: Any = None
        # launcher's restarts share one store
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._failed_key, self._asked_key = f"rlhf/failed/{attempt}", f"rlhf/asked/{attempt}"
        self._done = threading.Event()
        self._cleanups: list[Callable[[], None]] = []
        self._cut_short: list[Callable[[], None]] = []
        self._deaths: list[Callable[[], BaseException | None]] = []
        self._dead_since: float | None = None
        self._told_others = False

    def install(self) -> None:
        """Take over INT, TERM and USR1 of this process. Main thread only."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def watch(self, open_store: Callable[[], Any]) -> None:
        """Start the watcher thread. ``open_store`` gives it a store client of its own."""
        self._store = open_store()
        threading.Thread(target=self._watch, name="stop-watcher", daemon=True).start()

    def at_exit(self, cleanup: Callable[[], None]) -> None:
        """Run before this process ends itself; must be quick and must not raise."""
        self._cleanups.append(cleanup)

    def cut_short(self, action: Callable[[], None]) -> None:
        """When asked to stop, from the watcher's thread: end early what this rank waits for."""
        self._cut_short.append(action)

    def look_after(self, death: Callable[[], BaseException | None]) -> None:
        """``death`` is asked now and then, from the watcher's thread: None, or what has happened."""
        self._deaths.append(death)

    def enter(self, phase: Phase, step: int) -> None:
        self.phase, self.step = phase, step

    def fail(self, error: BaseException) -> Failure:
        """Post this rank's failure for all; the first one counts. Returns the one that counts."""
        mine = Failure(self.rank, str(self.phase), self.step, describe(error))
        if self._store is None:
            return mine
        try:
            text = self._store.compare_set(self._failed_key, "", json.dumps(_fields(mine)))
            return Failure(**json.loads(text))
        except RuntimeError:  # the store is gone: so is the launcher
            return mine

    def cleanup(self) -> None:
        """End what this process started; called right before the process ends itself."""
        for cleanup in self._cleanups:
            cleanup()

    def close(self) -> None:
        """Stop watching: the run has ended well."""
        self._done.set()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:
            if number == signal.SIGINT and time.monotonic() - self._signalled_at > 1.0:
                self._end(EXIT_STOPPED, "second signal")
            return
        self.signal, self._signalled_at = number, time.monotonic()

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            failure = self._read_failure()
            if failure is not None and failure.rank != self.rank:
                self._end(EXIT_FAILED, None)
            self._look_for_deaths()
            self._share_signal()
            late = time.monotonic() - self._signalled_at > self.grace_s
            if self.signal and late and self.phase is not Phase.SAVE:
                name = signal.Signals(self.signal).name
                self._end(
                    EXIT_STOPPED,
                    f"{name}, and phase {self.phase} did not end within {self.grace_s:.0f} s: "
                    "what was done since the last checkpoint is lost",
                )

    def _look_for_deaths(self) -> None:
        """The main thread sees a death when it next calls; this thread when it does not."""
        cause = next((c for c in (death() for death in self._deaths) if c), None)
        if cause is None:
            return
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if now - self._dead_since > LATE_S and not self._done.is_set():
            failure = self.fail(cause)
            self._end(EXIT_FAILED, describe(cause) if failure.rank == self.rank else None)

    def _share_signal(self) -> None:
        """A signal on one rank is one on all; each ends early what it waits for."""
        try:
            if not self.signal and self._store.check([self._asked_key]):
                self.signal = int(self._store.get(self._asked_key))
                self._signalled_at = time.monotonic()
            if self.signal and not self._told_others:
                self._store.set(self._asked_key, str(int(self.signal)))
        except RuntimeError:
            return  # the store is gone; _read_failure says so in the next round
        if self.signal and not self._told_others:
            self._told_others = True
            for action in self._cut_short:
                action()

    def _read_failure(self) -> Failure | None:
        try:
            if not self._store.check([self._failed_key]):
                return None
            text = self._store.get(self._failed_key).decode()
        except RuntimeError:
            return Failure(-1, str(self.phase), self.step, "the launcher's store is gone")
        return Failure(**json.loads(text)) if text else None

    def _end(self, code: int, why: str | None) -> None:
        if why:
            print(
                f"stopped: rank {self.rank}, phase {self.phase}, step {self.step}: {why}",
                file=sys.stderr,
                flush=True,
            )
        self.cleanup()
        os._exit(code)


def describe(error: BaseException) -> str:
    """Type and text of an error on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " | ".join(lines)
    return (
        f"{type(error).__name__}: {text if len(text) <= MAX_CAUSE else text[:MAX_CAUSE] + ' ...'}"
    )


def _fields(failure: Failure) -> dict[str, Any]:
    return {
        "rank": failure.rank,
        "phase": failure.phase,
        "step": failure.step,
        "cause": failure.cause,
    }
