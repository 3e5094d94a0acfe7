"""One rank fails, falls silent or is signalled: all ranks stop, together, and one line says why.

Ways out:

* *Asked* (INT, TERM, USR1, on any rank, or by the launcher): what can be cut short is (a rollout),
  the flag is agreed on at the next phase edge, so all ranks leave at the same place, and the run is
  saved. A rank that does not reach an edge within the grace time ends the run, unless it is saving;
  so does one that gets INT again a second later.
* *Failed*: the rank that raises, or whose engine is gone, posts its cause in the store; every other
  rank's watcher sees it within a second and ends its process, whatever collective it waits in.
* *Silent* (stopped, or hanging): every rank's watcher counts up a number in the store, and looks
  after that of the next rank; who waits too long in a meeting names the ranks that have not come.

Two threads: the watcher talks to the store; the other one, which does not, sees signals, and a
store that no longer answers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

from rlhf.dist.board import Beat, Board, Failure, StoreLostError
from rlhf.dist.lost import LostPeer, is_lost_peer
from rlhf.dist.patience import Limits, Patience, Position
from rlhf.dist.signals import SignalPipe
from rlhf.types import Phase

EXIT_FAILED = 1
EXIT_STOPPED = 75  # EX_TEMPFAIL: start again and the run goes on
POLL_S = 0.5
ROUNDS_PER_BEAT = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
MAX_CAUSE = 1000
MAX_NAMED = 8
LATE_S = 3.0
"""Time that the main thread has to name a death itself before the watcher does."""
VERDICT_S = 5.0
"""Time that others have to say who died before a lost connection is given as the cause."""
LEAVE_S = 5.0
"""Time that others have to read a failure from the store of a rank that ends."""
CLOSE_S = 60.0
"""Time that others have to end well while a rank keeps their store."""
LOST = "what was done since the last complete checkpoint is lost"


class StopRequested(Exception):  # noqa: N818  (not an error: the run was asked to stop)
    """All ranks agreed to stop here."""


def consensus(flags_by_rank: Sequence[int]) -> int:
    """The signal that all ranks act on: the largest that any rank has seen, 0 = go on."""
    return max(flags_by_rank, default=0)


class Stopper:
    """Signal flag, watcher and the position of this rank."""

    def __init__(self, rank: int, grace_s: float) -> None:
        self.rank = rank
        self.grace_s = grace_s
        self.position = Position()
        self.signal = 0
        self._signalled_at = 0.0
        self._asked_twice = False
        self._signals: SignalPipe | None = None
        self._board: Board | None = None
        self._watcher: threading.Thread | None = None
        self._size = 1
        self._limits = Limits(silence_s=grace_s, edge_s=grace_s, rollout_s=grace_s)
        self._serves_store = False
        self._rounds = 0
        self._done = threading.Event()
        self._ending = threading.Lock()
        self._cleanups: list[Callable[[], None]] = []
        self._cut_short: list[Callable[[], None]] = []
        self._deaths: list[tuple[Callable[[], BaseException | None], float]] = []
        self._partings: list[tuple[Callable[[], None], Sequence[int]]] = []
        self._dead_since: float | None = None
        self._told_others = False
        self._beat = Beat()
        self._neighbour, self._meeting, self._grace = Patience(), Patience(), Patience()

    def install(self) -> None:
        """Take over INT, TERM and USR1 of this process. Main thread only."""
        self._signals = SignalPipe(SIGNALS)
        threading.Thread(target=self._take_signals, name="stop-signals", daemon=True).start()

    def watch(self, open_store: Callable[[], Any], size: int, limits: Limits) -> None:
        """Start the watcher thread. ``open_store`` gives it a store client of its own."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._size, self._limits = size, limits
        self._serves_store = self.rank == 0 and not agent
        self._board = Board(open_store())
        self._board.beat(self.rank, self._beat)
        self._watcher = threading.Thread(target=self._watch, name="stop-watcher", daemon=True)
        self._watcher.start()

    def at_exit(self, cleanup: Callable[[], None]) -> None:
        """Run before this process ends itself, the last one first; quick, and does not raise."""
        self._cleanups.append(cleanup)

    def cut_short(self, action: Callable[[], None]) -> None:
        """When asked to stop, from the watcher's thread: end early what this rank waits for."""
        self._cut_short.append(action)

    def look_after(self, death: Callable[[], BaseException | None], late_s: float = LATE_S) -> None:
        """``death`` is asked now and then by the watcher's thread: None, or what has happened.

        The main thread has ``late_s`` to name it itself.
        """
        self._deaths.append((death, late_s))

    def part_with(self, ranks: Sequence[int], prepare: Callable[[], None]) -> None:
        """At a good end, run ``prepare`` and then wait until all ``ranks`` have got as far.

        For what one rank may only take down when the others' no longer mind. A rank that does not
        come is waited for no longer than CLOSE_S. ``prepare`` must be quick and must not raise.
        """
        self._partings.append((prepare, ranks))

    def reach(self, phase: Phase, step: int) -> None:
        """This rank is at the edge of a phase: all can read it; signals from before count."""
        self._note_signals(0.0)
        self.position.reach(phase, step)
        if self._board is not None:
            with suppress(StoreLostError):  # the watcher sees it too
                self._board.beat(self.rank, self.position.beat(self._beat))

    def meeting(self) -> AbstractContextManager[None]:
        """Around every meeting of all ranks: the time in it has a limit."""
        return self.position.meeting()

    def fail(self, error: BaseException) -> Failure:
        """Post this rank's failure for all; the first one counts. Returns the one that counts.

        A lost connection is a consequence: who knows its cause gets some seconds to tell it first,
        and the watcher then ends this process.
        """
        mine = self._failure(describe(error))
        if self._board is None:
            return mine
        try:
            if is_lost_peer(error):
                mine = self._wait_for_verdict(mine)
            return self._board.post(mine)
        except StoreLostError:
            self._done.wait(VERDICT_S)  # the watcher sees it too and speaks for all
            return mine

    def claim_end(self) -> None:
        """Only one thread may end this process; any other that wants to waits here for ever."""
        self._ending.acquire()

    def leave(self, code: int) -> NoReturn:
        """End what this process started, and the process. Does not return."""
        for cleanup in reversed(self._cleanups):
            cleanup()
        self._say_goodbye(LEAVE_S)
        with suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
        os._exit(code)

    def close(self) -> None:
        """Stop watching: the run has ended well."""
        self._done.set()
        if self._watcher is not None:  # Python must not end while it is inside the store's client
            self._watcher.join(LEAVE_S)
        for prepare, _ in self._partings:
            prepare()
        self._say_goodbye(CLOSE_S, {rank for _, ranks in self._partings for rank in ranks})

    # ---------------------------------------------------------------- signals

    def _take_signals(self) -> None:
        rounds = Patience()
        while True:
            self._note_signals(POLL_S)
            if self._board is None or self._done.is_set():
                rounds = Patience()  # the store is asked nothing yet, or any more
                continue
            silent_s = rounds.see(self._rounds, time.monotonic())
            if silent_s > self._limits.silence_s:
                self._lose_store(f"has not answered for {silent_s:.0f} s")

    def _note_signals(self, timeout_s: float) -> None:
        for number in self._signals.take(timeout_s) if self._signals else ():
            if not self.signal:
                self.signal, self._signalled_at = number, time.monotonic()
            elif number == signal.SIGINT and time.monotonic() - self._signalled_at > 1.0:
                self._asked_twice = True

    # ---------------------------------------------------------------- the watcher

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            self._rounds += 1
            try:
                assert self._board is not None
                self._round(self._board)
            except StoreLostError:
                if not self._done.is_set():
                    self._lose_store("is gone")
            except Exception as error:  # noqa: BLE001  (named to all ranks)
                self._end(self._failure(describe(error)))

    def _round(self, board: Board) -> None:
        failure = board.failure()
        if failure is not None and failure.told_by != self.rank:
            self._end(None)
        self._look_for_deaths()
        self._share_signal(board)
        now = time.monotonic()
        self._check_grace(now)
        if self._rounds % ROUNDS_PER_BEAT == 0:
            self._beat = self.position.beat(self._beat)
            board.beat(self.rank, self._beat)
            self._check_neighbour(board, now)
        self._check_meeting(board, now)

    def _look_for_deaths(self) -> None:
        """The main thread sees a death when it next calls; this thread when it does not."""
        found = ((death(), late_s) for death, late_s in self._deaths)
        cause, late_s = next(((c, late_s) for c, late_s in found if c), (None, 0.0))
        if cause is None:
            return
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if isinstance(cause, LostPeer):
            late_s += VERDICT_S
        if now - self._dead_since >= late_s and not self._done.is_set():
            self._end(self._failure(describe(cause)))

    def _share_signal(self, board: Board) -> None:
        """A signal on one rank is one on all; each ends early what it waits for."""
        if not self.signal and (asked := board.asked()):
            self.signal, self._signalled_at = asked, time.monotonic()
        if self.signal and not self._told_others:
            board.ask(self.signal)
            self._told_others = True
            for action in self._cut_short:
                action()

    def _check_grace(self, now: float) -> None:
        waited_s = self._grace.see(self.signal, now)
        if not self.signal or self._done.is_set():
            return
        name = signal.Signals(self.signal).name
        if self._asked_twice:
            self._end(self._failure(f"a second {name}: ended at once; {LOST}"))
        if waited_s <= self.grace_s or self.position.phase is Phase.SAVE:
            return
        if self.position.in_setup():
            self.claim_end()
            if self.rank == 0:
                say(f"stopped: {name} before the first step; there was nothing to save")
            self.leave(EXIT_STOPPED)
        self._end(
            self._failure(f"{name}, and the phase did not end within {self.grace_s:.0f} s: {LOST}")
        )

    def _check_neighbour(self, board: Board, now: float) -> None:
        """Ranks look after one another in a ring, so that it costs each of them the same."""
        if self._size == 1:
            return
        rank = (self.rank + 1) % self._size
        beat = board.last_beat(rank)
        silent_s = self._neighbour.see(beat.number, now)
        if silent_s > self._limits.silence_s and not board.has_left(rank):
            cause = (
                f"no sign of life for {silent_s:.0f} s (dist.silence_s="
                f"{self._limits.silence_s:.0f}): its process is stopped, hangs or has lost its node"
            )
            self._end(Failure(rank, beat.phase, beat.step, cause, self.rank))

    def _check_meeting(self, board: Board, now: float) -> None:
        number = self.position.waits_for()
        if number is None:
            self._meeting = Patience()
            return
        patient = self.position.is_patient()
        limit_s = self._limits.rollout_s if patient else self._limits.edge_s
        if self._meeting.see(number, now) <= limit_s:
            return
        beats = board.last_beats([r for r in range(self._size) if r != self.rank])
        missing = {r: beat for r, beat in beats.items() if beat.meetings < number}
        setting = "rollout.timeout_s" if patient else "dist.timeout_s"
        here = self.position.beat(self._beat)
        cause = f"did not come within {limit_s:.0f} s ({setting}) to where others wait, {here}"
        if not missing:
            self._end(
                self._failure(f"a meeting of all ranks took over {limit_s:.0f} s ({setting})")
            )
        (rank, beat), *others = missing.items()
        if others:
            named = ", ".join(f"rank {r} ({b})" for r, b in others[: MAX_NAMED - 1])
            more = len(others) - MAX_NAMED + 1
            cause += f"; nor did {named}" + (f" and {more} more" if more > 0 else "")
        where = " (at its edge)" if beat.at_edge else ""
        self._end(Failure(rank, beat.phase, beat.step, cause + where, self.rank))

    # ---------------------------------------------------------------- ending

    def _failure(self, cause: str) -> Failure:
        return Failure(self.rank, str(self.position.phase), self.position.step, cause, self.rank)

    def _wait_for_verdict(self, mine: Failure) -> Failure:
        """Who is silent while the connection is lost is its cause, if nobody tells another one."""
        assert self._board is not None
        others = [r for r in range(self._size) if r != self.rank]
        before = self._board.last_beats(others)
        self._done.wait(VERDICT_S)
        after = self._board.last_beats(others)
        for rank, beat in after.items():
            if beat.number == before[rank].number and not self._board.has_left(rank):
                cause = f"no sign of life; rank {self.rank} lost its connection: {mine.cause}"
                return Failure(rank, beat.phase, beat.step, cause, self.rank)
        return mine

    def _lose_store(self, what: str) -> NoReturn:
        """One rank speaks for all: there is no place left to agree on who."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder, speaker = ("the launcher", 0) if agent else ("rank 0", min(1, self._size - 1))
        self._board = None
        self.claim_end()
        if self.rank == speaker:
            say(str(self._failure(f"{holder}, which holds the ranks' store, {what}")))
        self.leave(EXIT_FAILED)

    def _end(self, failure: Failure | None) -> NoReturn:
        """Post a failure, or act on that of another; end this process."""
        if failure is not None and self._board is not None:
            failure = self._board.post(failure)
        self.claim_end()
        if failure is not None and failure.told_by == self.rank:
            say(str(failure))
        self.leave(EXIT_FAILED)

    def _say_goodbye(self, limit_s: float, awaited: Iterable[int] = ()) -> None:
        """Leave, and wait for ``awaited``; who holds the store keeps it until all have left.

        In a thread: a store that is stopped, not gone, never answers.
        """
        if self._board is None:
            return
        args = (self._board, limit_s, set(awaited))
        thread = threading.Thread(target=self._goodbye, args=args, daemon=True)
        thread.start()
        thread.join(limit_s)

    def _goodbye(self, board: Board, limit_s: float, awaited: set[int]) -> None:
        deadline = time.monotonic() + limit_s
        with suppress(StoreLostError):
            board.leave(self.rank)
            if self._serves_store:
                awaited |= set(range(self._size))
            while awaited and not board.has_left(*awaited):
                if time.monotonic() > deadline:
                    return
                time.sleep(POLL_S / 10)


def say(line: str) -> None:
    """A line for the user; one that nobody can read any more must not keep a rank from ending."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """Type and text of an error on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " | ".join(lines)
    return (
        f"{type(error).__name__}: {text if len(text) <= MAX_CAUSE else text[:MAX_CAUSE] + ' ...'}"
    )
