"""The zygote: one process per node that has SGLang imported and forks engine hosts on request.

Nine tenths of an engine's start are imports. The first local rank starts the zygote before its own
heavy imports; it imports once, in their shadow, and every engine host of the node is then a fork:
4 s instead of 20. It holds no CUDA context and has one thread, so forking is safe.

A host belongs to the rank that asked for it, not to the zygote. Each request is a connection that
carries the host's links; the zygote reports the pid and, later, the exit status on it, and kills
the host when the rank dies or closes the connection. When the first local rank dies, the kernel
kills the zygote, and with it all hosts of the node.

This module imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rlhf.dist.device import has_gpu
from rlhf.dist.slurm import is_srun_task
from rlhf.rollout.lifeline import (
    Links,
    die_with_parent,
    engine_environment,
    hide_megatron,
    ignore_usr1,
    kill_pidfd,
    name_process,
    open_pidfd,
    wait_gone,
)

PRELOAD = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.model_loader.loader",
    "sglang.srt.models.registry",
    "sglang.srt.models.llama",
    "sglang.srt.models.qwen2",
    "sglang.srt.models.qwen3",
    "rlhf.rollout.host_follower",
    "rlhf.rollout.host_server",
)
MESSAGE_BYTES = 65536
NUM_LINKS = 5
"""Descriptors of a request: channel, obituary, pidfd of the rank, its stdout and stderr."""
_PEER = struct.Struct("3i")


def node_address(environ: Mapping[str, str]) -> str:
    """A name that all ranks of one launch on one node share, and no other launch."""
    parts = (
        os.getuid(),
        os.stat("/proc/self/ns/pid").st_ino,  # containers may share a network but not their pids
        _launch_of(environ),
        environ.get("MASTER_PORT", ""),
        environ.get("TORCHELASTIC_RESTART_COUNT", ""),
    )
    return "rlhf-zygote-" + "-".join(map(str, parts))


def _launch_of(environ: Mapping[str, str]) -> str:
    """What the ranks of a launch have in common on a node: under srun each has a parent of its own,
    and nodes may share a network.
    """
    if not is_srun_task(environ):
        return str(os.getppid())
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "SLURM_RESTART_COUNT")
    return ".".join(environ.get(name, "") for name in names)


def start_zygote(environ: Mapping[str, str] = os.environ) -> Zygote | None:
    """The zygote of this node: started by local rank 0, joined by the others.

    To be called first thing by every rank, from its main thread; returns at once. None where
    there is a GPU: engines are spawned there.
    """
    if has_gpu(environ):
        return None
    address = node_address(environ)
    if int(environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID", "0"))) == 0:
        return Zygote.start(address, environ)
    return Zygote(address, None)


class Zygote:
    """A rank's view of its node's zygote."""

    def __init__(self, address: str, process: subprocess.Popen[bytes] | None) -> None:
        """Join the zygote at ``address``; ``process`` is set in the rank that started it."""
        self.address = address
        self._process = process

    @classmethod
    def start(
        cls, address: str, environ: Mapping[str, str] = os.environ, bind_limit_s: float = 5.0
    ) -> Zygote:
        """Start the process; it accepts requests at once and serves them when it has imported.

        Raises:
            OSError: the address is still in use after ``bind_limit_s``.
        """
        with _listen(address, bind_limit_s) as listener:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-W", "ignore", "-m", "rlhf.rollout.zygote"),
                    *(str(listener.fileno()), str(os.getpid())),
                ],
                pass_fds=[listener.fileno()],
                env=engine_environment(environ, "cpu"),
                start_new_session=True,
            )
        return cls(address, process)

    def connect(self, limit_s: float) -> socket.socket:
        """A connection for one host.

        Raises:
            RuntimeError: nobody listens within the limit, or another user does.
        """
        deadline = time.monotonic() + limit_s
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect("\0" + self.address)
            except ConnectionRefusedError:
                sock.close()
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"no zygote at {self.address} within {limit_s:.0f} s: it is started by "
                        "local rank 0, which may have failed"
                    ) from None
                time.sleep(0.05)
                continue
            _check_peer(sock)
            return sock

    def close(self, limit_s: float = 10.0) -> None:
        """End the process in the rank that started it; hosts of other ranks get the limit."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int | None:
        """None where another rank started it."""
        return None if self._process is None else self._process.pid


def request_host(
    connection: socket.socket, spec_json: str, channel: int, obituary: int, rank: int
) -> None:
    """Send a request: the spec and the descriptors of the host's links."""
    socket.send_fds(connection, [spec_json.encode()], [channel, obituary, rank, 1, 2])


def _listen(address: str, limit_s: float) -> socket.socket:
    """Bind the abstract name; a zygote of an earlier start may need a moment to vanish."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            listener.bind("\0" + address)
        except OSError:
            if time.monotonic() > deadline:
                listener.close()
                raise
            time.sleep(0.05)
        else:
            listener.listen(64)
            return listener


def _check_peer(sock: socket.socket) -> None:
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        sock.close()
        raise RuntimeError(f"the zygote's peer has user id {uid}, expected {os.getuid()}")


@dataclass(slots=True)
class _Child:
    """A host, the rank that it belongs to, and the connection that asked for it."""

    pid: int
    pidfd: int
    rank: int
    connection: socket.socket


class _Server:
    """The zygote's loop: one thread, one poll."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._waiting: list[socket.socket] = []
        self._children: list[_Child] = []
        self._leaving = False

    def run(self) -> None:
        """Until asked to leave and the last host has gone."""
        signal.signal(signal.SIGTERM, self._leave)
        # A signal interrupts poll() only if something becomes readable.
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        while not (self._leaving and not self._children):
            poller = select.poll()
            fds: list[Any] = [wake_read, self._listener, *self._waiting]
            for child in self._children:
                fds += [child.pidfd, child.rank, child.connection]
            for fd in fds:
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll()}
            if wake_read in ready:
                os.read(wake_read, 64)
            self._serve(ready)

    def _leave(self, *_: object) -> None:
        self._leaving = True

    def _serve(self, ready: set[int]) -> None:
        for child in list(self._children):
            if child.pidfd in ready:
                self._bury(child)
            elif child.rank in ready or child.connection.fileno() in ready:
                kill_pidfd(child.pidfd)
                wait_gone([child.pidfd], 5.0)
                self._bury(child)
        for connection in list(self._waiting):
            if connection.fileno() in ready:
                self._waiting.remove(connection)
                self._fork(connection)
        if self._listener.fileno() in ready:
            connection, _ = self._listener.accept()
            try:
                _check_peer(connection)
            except RuntimeError:
                return
            self._waiting.append(connection)

    def _bury(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._children.remove(child)
        _tell(child.connection, {"exit": os.waitstatus_to_exitcode(status)})
        os.close(child.pidfd)
        os.close(child.rank)
        child.connection.close()

    def _fork(self, connection: socket.socket) -> None:
        data, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, NUM_LINKS)
        if len(fds) != NUM_LINKS:
            connection.close()
            return
        channel, obituary, rank, out, err = fds
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_host(zygote_pid, data.decode(), connection, fds)
        pidfd = open_pidfd(pid)
        assert pidfd is not None  # not waited for yet, so it exists
        for fd in (channel, obituary, out, err):
            os.close(fd)
        self._children.append(_Child(pid, pidfd, rank, connection))
        _tell(connection, {"pid": pid})

    def _become_host(
        self, zygote_pid: int, spec_json: str, connection: socket.socket, fds: list[int]
    ) -> NoReturn:
        """In the fork: leave the zygote's descriptors and signals behind."""
        from rlhf.rollout.host import serve, spec_from_json

        channel, obituary, rank, out, err = fds
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(zygote_pid)
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        for child in self._children:
            os.close(child.pidfd)
            os.close(child.rank)
        for sock in (connection, self._listener, *self._waiting):
            sock.close()
        for child in self._children:
            child.connection.close()
        serve(spec_from_json(spec_json), Links(channel, obituary, rank), fork=True)


def _tell(connection: socket.socket, message: dict[str, int]) -> None:
    try:
        connection.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return  # the rank is gone


def main() -> None:
    """``python -m rlhf.rollout.zygote LISTENER OWNER_PID``."""
    listener, owner_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(owner_pid)
    ignore_usr1()
    name_process("rlhf-zygote")
    import importlib
    import logging

    logging.basicConfig(level=logging.ERROR)  # SGLang warns of each model that it cannot import
    hide_megatron()
    for module in PRELOAD:
        importlib.import_module(module)
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        raise RuntimeError(f"the zygote has {num_threads} threads; it must have one to fork")
    _Server(listener).run()
    os._exit(0)  # nothing to save, and unwinding SGLang's modules takes seconds


if __name__ == "__main__":
    main()
