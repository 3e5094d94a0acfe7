"""What the checks of a device share: their sizes, how they fail, and a process group of one rank.

A check is a function (device, sizes) -> figures that raises where something does not hold. On a CPU
it runs over gloo and host memory, and figures of device memory are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

Figures = Mapping[str, object]
Check = Callable[[torch.device, "Sizes"], Figures]

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a check moves or computes."""

    message_bytes: int
    groups: int
    """Of four [2 width, width] parameters in bfloat16."""
    width: int
    repetitions: int
    storage_bytes: int
    """Of one of eight parameters and one of their gradients."""
    tokens: int
    vocabulary: int


FULL = Sizes(
    message_bytes=2**26,
    groups=4,
    width=4096,
    repetitions=5,
    storage_bytes=2**28,
    tokens=4096,
    vocabulary=32768,
)
SMALL = Sizes(
    message_bytes=2**12,
    groups=1,
    width=64,
    repetitions=2,
    storage_bytes=2**16,
    tokens=96,
    vocabulary=517,
)
"""Enough to run every line on a CPU."""


class CheckFailed(RuntimeError):  # noqa: N818  (an event, named as such)
    """Something that must hold does not; says what, with both numbers."""


def require(holds: bool, text: str) -> None:
    """
    Raises:
        CheckFailed: ``holds`` is False.
    """
    if not holds:
        raise CheckFailed(text)


def free_gib(device: torch.device) -> float | None:
    """Free memory of the device, what the allocator keeps for later given back; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] / 2**30


@contextmanager
def one_rank(device: torch.device, *, bind: bool = False) -> Iterator[None]:
    """The default process group with this process alone, otherwise as ``dist.groups`` makes it.

    ``bind``: NCCL is bound to the device and connects at once.
    """
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True),  # of a run too
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
        device_id=device if on_gpu and bind else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
