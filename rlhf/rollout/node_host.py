"""An engine host as the rank that started it sees it: its start, its death and its end.

Every node of an engine has one. That of the first serves (``rlhf.rollout.host_client``), the others
only hold their ranks' schedulers. All methods but ``death``, ``kill`` and ``freeze`` belong to the
rank's main thread. Nothing runs in the background: messages are read while a call waits, or by
:meth:`NodeHost.poll`.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, Self

from rlhf.dist.lost import tells_of_lost_peer
from rlhf.rollout.channel import Channel, Close, Ping, Pong, Ready, Reply, Request
from rlhf.rollout.engine import EngineDied, EngineInfo, EngineLostPeer, EngineSpec
from rlhf.rollout.host_process import ForkedHost, HostProcess, SpawnedHost
from rlhf.rollout.lifeline import kill_pidfd, open_pidfd, read_obituary, wait_gone
from rlhf.rollout.zygote import Zygote

SLICE_S = 0.2
CLOSE_LIMIT_S = 10.0
_NO_CAUSE = re.compile(r"^a child reported a failure$| exited with status \d+$| gone$")


class NodeHost:
    """The host process of one node of an engine, and the line to it.

    Every waiting call raises :class:`EngineDied` with the cause within a second of the death of
    the host, a scheduler or the detokenizer, and after ``spec.hang_limit_s`` without an answer.
    """

    def __init__(
        self, spec: EngineSpec, channel: Channel, obituary: int, process: HostProcess
    ) -> None:
        """Use :meth:`launch`."""
        self.spec = spec
        self._channel = channel
        self._obituary = obituary
        self._obituary_lines: list[str] = []
        self._reading = threading.Lock()
        self._process = process
        self._inbox: deque[Reply] = deque()
        self._info: EngineInfo | None = None
        self._watched: list[tuple[str, int]] = []
        self._pinged_at: float | None = None
        self._heard_at = time.monotonic()
        self._died: EngineDied | None = None
        self._closed = False

    @classmethod
    def launch(cls, spec: EngineSpec, zygote: Zygote | None = None) -> Self:
        """Start a host, forked by the node's zygote or, without one, spawned. Returns at once.

        Without a zygote it must be called from the rank's main thread: the kernel ends the host
        with the thread that started it.
        """
        mine, theirs = socket.socketpair()
        obituary, obituary_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        rank = os.pidfd_open(os.getpid())
        try:
            links = (theirs.fileno(), obituary_write, rank)
            process: HostProcess = (
                SpawnedHost(spec, *links) if zygote is None else ForkedHost(spec, *links, zygote)
            )
        finally:
            theirs.close()
            os.close(obituary_write)
            os.close(rank)
        return cls(spec, Channel(mine, spec.hang_limit_s), obituary, process)

    def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        """Until the engine answers; ``timeout_s`` empty: the spec's start_timeout_s.

        Raises:
            EngineDied: it failed to start; at the time limit it is ended.
        """
        limit_s = self.spec.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while self._info is None:
            if time.monotonic() > deadline:
                self._bury(f"the engine was not ready within {limit_s:.0f} s")
            message = self._receive(SLICE_S, watch_hang=False)
            if isinstance(message, Ready):
                self._info = message.info
                found = [(n, open_pidfd(p)) for n, p in self._info.pids.items() if n != "host"]
                self._watched = [(name, fd) for name, fd in found if fd is not None]
        return self._info

    def poll(self) -> None:
        """Look, without waiting, whether the engine lives and the update that it has open is well.

        Raises:
            EngineDied: with the cause.
            RuntimeError: the open update failed.
        """
        while (message := self._receive(0.0)) is not None:
            self._take_unasked(message)

    def death(self) -> EngineDied | None:
        """What is known of a death, from any thread; an engine that is closed has not died."""
        if self._closed:
            return None
        gone = [name for name, fd in self._watched if not self._closed and wait_gone([fd], 0.0)]
        if not gone or self._closed:
            return None
        return self._died_of(self._read_obituary() or [f"{', '.join(gone)} gone"])

    def kill(self) -> None:
        """SIGKILL to the host; the kernel ends its children. Never waits, from any thread."""
        self._process.kill()

    def freeze(self) -> None:
        """Stop the children for good; only :meth:`close` may follow.

        Schedulers of several nodes end at different times. Those that are stopped do not notice,
        and so do not complain of connections that others have closed.
        """
        for _, fd in self._watched:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGSTOP)

    def close(self) -> None:
        """End all processes of the host and wait until they are gone. Never raises EngineDied."""
        if self._closed:
            return
        self._closed = True
        if self._died is None:
            try:
                self._channel.send(Close())
            except OSError:
                self.kill()
            if not self._process.wait_gone(CLOSE_LIMIT_S):
                self.kill()
        self._release()

    # ---------------------------------------------------------------- inside

    def _take_unasked(self, message: Reply) -> None:
        """A message that no call waits for."""

    def _send(self, message: Request) -> None:
        if self._closed:
            raise RuntimeError("the engine host is closed")
        self._raise_death()
        try:
            self._channel.send(message)
        except TimeoutError:
            self._bury(f"the engine host took no message for {self.spec.hang_limit_s:.0f} s")
        except OSError:
            self._bury(None)

    def _receive(self, timeout_s: float, *, watch_hang: bool = True) -> Reply | None:
        """The next message, or None if none came within the time. Raises EngineDied."""
        self._raise_death()
        if not self._inbox:
            self._inbox.extend(self._channel.receive(timeout_s))
        if not self._inbox and (self._channel.at_end or self._process.is_gone()):
            self._inbox.extend(self._channel.receive(0.0))  # what it said before it went
            if not self._inbox:
                self._bury(None)
        if self._inbox:
            self._heard_at = time.monotonic()
            message = self._inbox.popleft()
            if isinstance(message, Pong):
                self._pinged_at = None
            return message
        if watch_hang:
            self._watch_hang()
        return None

    def _watch_hang(self) -> None:
        """Ping a silent host; an unanswered ping is the end of it."""
        now, limit_s = time.monotonic(), self.spec.hang_limit_s
        if self._pinged_at is not None and now - self._pinged_at > limit_s:
            self._bury(f"the engine host did not answer for {limit_s:.0f} s")
        if self._pinged_at is None and now - self._heard_at > limit_s / 4:
            self._pinged_at = now
            self._heard_at = now
            self._send(Ping())

    def _bury(self, cause: str | None) -> NoReturn:
        """End what is left, find the cause, raise it."""
        if cause is not None:
            self._process.kill()
        self._process.wait_gone(1.0)
        lines = self._read_obituary()
        if cause is not None:
            lines.insert(0, cause)
        if not lines or not any("host" in line for line in lines):
            lines.append(self._process.describe())
        self._died = self._died_of(lines)
        self._process.kill()
        wait_gone([fd for _, fd in self._watched], 1.0)
        raise self._died

    def _raise_death(self) -> None:
        if self._died is not None:
            raise type(self._died)(str(self._died))

    def _died_of(self, lines: Sequence[str]) -> EngineDied:
        spec, where, kind = self.spec, "", EngineDied
        if spec.num_nodes > 1:
            where = f" on {platform.node()}, node {spec.node} of its {spec.num_nodes}"
            kind = EngineLostPeer if only_lost_peers(lines) else EngineDied
        return kind(f"the rollout engine died{where}: {'; '.join(lines)}")

    def _read_obituary(self) -> list[str]:
        """All lines so far; two threads may ask."""
        with self._reading:
            new = [n for n in read_obituary(self._obituary) if n not in self._obituary_lines]
            self._obituary_lines += new
            return list(self._obituary_lines)

    def _release(self) -> None:
        children = [fd for _, fd in self._watched]
        if not wait_gone(children, CLOSE_LIMIT_S):
            for fd in children:
                kill_pidfd(fd)
        self._process.close()
        for fd in (*children, self._obituary):
            os.close(fd)
        self._watched = []
        self._channel.close()


def only_lost_peers(lines: Sequence[str]) -> bool:
    """Whether an obituary tells of lost connections and of no cause of its own."""
    told = [line for line in lines if not _NO_CAUSE.search(line)]
    return bool(told) and all(map(tells_of_lost_peer, told))
