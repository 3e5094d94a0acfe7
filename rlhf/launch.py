"""Start one process per rank on this node, look after them, end them together.

The launcher of the first node holds the store through which ranks meet; through it launchers tell
ranks who was killed, and ask them to stop. Each rank has a session of its own, so the terminal's
signals reach only the launcher. On several nodes srun starts a launcher on each.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rlhf.dist.board import LAUNCHER, Beat, Board, Failure, StoreLostError
from rlhf.dist.node import LOCALHOST, ONE_NODE, Node
from rlhf.dist.scratch import Scratch
from rlhf.dist.signals import SignalPipe
from rlhf.dist.stop import CLOSE_S, EXIT_FAILED, EXIT_STOPPED, LOST, say
from rlhf.rollout.lifeline import describe_exit, ignore_usr1
from rlhf.types import Phase

EXIT_USAGE = 2
LAUNCHER_PID = "RLHF_LAUNCHER_PID"
"""A rank that finds it in its environment dies with that process."""
MEET_S = 300.0
"""Time in which the launchers of all nodes must have come to the store."""
FAILED_S = 5.0
"""Time for the others to end themselves after a failure."""
USAGE_S = 30.0
"""Time for the others to refuse the same request."""
GRACE_MARGIN_S = 10.0
"""Ranks keep the grace time themselves; the launcher waits a little longer."""
ORPHANS_S = 10.0
POLL_S = 1.0
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank runs, and how long it may take to stop."""

    module: str
    arguments: Sequence[str]
    grace_s: float
    logs: Path | None = None
    """Folder for the output of each rank; None: that of the launcher."""


def launch(job: Job, num_ranks: int, node: Node = ONE_NODE) -> int:
    """Run ``python -m module arguments`` on this node's share of ``num_ranks`` ranks.

    Returns the exit status. 0: all ranks of the node have ended well. 75: asked to stop, and every
    rank has stopped in order. Otherwise that of the rank that failed first, or 1. A failure is
    named in one line, by the rank that knows it or, for one that could not say so, here. When this
    returns, no process of the run is left on this node.
    """
    # what loses its parent becomes a child of this process, which can then wait for its end
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    handled = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        handled.append(signal.SIGHUP)
    signals = SignalPipe(handled)
    try:
        with Scratch() as scratch, _listen(node) as listener:
            port = listener.getsockname()[1] if listener else node.port
            ranks = _start(job, num_ranks, node, port, scratch)
            board = _open_store(node, port, listener)
            status = _Watch(ranks, board, signals, job.grace_s, node).run()
            _end_orphans()
            _await_launchers(node, board, failed=status not in (0, EXIT_STOPPED))
            return status
    finally:
        signals.close()


def default_ranks() -> int:
    """One per GPU of this machine, or one."""
    import torch

    return torch.cuda.device_count() or 1


def _listen(node: Node) -> AbstractContextManager[socket.socket | None]:
    """Where the store will be; ranks may knock while torch is imported."""
    if node.index > 0:
        return nullcontext()
    address = (LOCALHOST if node.count == 1 else "", node.port)
    try:
        return socket.create_server(address, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"{platform.node()}: port {node.port}, where the ranks of this job meet, cannot be "
            f"opened: {error}; a process that holds it must end, or give the job another node"
        ) from None


def _start(
    job: Job, num_ranks: int, node: Node, port: int, scratch: Scratch
) -> dict[int, subprocess.Popen[bytes]]:
    """This node's ranks, by their number in the run."""
    local = num_ranks // node.count
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": node.host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch: somebody else holds the store
        "TORCHELASTIC_RESTART_COUNT": "0",
        LAUNCHER_PID: str(os.getpid()),
    }
    shared.setdefault("OMP_NUM_THREADS", "1")
    scratch.lend(shared)
    return {
        node.index * local + i: _start_rank(job, node.index * local + i, i, shared)
        for i in range(local)
    }


def _start_rank(
    job: Job, rank: int, local_rank: int, shared: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with ExitStack() as files:
        output = None
        if job.logs is not None:
            job.logs.mkdir(parents=True, exist_ok=True)
            output = files.enter_context((job.logs / f"rank{rank:05d}.log").open("ab"))
        return subprocess.Popen(
            [sys.executable, "-m", job.module, *job.arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=ignore_usr1,  # until the rank has a handler of its own
        )


def _open_store(node: Node, port: int, listener: socket.socket | None) -> Board:
    """Serve it on the first node, reach it from the others."""
    from torch.distributed import TCPStore

    store = TCPStore(
        node.host,
        port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=60 if node.count == 1 else MEET_S),
        master_listen_fd=os.dup(listener.fileno()) if listener is not None else None,
    )
    return Board(store, {})


def _await_launchers(node: Node, board: Board, *, failed: bool) -> None:
    """Who holds the store keeps it until the other nodes' ranks need it no more."""
    if node.count == 1:
        return
    deadline = time.monotonic() + (FAILED_S if failed else CLOSE_S)
    with suppress(StoreLostError):
        board.leave_node(node.index)
        while node.index == 0 and not board.nodes_have_left(range(node.count)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)


@dataclass
class _Watch:
    """The launcher's loop: one thread, one poll."""

    ranks: dict[int, subprocess.Popen[bytes]]
    board: Board
    signals: SignalPipe
    grace_s: float
    node: Node
    codes: dict[int, int] = field(default_factory=dict)
    asked: int = 0
    asked_at: float = 0.0
    kill_at: float = float("inf")
    killing: bool = False
    nothing_lost: bool = False

    def run(self) -> int:
        """Until all ranks have ended; returns the status of the launch."""
        pidfds = {os.pidfd_open(p.pid): rank for rank, p in self.ranks.items()}
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
        how = describe_exit(code)
        if code == -signal.SIGKILL:
            how += " (the kernel does so when memory runs out: see dmesg)"
        try:
            beat = self.board.last_beat(rank)
            counts = self.board.post(Failure(rank, beat.phase, beat.step, how, LAUNCHER))
        except StoreLostError:
            say(f"rank {rank} {how}; the store's holder, on {self.node.host}, is gone")
            return
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
            if self._nothing_done():
                say(f"stopped: {name} before the first step; there was nothing to save")
                self.nothing_lost = True
                self._kill()
            else:
                with suppress(StoreLostError):  # the ranks see it too
                    self.board.ask(number)
                self.kill_at = min(self.kill_at, now + self.grace_s + GRACE_MARGIN_S)
        elif number == signal.SIGINT and now - self.asked_at > 1.0 and not self.killing:
            say(f"stopped: a second {name}: ended at once; {LOST}")
            self._kill()

    def _nothing_done(self) -> bool:
        """No rank has come to the first step. Launchers of several nodes may see it differently,
        so there the ranks themselves agree.
        """
        if self.node.count > 1 or self.codes:
            return False
        return all(b.phase == Phase.SETUP for b in self.board.last_beats([*self.ranks]).values())

    def _lose_patience(self) -> None:
        failed = any(code not in (0, EXIT_STOPPED) for code in self.codes.values())
        if not failed:
            living = [r for r in self.ranks if r not in self.codes]
            beats = self._last_beats(living)
            if any(b.phase == Phase.SAVE for b in beats.values()):
                return
            name = signal.Signals(self.asked).name
            named = ", ".join(f"rank {r} ({b})" for r, b in beats.items())
            say(f"stopped: {name}, and {named} did not end in time: killed; {LOST}")
        self._kill()

    def _last_beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        try:
            return self.board.last_beats(ranks)
        except StoreLostError:
            return {rank: Beat() for rank in ranks}

    def _kill(self) -> None:
        """SIGKILL also ends a process that is stopped."""
        self.killing = True
        for process in self.ranks.values():
            process.kill()

    def _pause(self) -> None:
        """Ctrl-Z: the ranks rest while the launcher does."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in self.ranks.values():
                process.send_signal(number)
            if number == signal.SIGSTOP:
                os.kill(os.getpid(), signal.SIGSTOP)

    def _status(self) -> int:
        if self.nothing_lost:
            return EXIT_STOPPED
        bad = [code for code in self.codes.values() if code not in (0, EXIT_STOPPED)]
        if not bad:
            return EXIT_STOPPED if EXIT_STOPPED in self.codes.values() else 0
        try:
            failure = self.board.failure()
        except StoreLostError:
            failure = None
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
