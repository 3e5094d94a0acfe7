"""Start one process per rank on this machine, look after them, end them together.

The launcher holds the store through which ranks meet, so it can tell them who was killed, and ask
them to stop. Each rank has a session of its own, so the terminal's signals reach only the launcher.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rlhf.dist.board import LAUNCHER, Board, Failure
from rlhf.dist.scratch import Scratch
from rlhf.dist.signals import SignalPipe
from rlhf.dist.stop import EXIT_FAILED, EXIT_STOPPED, LOST, say
from rlhf.rollout.lifeline import describe_exit
from rlhf.types import Phase

EXIT_USAGE = 2
LAUNCHER_PID = "RLHF_LAUNCHER_PID"
"""A rank that finds it in its environment dies with that process."""
LOCALHOST = "127.0.0.1"
FAILED_S = 5.0
"""Time for the others to end themselves after a failure."""
USAGE_S = 30.0
"""Time for the others to refuse the same request."""
GRACE_MARGIN_S = 10.0
"""Ranks keep the grace time themselves; the launcher waits a little longer."""
ORPHANS_S = 10.0
POLL_S = 1.0
PR_SET_CHILD_SUBREAPER = 36


def launch(module: str, arguments: Sequence[str], num_ranks: int, grace_s: float) -> int:
    """Run ``python -m module arguments`` on ``num_ranks`` ranks; returns the exit status.

    0: all have ended well. 75: asked to stop, and every rank has stopped in order. Otherwise that
    of the rank that failed first, or 1. A failure is named in one line, by the rank that knows it
    or, for one that could not say so, here. When this returns, no process of the run is left.
    """
    # what loses its parent becomes a child of this process, which can then wait for its end
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    handled = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        handled.append(signal.SIGHUP)
    signals = SignalPipe(handled)
    try:
        with Scratch() as scratch, socket.create_server((LOCALHOST, 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            ranks = _start(module, arguments, num_ranks, port, scratch)
            board = _serve_store(listener)
            status = _Watch(ranks, board, signals, grace_s).run()
            _end_orphans()
            return status
    finally:
        signals.close()


def default_ranks() -> int:
    """One per GPU of this machine, or one."""
    import torch

    return torch.cuda.device_count() or 1


def _start(
    module: str, arguments: Sequence[str], num_ranks: int, port: int, scratch: Scratch
) -> list[subprocess.Popen[bytes]]:
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch: somebody else holds the store
        "TORCHELASTIC_RESTART_COUNT": "0",
        LAUNCHER_PID: str(os.getpid()),
    }
    shared.setdefault("OMP_NUM_THREADS", "1")
    scratch.lend(shared)
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(num_ranks)
    ]


def _serve_store(listener: socket.socket) -> Board:
    """Ranks may knock while torch is imported here."""
    from torch.distributed import TCPStore

    store = TCPStore(
        LOCALHOST,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=os.dup(listener.fileno()),
    )
    return Board(store, {})


@dataclass
class _Watch:
    """The launcher's loop: one thread, one poll."""

    ranks: list[subprocess.Popen[bytes]]
    board: Board
    signals: SignalPipe
    grace_s: float
    codes: dict[int, int] = field(default_factory=dict)
    asked: int = 0
    asked_at: float = 0.0
    kill_at: float = float("inf")
    killing: bool = False
    nothing_lost: bool = False

    def run(self) -> int:
        """Until all ranks have ended; returns the status of the launch."""
        pidfds = {os.pidfd_open(p.pid): rank for rank, p in enumerate(self.ranks)}
        poller = select.poll()
        for fd in (self.signals.fd, *pidfds):
            poller.register(fd, select.POLLIN)
        while pidfds:
            for fd, _ in poller.poll(POLL_S * 1000):
                if fd in pidfds:
                    poller.unregister(fd)
                    os.close(fd)
                    self._note_end(pidfds.pop(fd))
            for number in self.signals.take():
                self._take_signal(number)
            if time.monotonic() > self.kill_at and not self.killing:
                self._lose_patience()
        return self._status()

    def _note_end(self, rank: int) -> None:
        code = self.codes[rank] = self.ranks[rank].wait()
        if code in (0, EXIT_STOPPED) or self.killing:
            return
        self.kill_at = min(self.kill_at, time.monotonic() + FAILED_S)
        if code == EXIT_USAGE:  # it has said why
            self.kill_at = time.monotonic() + USAGE_S
            return
        beat = self.board.last_beat(rank)
        how = describe_exit(code)
        if code == -signal.SIGKILL:
            how += " (the kernel does so when memory runs out: see dmesg)"
        counts = self.board.post(Failure(rank, beat.phase, beat.step, how, LAUNCHER))
        if counts.told_by == LAUNCHER and counts.rank == rank:
            say(str(counts))
        elif code < 0:
            say(f"rank {rank} {how}, too")

    def _take_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if number == signal.SIGTSTP:
            self._pause()
        elif not self.asked:
            self.asked, self.asked_at = number, now
            beats = self.board.last_beats(range(len(self.ranks)))
            if not self.codes and all(b.phase == Phase.SETUP for b in beats.values()):
                say(f"stopped: {name} before the first step; there was nothing to save")
                self.nothing_lost = True
                self._kill()
            else:
                self.board.ask(number)
                self.kill_at = min(self.kill_at, now + self.grace_s + GRACE_MARGIN_S)
        elif number == signal.SIGINT and now - self.asked_at > 1.0 and not self.killing:
            say(f"stopped: a second {name}: ended at once; {LOST}")
            self._kill()

    def _lose_patience(self) -> None:
        failed = any(code not in (0, EXIT_STOPPED) for code in self.codes.values())
        if not failed:
            living = [r for r in range(len(self.ranks)) if r not in self.codes]
            beats = self.board.last_beats(living)
            if any(b.phase == Phase.SAVE for b in beats.values()):
                return
            name = signal.Signals(self.asked).name
            named = ", ".join(f"rank {r} ({b})" for r, b in beats.items())
            say(f"stopped: {name}, and {named} did not end in time: killed; {LOST}")
        self._kill()

    def _kill(self) -> None:
        """SIGKILL also ends a process that is stopped."""
        self.killing = True
        for process in self.ranks:
            process.kill()

    def _pause(self) -> None:
        """Ctrl-Z: the ranks rest while the launcher does."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in self.ranks:
                process.send_signal(number)
            if number == signal.SIGSTOP:
                os.kill(os.getpid(), signal.SIGSTOP)

    def _status(self) -> int:
        if self.nothing_lost:
            return EXIT_STOPPED
        bad = [code for code in self.codes.values() if code not in (0, EXIT_STOPPED)]
        if not bad:
            return EXIT_STOPPED if EXIT_STOPPED in self.codes.values() else 0
        failure = self.board.failure()
        if self.asked and not self.killing and failure and LOST not in failure.cause:
            say(f"{signal.Signals(self.asked).name} did not end the run in order: {LOST}")
        return bad[0] if bad[0] > 0 else EXIT_FAILED


def _end_orphans() -> None:
    """Wait for what the ranks have started, and end it; engines die with their rank anyway."""
    deadline = time.monotonic() + ORPHANS_S
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > deadline:
                for child in _children():
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            time.sleep(0.02)


def _children() -> list[int]:
    """Of this process, whichever thread has started or inherited them."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text(encoding="ascii").split()]
