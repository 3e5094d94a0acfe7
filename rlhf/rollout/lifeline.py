"""Processes that never outlive their owner, and whose death has a cause. Standard library only.

Every process of an engine asks the kernel to be killed with its parent. Where the parent is not
the owner (a host forked by the node's zygote belongs to a rank), a pidfd of the owner is watched.
Causes travel through an *obituary*: a pipe into which any process of the engine writes one line
before it goes, and which the rank reads when the host is gone. Lines are shorter than PIPE_BUF, so
writers do not mix; nothing ever waits for it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
EXIT_DIED = 70  # of a host that ends because its engine did
LINE_BYTES = 4000  # below PIPE_BUF: one write is one piece

_DROPPED = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "SGLANG_CPU_OMP_THREADS_BIND",
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
        "SGLANG_RUST_SERVER",
        "SGLANG_USE_CPU_ENGINE",
    }
)
_DROPPED_PREFIXES = (
    "TORCHELASTIC_",
    "ROLE_",
    "SLURM_",
    "SRUN_",
    "PMI",
    "TORCH_NCCL",
    "PYTORCH_CUDA_ALLOC",
    "PYTORCH_ALLOC",
    "CUDA_DEVICE_MAX",
)
_CPU_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TORCH_COMPILE_DISABLE": "1",
}


@dataclass(frozen=True, slots=True)
class Links:
    """Descriptors that tie a host to its rank."""

    channel: int
    obituary: int
    rank: int
    """pidfd of the rank."""


def engine_environment(environ: Mapping[str, str], device: str) -> dict[str, str]:
    """The rank's environment without launcher and allocator settings, for an engine's processes.

    torchrun's variables make a scheduler wait for a store that nobody serves, Slurm's make it bind
    to a step, and the memory saver refuses allocator settings. On a CPU, spinning OpenMP threads
    and the compilation of the sampler on its first request would cost seconds each.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
    }
    kept["TOKENIZERS_PARALLELISM"] = "false"
    return kept | (_CPU_SETTINGS if device == "cpu" else {})


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Exits at once if the parent is gone already. Not inherited by fork: each process asks itself.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def ignore_usr1() -> None:
    """A request to stop is the rank's; Slurm may send it to every process of a job."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def hide_megatron() -> None:
    """SGLang's debug dumper imports megatron if it can: 0.7 s and 150 modules for nothing."""
    sys.modules["megatron"] = None  # type: ignore[assignment]


def name_process(name: str) -> None:
    """What ``ps -o comm`` shows; at most 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def write_obituary(fd: int, text: str) -> None:
    """One line for the rank; a reader that is gone is not missed."""
    line = " ".join(text.split())
    try:
        os.write(fd, line.encode()[: LINE_BYTES - 1] + b"\n")
    except (BrokenPipeError, BlockingIOError):
        return


def read_obituary(fd: int) -> list[str]:
    """All lines that are there now, without duplicates. ``fd`` must be non-blocking."""
    data = b""
    while True:
        try:
            part = os.read(fd, 65536)
        except BlockingIOError:
            break
        if not part:
            break
        data += part
    return list(dict.fromkeys(data.decode(errors="replace").splitlines()))


def describe_exit(status: int | None) -> str:
    """A ``waitpid`` exit code in words: -9 -> 'killed by SIGKILL'."""
    if status is None:
        return "is gone"
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with status {status}"


def peek_exit(pidfd: int) -> int | None:
    """Exit code of a dead child, left for whoever waits for it; None if not ours or unknown."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def open_pidfd(pid: int) -> int | None:
    """A pidfd, or None if the process is gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def kill_pidfd(pidfd: int) -> None:
    """SIGKILL to the very process that the pidfd was opened for, if it still runs."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_gone(pidfds: Iterable[int], limit_s: float) -> bool:
    """True when all these processes have ended (they may be zombies) within the limit.

    A limit of zero looks once.
    """
    left = set(pidfds)
    deadline = time.monotonic() + limit_s
    while left:
        rest = deadline - time.monotonic()
        poller = select.poll()
        for fd in left:
            poller.register(fd, select.POLLIN)
        left -= {fd for fd, _ in poller.poll(max(0.0, rest) * 1000)}
        if left and rest <= 0:
            return False
    return True
