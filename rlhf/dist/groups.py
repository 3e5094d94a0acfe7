"""Process groups that are not Megatron's: the default group and the gloo phase group."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlhf.dist.device import check_torch, has_gpu
from rlhf.dist.world import World

Group = Any
"""torch's ProcessGroup; its type is not public."""
Meeting = Callable[[], AbstractContextManager[None]]


def device_of(world: World) -> torch.device:
    """This rank's GPU, or the CPU.

    Raises:
        RuntimeError: torch sees no GPU where the engines do, or the reverse.
    """
    gpu = has_gpu()
    check_torch(gpu, torch.cuda.is_available(), torch.__version__)
    return torch.device("cuda", world.device_index) if gpu else torch.device("cpu")


def init_groups(world: World, device: torch.device, timeout_s: float) -> None:
    """Create the default group: gloo, with NCCL beside it on GPUs. Collective over all ranks."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout_s)
    )


@dataclass(frozen=True)
class PhaseGroup:
    """A gloo group for small facts between phases; ranks wait here on the CPU.

    A rank that waits inside a device collective holds the device that an engine needs, and the
    watchdog of that collective fires in long rollouts; so phases meet here, with their own limit.
    """

    group: Group
    world: World
    meeting: Meeting = nullcontext
    """Entered around every call; it knows how long ranks may wait there."""

    @classmethod
    def create(cls, world: World, timeout_s: float, meeting: Meeting = nullcontext) -> PhaseGroup:
        """Collective over all ranks."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(group=group, world=world, meeting=meeting)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank. Collective, all ranks."""
        out: list[Any] = [None] * self.world.size
        with self.meeting():
            dist.all_gather_object(out, value, group=self.group)
        return out

    def max(self, values: list[int]) -> list[int]:
        """Element-wise largest over ranks. Collective, all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        with self.meeting():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [int(v) for v in tensor]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over ranks of a host tensor. Collective, all ranks."""
        total = values.clone()
        with self.meeting():
            dist.all_reduce(total, group=self.group)
        return total

    def exchange(self, send: list[bytes], receive_bytes: list[int]) -> list[bytes]:
        """Byte r of ``send`` goes to rank r; sizes are known on both sides. Collective, all ranks.

        Args:
            send: one message per rank, possibly empty.
            receive_bytes: size of the message that each rank sends here.
        """
        outgoing = torch.frombuffer(bytearray(b"".join(send)) or bytearray(1), dtype=torch.uint8)
        outgoing = outgoing[: sum(map(len, send))]
        incoming = torch.empty(sum(receive_bytes), dtype=torch.uint8)
        sizes = [len(b) for b in send]
        with self.meeting():
            dist.all_to_all_single(incoming, outgoing, receive_bytes, sizes, group=self.group)
        raw, out, at = incoming.numpy().tobytes(), [], 0
        for size in receive_bytes:
            out.append(raw[at : at + size])
            at += size
        return out
