"""Look at many ranks of engines that do not exist: a child imports SGLang once, a fork per look.

SGLang's parallel state is global, so one process can be one rank only; its import takes ten seconds
and more, a fork a few milliseconds.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import pkgutil
import resource
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from rlhf.dist.layout import RolloutLayout
from rlhf.dist.layout_text import rollout_text
from rlhf.rollout.lifeline import (
    describe_exit,
    die_with_parent,
    engine_environment,
    hide_megatron,
    ignore_usr1,
    name_process,
)

Value = TypeVar("Value")


class ProbeError(RuntimeError):
    """SGLang refused a rank, or its process died; the message ends with what it said."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One rank of one engine layout of the model in ``folder``, which needs no weights."""

    folder: str
    layout: RolloutLayout
    rank: int
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.folder} at {rollout_text(self.layout)}, rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Value]):
    """What one look gave, or the traceback that it ended with."""

    probe: Probe
    value: Value | None
    error: str
    seconds: float
    peak_mib: float
    """Largest resident memory of the fork, SGLang's modules included."""

    def get(self) -> Value:
        """
        Raises:
            ProbeError: the look failed.
        """
        if self.error:
            error = ProbeError(f"{self.probe}: {self.error.strip().splitlines()[-1]}")
            error.add_note(self.error)
            raise error
        return self.value  # type: ignore[return-value]  # Value may be None itself


def in_forks(
    look: Callable[[Probe], Value],
    probes: Sequence[Probe],
    *,
    start_limit_s: float = 300.0,
    limit_s: float = 300.0,
) -> Iterator[Outcome[Value]]:
    """``look(probe)`` for each probe, in order, each in a process that has SGLang imported.

    As many run at a time as there are cores. No GPU is seen or needed. The processes die with
    this one.

    Args:
        look: a function of a module (it travels by name); its value travels by pickle.
        start_limit_s: for SGLang's import.
        limit_s: for each look.

    Raises:
        ProbeError: the child died.
        TimeoutError: a limit ran out.
    """
    mine, theirs = socket.socketpair()
    environ = engine_environment(os.environ, "cpu") | {
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_PLATFORM": "rlhf_cpu",
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",  # it would wait for peers
    }
    arguments = [sys.executable, "-W", "ignore", "-m", __name__, str(theirs.fileno())]
    child = subprocess.Popen(
        [*arguments, str(os.getpid())], pass_fds=[theirs.fileno()], env=environ
    )
    theirs.close()
    pipe = Connection(mine.detach())
    try:
        pipe.send_bytes(pickle.dumps((look, list(probes))))
        _receive(pipe, child, start_limit_s, "the import of SGLang")
        for probe in probes:
            yield Outcome(probe, *_receive(pipe, child, limit_s, str(probe)))
    finally:
        child.kill()
        child.wait()
        pipe.close()


def _receive(pipe: Connection, child: subprocess.Popen, limit_s: float, what: str) -> Any:
    if not pipe.poll(limit_s):
        raise TimeoutError(f"probing: {what} took more than {limit_s:g} s")
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        ending = describe_exit(child.wait())
        raise ProbeError(f"probing: the process {ending} during {what}") from None


def main() -> None:
    """``python -m rlhf.rollout.forks FD PARENT_PID``."""
    pipe = Connection(int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    ignore_usr1()
    name_process("rlhf-probe")
    import logging

    logging.basicConfig(level=logging.ERROR)  # SGLang warns of each model that it cannot import
    hide_megatron()
    _import_sglang()
    look, probes = pickle.loads(pipe.recv_bytes())
    gc.freeze()  # forks share what is here, untouched
    pipe.send_bytes(pickle.dumps("ready"))
    running: deque[_Fork] = deque()
    for probe in probes:
        if len(running) == len(os.sched_getaffinity(0)):
            pipe.send_bytes(running.popleft().answer())
        running.append(_Fork(look, probe))
    for fork in running:
        pipe.send_bytes(fork.answer())
    os._exit(0)  # nothing to save, and unwinding SGLang's modules takes seconds


def _import_sglang() -> None:
    """All that a look needs, so that no fork imports it for itself."""
    import torch

    torch.set_num_threads(1)
    import sglang.srt.arg_groups
    import sglang.srt.models.registry
    import sglang.srt.server_args
    from sglang.srt.plugins import load_plugins

    for module in pkgutil.iter_modules(sglang.srt.arg_groups.__path__):
        importlib.import_module(f"sglang.srt.arg_groups.{module.name}")
    importlib.import_module("rlhf.rollout.sglang_model")
    importlib.import_module("rlhf.rollout.copy_trace")
    load_plugins()


class _Fork:
    """One look in a process of its own."""

    def __init__(self, look: Callable[[Probe], Any], probe: Probe) -> None:
        self._read_fd, write_fd = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(parent)
            with os.fdopen(write_fd, "wb") as out:
                out.write(_look(look, probe))
            os._exit(0)
        os.close(write_fd)

    def answer(self) -> bytes:
        """Value, error, seconds and MiB, pickled; waits for the end of the process."""
        with os.fdopen(self._read_fd, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            return pickle.dumps((None, f"the process {describe_exit(code)}", 0.0, 0.0))
        return data


def _look(look: Callable[[Probe], Any], probe: Probe) -> bytes:
    start, value, error = time.perf_counter(), None, ""
    try:
        value = look(probe)
    except BaseException:  # noqa: BLE001  goes to the parent, which raises it
        error = traceback.format_exc()
    seconds = time.perf_counter() - start
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pickle.dumps((value, error, seconds, peak_mib))


if __name__ == "__main__":
    main()
