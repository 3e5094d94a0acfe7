"""Memory of the host: how much is free, and how a device copies from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.dist.world import World

MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = MEMINFO) -> int:
    """What this machine can give without swapping."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(encoding="ascii"), re.M)
    if found is None:
        raise RuntimeError(f"{meminfo} does not tell MemAvailable")
    return int(found.group(1)) * 1024


def check_host_room(
    role: str,
    sizes: Sequence[int],
    world: World,
    gather: Callable[[str | None], list[Any]],
    available: int,
) -> None:
    """That each node has room for the optimizer states of its ranks, before any takes it.

    Args:
        sizes: bytes by global rank.
        gather: every rank's value, on every rank.
        available: bytes on this rank's node.

    Raises:
        RuntimeError: a node has not; on every rank. Collective over all ranks.
    """
    first = world.rank - world.local_rank
    need = sum(sizes[first : first + world.local_size])
    fault = None
    if need > available:
        fault = (
            f"memory.optimizer=host: the state of the {role} needs {need / 2**30:.2f} GiB of host "
            f"memory for the {world.local_size} ranks of node {first // world.local_size}, which "
            f"has {available / 2**30:.2f} GiB left; use more nodes, or set memory.optimizer to "
            "device"
        )
    faults = [text for text in gather(fault) if text]
    if faults:
        raise RuntimeError(faults[0])


def host_zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows, columns] float32 zeros in host memory, which is taken at once.

    For a GPU the pages are locked, so that copies go beside its kernels. They are registered as
    they are: torch's own allocator of locked memory rounds sizes up to a power of two.

    Raises:
        RuntimeError: the driver does not lock them.
    """
    out = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    if device.type == "cuda" and out.nbytes:
        code = int(torch.cuda.cudart().cudaHostRegister(out.data_ptr(), out.nbytes, 0))
        if code:
            raise RuntimeError(
                f"{out.nbytes / 2**30:.2f} GiB of host memory cannot be locked for the device: "
                f"cudaHostRegister answers {code}; raise the limit of locked memory (ulimit -l)"
            )
    return out.zero_()


def unlock(tensor: Tensor) -> None:
    """Before the memory of :func:`host_zeros` goes back."""
    if tensor.nbytes:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
