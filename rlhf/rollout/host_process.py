"""The two ways in which an engine host comes to be, and what its rank can know of the process."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import time
from typing import Protocol

from rlhf.rollout.engine import EngineSpec
from rlhf.rollout.lifeline import (
    describe_exit,
    engine_environment,
    kill_pidfd,
    open_pidfd,
    wait_gone,
)
from rlhf.rollout.zygote import MESSAGE_BYTES, Zygote, request_host


class HostProcess(Protocol):
    """A host process as its rank sees it. ``kill`` never waits and may come from any thread."""

    def kill(self) -> None: ...

    def is_gone(self) -> bool: ...

    def wait_gone(self, limit_s: float) -> bool: ...

    def describe(self) -> str:
        """Who it was and how it ended, for the cause of an error."""
        ...

    def close(self) -> None: ...


class SpawnedHost:
    """A child of the rank that imports SGLang itself; needed where CUDA is."""

    def __init__(self, spec: EngineSpec, channel: int, obituary: int, rank: int) -> None:
        """Descriptors of the host's end of its links; the caller closes them afterwards."""
        links = (channel, obituary, rank)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-W", "ignore", "-m", "rlhf.rollout.host"),
                *map(str, (*links, os.getpid())),
                spec_to_json(spec),
            ],
            pass_fds=links,
            env=engine_environment(os.environ, spec.device),
            start_new_session=True,
        )

    def kill(self) -> None:
        self._process.kill()

    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def wait_gone(self, limit_s: float) -> bool:
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def describe(self) -> str:
        status = self._process.poll()
        how = "still runs" if status is None else describe_exit(status)
        return f"engine host (pid {self._process.pid}) {how}"

    def close(self) -> None:
        self.kill()
        self._process.wait()


class ForkedHost:
    """A child of the node's zygote, which reports its pid and later its exit status."""

    def __init__(
        self, spec: EngineSpec, channel: int, obituary: int, rank: int, zygote: Zygote
    ) -> None:
        """Descriptors of the host's end of its links; the caller closes them afterwards."""
        self._connection = zygote.connect(limit_s=30.0)
        self._connection.setblocking(False)
        request_host(self._connection, spec_to_json(spec), channel, obituary, rank)
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._exit: int | None = None
        self._at_end = False

    def kill(self) -> None:
        if self._pidfd is not None:
            kill_pidfd(self._pidfd)
        else:  # not forked yet: the zygote ends what it forks for a rank that hung up
            self._hang_up()

    def is_gone(self) -> bool:
        self._listen()
        return self._exit is not None or self._at_end

    def wait_gone(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not self.is_gone():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            select.select([self._connection], [], [], left)
        return self._pidfd is None or wait_gone([self._pidfd], limit_s)

    def describe(self) -> str:
        if self._exit is not None:
            return f"engine host (pid {self._pid}) {describe_exit(self._exit)}"
        if self._at_end:
            return f"the zygote of this node died, and with it the engine host (pid {self._pid})"
        return f"engine host (pid {self._pid}) still runs"

    def close(self) -> None:
        self.kill()
        self.wait_gone(5.0)
        self._hang_up()
        self._connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _listen(self) -> None:
        """Read what the zygote has reported."""
        while not self._at_end:
            try:
                data = self._connection.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._at_end = True
                return
            report = json.loads(data)
            if "pid" in report:
                self._pid = report["pid"]
                self._pidfd = open_pidfd(report["pid"])
            self._exit = report.get("exit", self._exit)

    def _hang_up(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def spec_to_json(spec: EngineSpec) -> str:
    """What ``rlhf.rollout.host.spec_from_json`` reads."""
    return json.dumps(dataclasses.asdict(spec))
